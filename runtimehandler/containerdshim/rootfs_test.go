package containerdshim

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/test/priv"
)

func write(t *testing.T, path, text string, mode uint32) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(path, []byte(text), 0o600), unix.Chmod(path, mode)); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestPathsInARootFilesystemStayInIt(t *testing.T) {
	outside := t.TempDir()
	tree := rootTree(t.TempDir())
	for link, target := range map[string]string{"abs": outside, "up": "../../../../../.." + outside, "var": "/run", "loop": "loop"} {
		if err := os.Symlink(target, filepath.Join(string(tree), link)); err != nil {
			t.Fatal(err)
		}
	}
	for destination, want := range map[string]string{"/abs/x": outside + "/x", "/up/x": outside + "/x", "/var/lib": "/run/lib", "/../../x": "/x"} {
		if got, err := tree.makeDir(destination); err != nil || got != want {
			t.Errorf("%s becomes %s, %v; want %s", destination, got, err, want)
		}
	}
	for _, destination := range []string{"/", "/..", "/loop/x"} {
		if got, err := tree.makeDir(destination); err == nil {
			t.Errorf("%s becomes %s", destination, got)
		}
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
		t.Errorf("outside: %v, %v", left, err)
	}
}

func TestCopyIn(t *testing.T) {
	priv.Root(t) // owners are kept
	source, outside := t.TempDir(), filepath.Join(t.TempDir(), "precious")
	write(t, outside, "precious", 0o600)
	write(t, source+"/..2024/key", "value", 0o640)
	if err := errors.Join(os.Symlink("..2024", source+"/..data"), os.Symlink("..data/key", source+"/key"), os.Lchown(source+"/..2024/key", 7, 8)); err != nil {
		t.Fatal(err)
	}
	tree := rootTree(t.TempDir())
	write(t, string(tree)+"/conf/old", "old", 0o644)
	if err := os.Symlink(outside, string(tree)+"/conf/key"); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		to, err := tree.copyIn(source, "/conf")
		if err != nil || to != "/conf" {
			t.Fatalf("%q, %v", to, err)
		}
	}
	if got := read(t, string(tree)+"/conf/key"); got != "value" {
		t.Errorf("through the links: %q", got)
	}
	if got := read(t, outside); got != "precious" {
		t.Errorf("a link in the image was followed: %q", got)
	}
	out, err := exec.Command("stat", "-c", "%a %u %g", string(tree)+"/conf/..2024/key").Output()
	if err != nil || strings.TrimSpace(string(out)) != "640 7 8" {
		t.Errorf("mode and owner: %q, %v", out, err)
	}
	t.Run("too much", func(t *testing.T) {
		big := t.TempDir()
		write(t, big+"/a", strings.Repeat("x", maxCopied), 0o600)
		write(t, big+"/b", "x", 0o600)
		if _, err := tree.copyIn(big, "/big"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("%v", err)
		}
	})
	t.Run("a socket", func(t *testing.T) {
		if _, err := tree.copyIn("/dev/null", "/null"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("a device: %v", err)
		}
	})
}

func TestMakeImage(t *testing.T) {
	priv.Root(t)
	tree := rootTree(t.TempDir())
	write(t, string(tree)+"/usr/bin/big", strings.Repeat("x", 3<<20), 0o4755)
	write(t, string(tree)+"/etc/small", "small", 0o600)
	for i := range 300 {
		write(t, filepath.Join(string(tree), "many", strings.Repeat("n", i%200+1)), "", 0o644)
	}
	file := filepath.Join(t.TempDir(), "rootfs.img")
	const spare = 64 << 20
	if err := tree.makeImage(t.Context(), file, spare); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(file)
	if err != nil || info.Size()%4096 != 0 || info.Size() < spare {
		t.Errorf("%v, %v", info.Size(), err)
	}
	debugfs := func(command string) string {
		out, err := exec.Command("debugfs", "-R", command, file).Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	if got := debugfs("cat /etc/small"); got != "small" {
		t.Errorf("content %q", got)
	}
	if got := debugfs("stat /usr/bin/big"); !strings.Contains(got, "Mode:  04755") || !strings.Contains(got, "Size: 3145728") {
		t.Errorf("stat: %s", got)
	}
	if out, err := exec.Command("e2fsck", "-fn", file).CombinedOutput(); err != nil {
		t.Errorf("e2fsck: %v\n%s", err, out)
	}
	t.Run("a failure leaves no file", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "rootfs.img")
		if err := rootTree("/nonexistent").makeImage(t.Context(), file, 0); err == nil {
			t.Error("no error")
		}
		if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("left: %v", err)
		}
	})
}

func TestReadConfig(t *testing.T) {
	file := filepath.Join(t.TempDir(), "shim.yaml")
	write(t, file, "image: /i\nmemoryMiB: 300\n", 0o600)
	c, err := ReadConfig(file)
	if err != nil || c.Image != "/i" || c.MemoryMiB != 300 || c.Sandboxes == "" {
		t.Errorf("%+v, %v", c, err)
	}
	for _, text := range []string{"imag: /i\n", "image: i\n", "rootBytes: -1\n", "runtimeEndpoint: tcp://x\n", "cpus: many\n", "sandboxes: /a/directory/with/a/rather/long/name\n"} {
		write(t, file, text, 0o600)
		if _, err := ReadConfig(file); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := ReadConfig(file + ".none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is named and not there: %v", err)
	}
}
