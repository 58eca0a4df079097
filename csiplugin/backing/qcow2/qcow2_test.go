package qcow2_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/backing/backingtest"
	"crust.dev/crust/csiplugin/backing/qcow2"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

var limits = qcow2.Limits{VirtualSize: 64 * gib}

func inspect(image []byte) (qcow2.Info, error) {
	return qcow2.Inspect(bytes.NewReader(image), int64(len(image)), limits)
}

func TestAttacksAreRefused(t *testing.T) {
	for _, attack := range backingtest.Attacks("/etc/shadow") {
		t.Run(attack.Name, func(t *testing.T) {
			if attack.Declared == backing.Raw {
				format, err := qcow2.Container(bytes.NewReader(attack.Image), int64(len(attack.Image)))
				if err != nil || format == "" {
					t.Errorf("%s: taken for a raw disk (%v)", attack.CVE, err)
				}
				return
			}
			_, err := inspect(attack.Image)
			if !errors.Is(err, errdefs.ErrInvalidArgument) && !errors.Is(err, errdefs.ErrOutOfRange) {
				t.Errorf("%s: %v", attack.CVE, err)
			}
		})
	}
}

func TestWhatTheAttacksAreMadeOfIsGood(t *testing.T) {
	for name, image := range map[string][]byte{
		"with data":              backingtest.QCOW2(mib, bytes.Repeat([]byte("data"), backingtest.Cluster)),
		"without":                backingtest.QCOW2(512*mib, nil),
		"with names of features": func() []byte { i := backingtest.QCOW2(mib, nil); backingtest.Extension(i, 0x6803F857, "x"); return i }(),
	} {
		if _, err := inspect(image); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, raw := range map[string][]byte{"zeros": make([]byte, 1<<20), "a text": []byte("hello, world\n"), "nothing": nil, "a boot sector": append(make([]byte, 510), 0x55, 0xAA)} {
		if format, err := qcow2.Container(bytes.NewReader(raw), int64(len(raw))); err != nil || format != "" {
			t.Errorf("%s looks like %q, %v", name, format, err)
		}
	}
}

// run runs qemu-img, on files of the test only.
func run(t testing.TB, args ...string) {
	t.Helper()
	for try := 0; ; try++ {
		out, err := exec.Command("qemu-img", args...).CombinedOutput()
		if err == nil {
			return
		}
		// To encrypt, QEMU measures how fast the processor is, and fails if the kernel's clock of that has not ticked meanwhile.
		if try == 100 || !bytes.Contains(out, []byte("accurate CPU usage")) {
			t.Fatalf("qemu-img %v (Debian: qemu-utils): %v\n%s", args, err, out)
		}
	}
}

// TestQEMUsImagesAreAccepted has QEMU make images in all the ways that are in use.
func TestQEMUsImagesAreAccepted(t *testing.T) {
	dir := t.TempDir()
	raw := filepath.Join(dir, "raw")
	var content []byte
	for i := range mib / 16 {
		content = fmt.Appendf(content, "%015d\n", i)
	}
	content = append(content, make([]byte, mib)...)
	content = append(content, "the end, which is not at the end of a cluster"...)
	content = append(content, make([]byte, 512-len(content)%512)...)
	if err := os.WriteFile(raw, content, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, args := range map[string][]string{
		"version 3":             nil,
		"version 2":             {"-o", "compat=0.10"},
		"zlib":                  {"-c"},
		"zstd":                  {"-c", "-o", "compression_type=zstd"},
		"zlib in small pieces":  {"-c", "-o", "cluster_size=512"},
		"zlib in large pieces":  {"-c", "-o", "cluster_size=2M"},
		"small clusters":        {"-o", "cluster_size=512"},
		"large clusters":        {"-o", "cluster_size=2M"},
		"lazy refcounts":        {"-o", "lazy_refcounts=on"},
		"narrow refcounts":      {"-o", "refcount_bits=1"},
		"wide refcounts":        {"-o", "refcount_bits=64"},
		"preallocated metadata": {"-o", "preallocation=metadata"},
		"preallocated":          {"-o", "preallocation=falloc"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, "image")
			run(t, append(append([]string{"convert", "-f", "raw", "-O", "qcow2"}, args...), raw, path)...)
			image, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			info, err := inspect(image)
			if err != nil {
				t.Fatal(err)
			}
			if info.VirtualSize != int64(len(content)) {
				t.Errorf("virtual size %d, want %d", info.VirtualSize, len(content))
			}
			if info.Compressed > 0 != (len(args) > 0 && args[0] == "-c") {
				t.Errorf("%d compressed clusters", info.Compressed)
			}
			// What is after the last data is nobody's loss; that is how these end.
			if name == "preallocated metadata" || name == "preallocated" || name == "large clusters" {
				return
			}
			for _, keep := range []int{len(image) / 2, len(image) - max(600, len(image)/10)} {
				if _, err := inspect(image[:keep]); err == nil {
					t.Errorf("cut off at %d of %d bytes, it is accepted", keep, len(image))
				}
			}
		})
	}
}

