package seal_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/crust/internal/seal"
	"crust.dev/crust/test/priv"
)

func target(t *testing.T) string {
	t.Helper()
	priv.Root(t)
	path := filepath.Join(t.TempDir(), "mount")
	t.Cleanup(func() {
		for unix.Unmount(path, unix.MNT_DETACH) == nil {
		}
	})
	return path
}

func TestSeal(t *testing.T) {
	path := target(t)
	for range 2 { // the second time it is sealed already
		if err := seal.Make(path); err != nil {
			t.Fatal(err)
		}
	}
	if intact, err := seal.Intact(path); err != nil || !intact {
		t.Errorf("intact: %v, %v", intact, err)
	}

	t.Run("it looks empty", func(t *testing.T) {
		if entries, err := os.ReadDir(path); err != nil || len(entries) != 0 {
			t.Errorf("entries %v, %v", entries, err)
		}
	})
	t.Run("nobody can write a file, not even root", func(t *testing.T) {
		sub := filepath.Join(path, "sub", "dir")
		if err := os.MkdirAll(sub, 0o777); err != nil {
			t.Fatalf("the kubelet cannot make the directory of a subPath: %v", err)
		}
		for _, dir := range []string{path, sub} {
			if err := os.WriteFile(filepath.Join(dir, "file"), []byte("data"), 0o600); err == nil {
				t.Errorf("a file was written in %s", dir)
			}
			if err := unix.Mknod(filepath.Join(dir, "pipe"), unix.S_IFIFO|0o600, 0); err == nil {
				t.Errorf("a pipe was made in %s", dir)
			}
			if f, err := os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, 0o600); err == nil {
				t.Errorf("an unnamed file was made in %s", dir)
				_ = f.Close()
			}
		}
	})
	t.Run("the kubelet can apply an fsGroup", func(t *testing.T) {
		if err := errors.Join(os.Lchown(path, -1, 7), os.Chmod(path, os.ModeSetgid|0o770)); err != nil {
			t.Error(err)
		}
	})
	t.Run("it goes, and its directory with it", func(t *testing.T) {
		for range 2 {
			if err := seal.Remove(path); err != nil {
				t.Fatal(err)
			}
			if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("target path: %v", err)
			}
		}
	})
}

func TestSealRefuses(t *testing.T) {
	t.Run("a directory with something in it", func(t *testing.T) {
		path := target(t)
		if err := os.MkdirAll(path, 0o750); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(path, "file")
		if err := os.WriteFile(file, []byte("data"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := seal.Make(path); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("make: %v", err)
		}
		if err := seal.Remove(path); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("remove: %v", err)
		}
		if content, err := os.ReadFile(file); err != nil || string(content) != "data" {
			t.Errorf("the file is now %q, %v", content, err)
		}
	})
	t.Run("a mount of somebody else", func(t *testing.T) {
		path := target(t)
		if err := os.MkdirAll(path, 0o750); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("theirs", path, "tmpfs", 0, "size=4k"); err != nil {
			t.Fatal(err)
		}
		if err := seal.Make(path); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("make: %v", err)
		}
		if err := seal.Remove(path); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("remove: %v", err)
		}
	})
	t.Run("a file", func(t *testing.T) {
		path := target(t)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := seal.Make(path); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("make: %v", err)
		}
	})
	t.Run("a missing parent", func(t *testing.T) {
		if err := seal.Make(filepath.Join(target(t), "x", "mount")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("make: %v", err)
		}
	})
}

// TestRemoveWhileShown: a runtime that ignored the deferral has shown the seal to a container.
func TestRemoveWhileShown(t *testing.T) {
	path := target(t)
	if err := seal.Make(path); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "60")
	cmd.Dir = path
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	if err := seal.Remove(path); err != nil {
		t.Errorf("remove: %v", err)
	}
}

func TestLocate(t *testing.T) {
	path := target(t)
	if err := seal.Make(path); err != nil {
		t.Fatal(err)
	}
	id, ok, err := seal.Of(path)
	if err != nil || !ok {
		t.Fatalf("of: %v, %v", ok, err)
	}
	// What the kubelet does for a subPath: the directory, and a bind mount of it elsewhere.
	sub := filepath.Join(path, "a b", "c")
	if err := os.MkdirAll(sub, 0o750); err != nil {
		t.Fatal(err)
	}
	elsewhere := t.TempDir()
	bind := filepath.Join(elsewhere, "volume-subpaths", "0")
	if err := os.MkdirAll(bind, 0o750); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(sub, bind, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(bind, unix.MNT_DETACH) })
	link := filepath.Join(elsewhere, "link")
	if err := os.Symlink(bind, link); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		path, sub string
		ok        bool
	}{
		{path, "", true},
		{sub, "a b/c", true},
		{bind, "a b/c", true},
		{link, "a b/c", true},
		{elsewhere, "", false},
		{elsewhere + "/none", "", false},
		{"/sys", "", false},
	} {
		got, sub, ok, err := seal.Locate(tc.path)
		if err != nil || ok != tc.ok || sub != tc.sub || ok && got != id {
			t.Errorf("Locate(%s) = %v, %q, %v, %v; want %v, %q, %v", tc.path, got, sub, ok, err, id, tc.sub, tc.ok)
		}
	}
}
