package loopdev_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/csiplugin/loopdev"
	"crust.dev/crust/test/priv"
)

func TestMain(m *testing.M) { os.Exit(scratch.Main(m)) }

func newFile(t *testing.T) string {
	t.Helper()
	priv.Root(t)
	path := filepath.Join(scratch.Dir(t), "file")
	scratch.Sparse(t, path, 1<<20)
	t.Cleanup(func() {
		if err := loopdev.Detach(context.Background(), path); err != nil {
			t.Error(err)
		}
	})
	return path
}

func attach(t *testing.T, path string, o loopdev.Options) *loopdev.Device {
	t.Helper()
	dev, err := loopdev.Attach(t.Context(), path, o)
	if err != nil {
		t.Fatal(err)
	}
	return dev
}

func find(t *testing.T, path string) []loopdev.Attached {
	t.Helper()
	found, err := loopdev.Find(path)
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestAPassingDeviceGoesWithItsLastUser(t *testing.T) {
	path := newFile(t)
	dev := attach(t, path, loopdev.Options{})
	found := find(t, path)
	if len(found) != 1 || found[0].Path != dev.Path || !found[0].Passing || found[0].ReadOnly || !loopdev.Holds(found, found[0].Rdev) {
		t.Errorf("found %+v", found)
	}
	if !dev.Direct {
		t.Error("the device caches what the file's filesystem caches, too")
	}
	if err := errors.Join(dev.Close(), loopdev.Detach(t.Context(), path)); err != nil {
		t.Error(err)
	}
	if found := find(t, path); len(found) > 0 {
		t.Errorf("left are %+v", found)
	}
}

func TestALastingDeviceStaysUntilItIsDetached(t *testing.T) {
	path := newFile(t)
	for _, readOnly := range []bool{false, true} {
		if err := attach(t, path, loopdev.Options{ReadOnly: readOnly, Lasting: true}).Close(); err != nil {
			t.Fatal(err)
		}
	}
	found := find(t, path)
	if len(found) != 2 || found[0].ReadOnly == found[1].ReadOnly || found[0].Passing || found[1].Passing {
		t.Errorf("found %+v", found)
	}
	for _, a := range found {
		got := strings.TrimSpace(scratch.Run(t, "blockdev", "--getro", a.Path))
		if (got == "1") != a.ReadOnly {
			t.Errorf("%+v, and the kernel says %s", a, got)
		}
	}
	for range 2 {
		if err := loopdev.Detach(t.Context(), path); err != nil {
			t.Fatal(err)
		}
	}
	if found := find(t, path); len(found) > 0 {
		t.Errorf("left are %+v", found)
	}
}

func TestFilesAreToldApartByTheirInode(t *testing.T) {
	path := newFile(t)
	other := filepath.Join(scratch.Dir(t), filepath.Base(path))
	scratch.Sparse(t, other, 1<<20)
	dev := attach(t, path, loopdev.Options{})
	defer dev.Close()
	if found := find(t, other); len(found) > 0 {
		t.Errorf("another file of that name has %+v", found)
	}
	// The same name for another file, and another way to the same file.
	moved := filepath.Join(scratch.Dir(t), "moved")
	if err := os.Rename(path, moved); err != nil {
		t.Fatal(err)
	}
	if found := find(t, moved); len(found) != 1 {
		t.Errorf("under its new name the file has %+v", found)
	}
	if found := find(t, path); len(found) > 0 {
		t.Errorf("a file that is not there has %+v", found)
	}
}

func TestADeviceInUseIsNamed(t *testing.T) {
	path := newFile(t)
	dev := attach(t, path, loopdev.Options{Lasting: true})
	err := loopdev.Detach(t.Context(), path)
	if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), dev.Path) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := loopdev.Detach(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

func TestGrowFollowsTheFile(t *testing.T) {
	path := newFile(t)
	dev := attach(t, path, loopdev.Options{})
	defer dev.Close()
	if err := errors.Join(os.Truncate(path, 4<<20), loopdev.Grow(path)); err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(scratch.Run(t, "blockdev", "--getsize64", dev.Path)); got != "4194304" {
		t.Errorf("the device has %s bytes", got)
	}
}

// TestManyAttachAtOnce lets several race for free devices.
func TestManyAttachAtOnce(t *testing.T) {
	var all sync.WaitGroup
	for range 8 {
		path := newFile(t)
		all.Go(func() {
			for range 5 {
				dev, err := loopdev.Attach(t.Context(), path, loopdev.Options{})
				if err != nil {
					t.Error(err)
					return
				}
				if found, err := loopdev.Find(path); err != nil || len(found) != 1 || found[0].Path != dev.Path {
					t.Errorf("found %+v, %v, want %s", found, err, dev.Path)
				}
				if err := errors.Join(dev.Close(), loopdev.Detach(t.Context(), path)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

func TestWhatIsNoFileIsNotAttached(t *testing.T) {
	priv.Root(t)
	link := filepath.Join(scratch.Dir(t), "link")
	if err := os.Symlink("/etc/passwd", link); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, filepath.Join(scratch.Dir(t), "none")} {
		if dev, err := loopdev.Attach(t.Context(), path, loopdev.Options{}); err == nil {
			t.Errorf("%s was attached to %s", path, dev.Path)
			_ = dev.Close()
		}
	}
}
