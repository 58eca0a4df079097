package pool_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/engine/reflink"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/csiplugin/pool"
	"crust.dev/crust/protocol/rpc/crashpoint"
	"crust.dev/crust/test/priv"
)

// holdVariable names a pool that the test binary, run again, opens and holds. With placeVariable it kills itself while it
// opens the pool, in the place of that number.
const (
	holdVariable  = "CRUST_TEST_HOLD_POOL"
	placeVariable = "CRUST_TEST_DIE_AT"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(holdVariable); dir != "" {
		hold(dir)
	}
	os.Exit(scratch.Main(m))
}

func hold(dir string) {
	ctx := context.Background()
	if n, err := strconv.Atoi(os.Getenv(placeVariable)); err == nil {
		ctx = crashpoint.With(ctx, func(string) {
			if n--; n < 0 {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		})
	}
	p, err := pool.Open(ctx, config(dir, io.Discard))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(p.ID())
	select {}
}

func config(dir string, log interface{ Write([]byte) (int, error) }) pool.Config {
	return pool.Config{Dir: dir, ImageSize: pool.MinImageSize, Log: slog.New(slog.NewTextHandler(log, nil))}
}

func open(t *testing.T, dir string) (*pool.Pool, string) {
	t.Helper()
	var log bytes.Buffer
	p, err := pool.Open(t.Context(), config(dir, &log))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closePool(t, p) })
	return p, log.String()
}

func closePool(t *testing.T, p *pool.Pool) {
	t.Helper()
	if err := p.Close(context.Background()); err != nil && !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}

// places are the filesystems that a pool directory can be on.
func places(t *testing.T, f func(t *testing.T, dir string, image bool)) {
	priv.Root(t)
	for _, fstype := range []string{"xfs", "btrfs", "ext4"} {
		t.Run(fstype, func(t *testing.T) {
			f(t, filepath.Join(scratch.Filesystem(t, fstype, 400<<20), "pool"), fstype == "ext4")
		})
	}
}

func TestAPoolKeepsItsIdentity(t *testing.T) {
	places(t, func(t *testing.T, dir string, image bool) {
		p, log := open(t, dir)
		id := p.ID()
		if got := strings.Contains(log, "trial use"); got != image {
			t.Errorf("the log says %q", log)
		}
		if _, err := reflink.Open(p.Objects()); err != nil {
			t.Errorf("no place for objects: %v", err)
		}
		closePool(t, p)
		if m, err := hostmount.At(filepath.Join(dir, "mnt")); m != nil || err != nil {
			t.Errorf("the image is still mounted: %v, %v", m, err)
		}
		p, _ = open(t, dir)
		if p.ID() != id || p.Catalog().Pool() != id {
			t.Errorf("reopened, the pool is %s and its catalog of %s, it was %s", p.ID(), p.Catalog().Pool(), id)
		}
	})
}

func TestTheImageStaysMountedWhileItIsInUse(t *testing.T) {
	priv.Root(t)
	dir := scratch.Filesystem(t, "ext4", 400<<20)
	p, _ := open(t, dir)
	user, err := os.Create(filepath.Join(p.Objects(), "in-use"))
	if err != nil {
		t.Fatal(err)
	}
	closePool(t, p)
	before, err := hostmount.At(filepath.Join(dir, "mnt"))
	if before == nil || err != nil {
		t.Fatalf("the image is not mounted any more: %v", err)
	}
	again, _ := open(t, dir)
	after, err := hostmount.At(filepath.Join(dir, "mnt"))
	if err != nil || after == nil || *after != *before {
		t.Errorf("the next process has not taken the mount over: %v, %v, %v", before, after, err)
	}
	_ = user.Close()
	closePool(t, again)
}

func TestAMountOfSomethingElseIsNotTakenForTheImage(t *testing.T) {
	priv.Root(t)
	dir := scratch.Filesystem(t, "ext4", 400<<20)
	p, _ := open(t, dir)
	closePool(t, p)
	scratch.Run(t, "mount", "-t", "tmpfs", "tmpfs", filepath.Join(dir, "mnt"))
	defer scratch.Run(t, "umount", filepath.Join(dir, "mnt"))
	_, err := pool.Open(t.Context(), config(dir, os.Stderr))
	if !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("got %v", err)
	}
}