func TestAnEmptyImageOfQEMUIsAccepted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image")
	run(t, "create", "-q", "-f", "qcow2", path, "10G")
	image, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := inspect(image); err != nil || info.VirtualSize != 10*gib || info.Data != 0 {
		t.Errorf("%+v, %v", info, err)
	}
}

// TestWhatQEMUCanPutIntoAnImageIsRefused has QEMU itself make what golden images have no need of.
func TestWhatQEMUCanPutIntoAnImageIsRefused(t *testing.T) {
	dir := t.TempDir()
	base := filepath.Join(dir, "base")
	run(t, "create", "-q", "-f", "raw", base, "1M")
	for name, make := range map[string]func(t *testing.T, path string){
		"a backing file": func(t *testing.T, path string) { run(t, "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", path) },
		"an external data file": func(t *testing.T, path string) {
			run(t, "create", "-q", "-f", "qcow2", "-o", "data_file="+path+".data", path, "1M")
		},
		"a raw external data file": func(t *testing.T, path string) {
			run(t, "create", "-q", "-f", "qcow2", "-o", "data_file="+path+".data,data_file_raw=on", path, "1M")
		},
		"extended L2 entries": func(t *testing.T, path string) {
			run(t, "create", "-q", "-f", "qcow2", "-o", "extended_l2=on", path, "1M")
		},
		"a snapshot": func(t *testing.T, path string) {
			run(t, "create", "-q", "-f", "qcow2", path, "1M")
			run(t, "snapshot", "-c", "s", path)
		},
		"a bitmap": func(t *testing.T, path string) {
			run(t, "create", "-q", "-f", "qcow2", path, "1M")
			run(t, "bitmap", "--add", "-f", "qcow2", path, "b")
		},
		"encryption": func(t *testing.T, path string) {
			run(t, "create", "-q", "-f", "qcow2", "--object", "secret,id=s,data=x", "-o", "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10", path, "1M")
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(dir, "image-"+filepath.Base(t.Name()))
			make(t, path)
			image, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := inspect(image); !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// FuzzInspect changes good images and attacks. What is accepted must be within its limits. That QEMU opens nothing else for
// it is what package convert's fuzz target is about.
func FuzzInspect(f *testing.F) {
	bases := [][]byte{backingtest.QCOW2(mib, []byte("data")), backingtest.QCOW2(512*mib, bytes.Repeat([]byte("data"), backingtest.Cluster/2))}
	for _, attack := range backingtest.Attacks("/etc/shadow") {
		bases = append(bases, attack.Image)
	}
	for i := range bases {
		f.Add(uint8(i), []byte{0, 0, 0, backingtest.Size, 0, 0, 0, 0, 0, 1, 0, 0}, uint32(1<<30))
	}
	// A change is where, in four bytes, and what, in eight.
	f.Fuzz(func(t *testing.T, base uint8, changes []byte, size uint32) {
		image := bytes.Clone(bases[int(base)%len(bases)])
		for ; len(changes) >= 12; changes = changes[12:] {
			if at := int(binary.BigEndian.Uint32(changes)); at <= len(image)-8 {
				copy(image[at:], changes[4:12])
			}
		}
		image = image[:min(len(image), int(size))]
		info, err := inspect(image)
		switch {
		case err == nil && (info.VirtualSize <= 0 || info.VirtualSize > limits.VirtualSize || info.VirtualSize%512 != 0 || info.ClusterSize < 512 || info.ClusterSize > 2*mib):
			t.Fatalf("accepted with %+v", info)
		case err == nil && info.Data-info.Compressed*info.ClusterSize > int64(len(image))+info.ClusterSize:
			t.Fatalf("%d bytes are accepted with %d bytes of data", len(image), info.Data)
		case err != nil && !errors.Is(err, errdefs.ErrInvalidArgument) && !errors.Is(err, errdefs.ErrOutOfRange):
			t.Fatalf("an error of no kind: %v", err)
		}
		if _, err := qcow2.Container(bytes.NewReader(image), int64(len(image))); err != nil {
			t.Fatal(err)
		}
	})
}
