package convert_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/backing/backingtest"
	"crust.dev/crust/csiplugin/backing/convert"
	"crust.dev/crust/csiplugin/backing/qcow2"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

const mib = 1 << 20

func TestMain(m *testing.M) {
	convert.Main()
	os.Exit(scratch.Main(m))
}

// bench is a directory to convert in, which only root may look into.
func bench(t testing.TB) (dir string, c *convert.Converter) {
	t.Helper()
	priv.Root(t)
	dir = filepath.Join(scratch.Dir(t), "images")
	must(t, os.Mkdir(dir, 0o700))
	return dir, convert.New(convert.Config{Dir: dir})
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

// disk is what a guest's disk may hold: data and holes.
func disk(size int) []byte {
	r := rand.NewChaCha8([32]byte{})
	b := make([]byte, size)
	_, _ = r.Read(b[:size/4])
	_, _ = r.Read(b[size/2 : size/2+5000])
	_, _ = r.Read(b[size-512:])
	return b
}

func write(t testing.TB, path string, content []byte) convert.Image {
	t.Helper()
	must(t, os.WriteFile(path, content, 0o600))
	return convert.Image{Path: path, Format: backing.Raw}
}

func TestThereAndBack(t *testing.T) {
	dir, c := bench(t)
	want := disk(8 * mib)
	raw := write(t, filepath.Join(dir, "raw"), want)
	packed := convert.Image{Path: filepath.Join(dir, "packed"), Format: backing.QCOW2}
	var done int64
	must(t, c.Convert(t.Context(), convert.Job{From: raw, To: packed, VirtualSize: 8 * mib, Progress: func(n int64) { done = n }}))
	if done != 8*mib {
		t.Errorf("progress ended with %d", done)
	}
	f, err := os.Open(packed.Path)
	must(t, err)
	defer f.Close()
	info, err := f.Stat()
	must(t, err)
	if got, err := qcow2.Inspect(f, info.Size(), qcow2.Limits{VirtualSize: 8 * mib}); err != nil || got.VirtualSize != 8*mib {
		t.Errorf("%+v, %v", got, err)
	}
	unpacked := convert.Image{Path: filepath.Join(dir, "unpacked"), Format: backing.Raw}
	must(t, c.Convert(t.Context(), convert.Job{From: packed, To: unpacked, VirtualSize: 8 * mib}))
	got, err := os.ReadFile(unpacked.Path)
	must(t, err)
	if !bytes.Equal(want, got) {
		t.Error("the content has changed")
	}
	var st unix.Stat_t
	must(t, unix.Stat(unpacked.Path, &st))
	if st.Uid != 0 || st.Blocks*512 > 5*mib {
		t.Errorf("it belongs to %d and takes %d bytes", st.Uid, st.Blocks*512)
	}
}

// TestTheChildCanDoNothingElse runs a shell in the child's place.
func TestTheChildCanDoNothingElse(t *testing.T) {
	dir, c := bench(t)
	in, out := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	write(t, in, []byte("in"))
	write(t, out, nil)
	must(t, os.Chmod(in, 0o444))
	for name, row := range map[string]struct{ script, want string }{
		"it sees its files and programs":    {"for f in /* /.[a-z]*; do [ -e $f ] && echo -n $f' '; done; true", "/bin /in /lib /lib64 /out /sbin /usr"},
		"it can read what it gets":          {"read -r x < /in; echo $x", "in"},
		"it cannot write what it gets":      {"echo x >> /in && echo no || echo refused", "refused"},
		"it cannot write elsewhere":         {"echo x > /usr/x && echo no; echo x > /x && echo no; echo refused", "refused"},
		"it has no rights":                  {"id -u; id -g; id -G", "65534\n65534\n65534"},
		"it gets none":                      {"setpriv --dump | grep -e no_new_privs -e 'Inheritable cap' -e 'Ambient cap'; mount -t tmpfs x /usr 2>/dev/null || echo mount refused", "no_new_privs: 1\nInheritable capabilities: [none]\nAmbient capabilities: [none]\nmount refused"},
		"it is alone":                       {"echo $$; kill -0 2 && echo no || echo alone", "1\nalone"},
		"it inherits nothing":               {"for n in 3 4 5 6 7 8 9; do (true <&$n) && echo $n; done; echo none", "none"},
		"its files cannot grow for ever":    {"ulimit -f", "2097152"},
		"its memory is limited":             {"ulimit -v", "4194304"},
		"its environment is not the host's": {"[ -z \"$CRUST_CONVERT_ORDER$HOME$SECRET\" ] && echo clean", "clean"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("SECRET", "1")
			got, err := c.See(t.Context(), in, out, "/out", "/bin/sh", "-c", row.script)
			if err != nil {
				t.Fatal(err)
			}
			if got = strings.TrimSpace(got); got != row.want && strings.Join(strings.Fields(got), " ") != row.want {
				t.Errorf("got\n%s\nwant\n%s", got, row.want)
			}
		})
	}
	t.Run("it has no network", func(t *testing.T) {
		s := backingtest.Serve(t, backingtest.File([]byte("x")))
		_, port, _ := strings.Cut(strings.TrimPrefix(s.URL, "http://"), ":")
		priv.Program(t, "bash")
		got, err := c.See(t.Context(), in, out, "/out", "/bin/bash", "-c", "(exec 3<>/dev/tcp/127.0.0.1/"+port+") 2>/dev/null && echo connected || echo unreachable")
		must(t, err)
		if strings.TrimSpace(got) != "unreachable" {
			t.Errorf("got %q", got)
		}
	})
}