func TestASecondProcessIsToldWhoHasThePool(t *testing.T) {
	places(t, func(t *testing.T, dir string, _ bool) {
		holder := exec.Command(os.Args[0])
		holder.Env = append(os.Environ(), holdVariable+"="+dir)
		out, err := holder.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := holder.Start(); err != nil {
			t.Fatal(err)
		}
		line := make([]byte, 64)
		n, err := out.Read(line)
		if err != nil {
			t.Fatal(err)
		}
		id := strings.TrimSpace(string(line[:n]))

		_, err = pool.Open(t.Context(), config(dir, os.Stderr))
		if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), fmt.Sprintf("process %d ", holder.Process.Pid)) {
			t.Errorf("got %v", err)
		}
		// A process that is killed leaves the lock, and perhaps the mount; the next one takes over.
		_ = holder.Process.Kill()
		_ = holder.Wait()
		p, _ := open(t, dir)
		if string(p.ID()) != id {
			t.Errorf("the pool is %s, it was %s", p.ID(), id)
		}
	})
}

func TestAPoolThatIsRefusedIsLeftAsItIs(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(t *testing.T, dir string)
		want error
	}{
		"a newer format": {func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "pool.json"), `{"format":2,"pool":{"new":"shape"}}`)
		}, errdefs.ErrFailedPrecondition},
		"a newer format of the old shape": {func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "pool.json"), `{"format":2,"pool":"0123456789ab"}`)
		}, errdefs.ErrFailedPrecondition},
		"a damaged pool.json": {func(t *testing.T, dir string) { write(t, filepath.Join(dir, "pool.json"), `{"for`) }, errdefs.ErrDataLoss},
		"a damaged catalog":   {func(t *testing.T, dir string) { write(t, filepath.Join(dir, "catalog.db"), "") }, errdefs.ErrDataLoss},
		"a missing catalog":   {func(t *testing.T, dir string) { remove(t, filepath.Join(dir, "catalog.db")) }, errdefs.ErrDataLoss},
		"neither catalog nor pool.json, but objects": {func(t *testing.T, dir string) {
			remove(t, filepath.Join(dir, "catalog.db"))
			remove(t, filepath.Join(dir, "pool.json"))
			write(t, filepath.Join(dir, "objects", "a"), "data")
		}, errdefs.ErrDataLoss},
		"another pool's catalog": {func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "pool.json"), `{"format":1,"pool":"0123456789ab"}`)
		}, errdefs.ErrFailedPrecondition},
	} {
		t.Run(name, func(t *testing.T) {
			priv.Root(t)
			dir := scratch.Filesystem(t, "xfs", 320<<20)
			p, _ := open(t, dir)
			closePool(t, p)
			c.do(t, dir)
			before := content(t, dir)
			if _, err := pool.Open(t.Context(), config(dir, os.Stderr)); !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if after := content(t, dir); after != before {
				t.Errorf("it was changed:\n%s\nwas\n%s", after, before)
			}
		})
	}
}

// TestAnInterruptedStartIsFinishedByTheNext kills a process that makes a pool, in each place in turn.
func TestAnInterruptedStartIsFinishedByTheNext(t *testing.T) {
	places(t, func(t *testing.T, parent string, _ bool) {
		if err := os.Mkdir(parent, 0o700); err != nil {
			t.Fatal(err)
		}
		for n := 0; ; n++ {
			dir := filepath.Join(parent, fmt.Sprint(n))
			killed := dieAt(t, dir, n)
			p, _ := open(t, dir)
			if _, err := reflink.Open(p.Objects()); err != nil {
				t.Errorf("killed in place %d: %v", n, err)
			}
			closePool(t, p)
			if left, _ := filepath.Glob(filepath.Join(dir, "*.new")); len(left) > 0 {
				t.Errorf("killed in place %d: left behind: %v", n, left)
			}
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if !killed {
				if n < 3 {
					t.Errorf("there were only %d places to be killed in", n)
				}
				return
			}
		}
	})
}

// dieAt lets another process make a pool and die in the n-th place. It reports false if there are not so many places.
func dieAt(t *testing.T, dir string, n int) bool {
	t.Helper()
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), holdVariable+"="+dir, placeVariable+"="+strconv.Itoa(n))
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	// What it prints first is the pool's id: then it has got through.
	line := make([]byte, 64)
	got, _ := out.Read(line)
	_ = child.Process.Kill()
	_ = child.Wait()
	return got == 0
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

// content describes all files but the lock.
func content(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Name() == "lock" {
			return err
		}
		raw, err := os.ReadFile(path)
		fmt.Fprintf(&b, "%s %d %x\n", path, len(raw), bytes.TrimRight(raw, "\x00"))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}