func TestAFailureLeavesNothing(t *testing.T) {
	dir, c := bench(t)
	raw := write(t, filepath.Join(dir, "raw"), disk(mib))
	raw.Format = backing.QCOW2 // it is not
	to := convert.Image{Path: filepath.Join(dir, "to"), Format: backing.Raw}
	err := c.Convert(t.Context(), convert.Job{From: raw, To: to, VirtualSize: mib})
	if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "qcow2 format") {
		t.Errorf("got %v", err)
	}
	if _, err := os.Lstat(to.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("something is left: %v", err)
	}
}

func TestAConversionIsStopped(t *testing.T) {
	dir, c := bench(t)
	raw := write(t, filepath.Join(dir, "raw"), disk(4*mib))
	to := convert.Image{Path: filepath.Join(dir, "to"), Format: backing.QCOW2}
	job := convert.Job{From: raw, To: to, VirtualSize: 4 * mib}
	for name, row := range map[string]struct {
		c    *convert.Converter
		ctx  func() context.Context
		job  func(*convert.Job)
		want error
	}{
		"when there is no space": {c, t.Context, func(j *convert.Job) { j.Space = func(context.Context) (int64, error) { return 0, nil } }, errdefs.ErrResourceExhausted},
		"when it takes too long": {convert.New(convert.Config{Dir: dir, MaxTime: time.Nanosecond}), t.Context, func(*convert.Job) {}, errdefs.ErrFailedPrecondition},
		"when nobody wants it":   {c, func() context.Context { ctx, cancel := context.WithCancel(t.Context()); cancel(); return ctx }, func(*convert.Job) {}, context.Canceled},
		"when it writes more than it may": {c, t.Context, func(j *convert.Job) {
			j.To.Format, j.From.Format = backing.Raw, backing.Raw
			j.VirtualSize = mib
		}, errdefs.ErrFailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			j := job
			row.job(&j)
			if err := row.c.Convert(row.ctx(), j); !errors.Is(err, row.want) {
				t.Errorf("got %v, want %v", err, row.want)
			}
			if _, err := os.Lstat(to.Path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("something is left: %v", err)
			}
		})
	}
}

func TestWithoutQEMUTheErrorSaysWhatToInstall(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if err := convert.New(convert.Config{}).Ready(); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "qemu-utils") {
		t.Errorf("got %v", err)
	}
}

// witness tells whether somebody opens a file.
type witness struct {
	fd   int
	path string
}

func watch(t testing.TB, path string) witness {
	t.Helper()
	must(t, os.WriteFile(path, make([]byte, mib), 0o666), os.Chmod(path, 0o666))
	fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(fd) })
	_, err = unix.InotifyAddWatch(fd, path, unix.IN_OPEN|unix.IN_ACCESS|unix.IN_MODIFY)
	must(t, err)
	return witness{fd, path}
}

func (w witness) touched(t testing.TB) bool {
	t.Helper()
	n, err := unix.Read(w.fd, make([]byte, 64<<10))
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	return n > 0
}

const canary = "/canary"

// open has qemu-img, with the child's rights, open and read an image where a file at canary would show that it opens that too.
func open(t testing.TB, c *convert.Converter, dir string, w witness, image []byte) error {
	t.Helper()
	path := filepath.Join(dir, "image")
	must(t, os.WriteFile(path, image, 0o444), os.Chmod(path, 0o444))
	for _, argv := range [][]string{
		{"qemu-img", "info", "-f", "qcow2", "/in"},
		{"qemu-img", "compare", "-f", "qcow2", "-F", "qcow2", "/in", "/in"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		_, err := c.See(ctx, path, w.path, canary, argv...)
		cancel()
		if err != nil && argv[1] == "info" {
			return err
		}
	}
	return nil
}

// TestTheWitnessSees proves that the fuzz target below could fail.
func TestTheWitnessSees(t *testing.T) {
	dir, c := bench(t)
	for name, image := range map[string]func(image []byte){
		"a backing file":        func(i []byte) { backingtest.Backing(i, canary); backingtest.Extension(i, 0xE2792ACA, "raw") },
		"an external data file": func(i []byte) { backingtest.External(i, canary) },
	} {
		t.Run(name, func(t *testing.T) {
			w := watch(t, filepath.Join(dir, "secret"))
			i := backingtest.QCOW2(mib, nil)
			image(i)
			err := open(t, c, dir, w, i)
			if !w.touched(t) {
				t.Errorf("an image that refers to it was opened, and nobody saw it (%v)", err)
			}
		})
	}
}

// FuzzWhatIsAcceptedOpensNothingElse lets QEMU open what the inspector accepts: it opens it, and nothing else.
func FuzzWhatIsAcceptedOpensNothingElse(f *testing.F) {
	dir, c := bench(f)
	bases := [][]byte{backingtest.QCOW2(mib, []byte("data")), backingtest.QCOW2(4*mib, bytes.Repeat([]byte("data"), backingtest.Cluster/2))}
	for _, attack := range backingtest.Attacks(canary) {
		if attack.Declared == backing.QCOW2 {
			bases = append(bases, attack.Image)
		}
	}
	for i := range bases {
		f.Add(uint8(i), uint16(0), uint64(0x514649FB00000003))
	}
	f.Add(uint8(0), uint16(backingtest.Size), uint64(512))
	f.Add(uint8(1), uint16(backingtest.Extensions), uint64(0x6803F85700000008))
	f.Fuzz(func(t *testing.T, base uint8, at uint16, value uint64) {
		image := bytes.Clone(bases[int(base)%len(bases)])
		if int(at) <= len(image)-8 {
			backingtest.Put64(image, int(at), value)
		}
		if _, err := qcow2.Inspect(bytes.NewReader(image), int64(len(image)), qcow2.Limits{VirtualSize: 1 << 40}); err != nil {
			return
		}
		w := watch(t, filepath.Join(dir, "secret"))
		if err := open(t, c, dir, w, image); err != nil {
			t.Errorf("the inspector accepts what QEMU does not open: %v", err)
		}
		if w.touched(t) {
			t.Error("QEMU opens another file for an image that the inspector accepts")
		}
	})
}
