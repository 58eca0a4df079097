package reflink_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/engine/enginetest"
	"crust.dev/crust/csiplugin/engine/reflink"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/protocol/rpc/crashpoint"
	"crust.dev/crust/test/priv"
)

func TestMain(m *testing.M) { os.Exit(scratch.Main(m)) }

func TestConformance(t *testing.T) {
	priv.Root(t)
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			open := func(t *testing.T) engine.Engine {
				e, err := reflink.Open(scratch.Filesystem(t, fstype, 320<<20))
				if err != nil {
					t.Fatal(err)
				}
				return e
			}
			enginetest.Run(t, open)
			enginetest.RunChanges(t, open)
		})
	}
}

func TestAFilesystemWithoutSharedBlocksIsRefused(t *testing.T) {
	priv.Root(t)
	dir := scratch.Filesystem(t, "ext4", 32<<20)
	_, err := reflink.Open(dir)
	if !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Fatalf("got %v", err)
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".new-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestOpenRemovesWhatIsUnfinishedAndNothingElse(t *testing.T) {
	priv.Root(t)
	dir := scratch.Filesystem(t, "xfs", 320<<20)
	for _, name := range []string{".new-a", "b", "foreign.txt"} {
		scratch.Sparse(t, filepath.Join(dir, name), 4096)
	}
	if _, err := reflink.Open(dir); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 || entries[0].Name() != "b" || entries[1].Name() != "foreign.txt" {
		t.Errorf("left are %v, %v", entries, err)
	}
}

func TestALoopDeviceIsAUser(t *testing.T) {
	priv.Root(t)
	e, err := reflink.Open(scratch.Filesystem(t, "xfs", 320<<20))
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Create(t.Context(), "a", 1<<20, nil); err != nil {
		t.Fatal(err)
	}
	dev := scratch.Run(t, "losetup", "--find", "--show", e.Path("a"))
	defer scratch.Run(t, "losetup", "--detach", dev[:len(dev)-1])
	if err := e.Delete(t.Context(), "a"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("got %v", err)
	}
}

func TestASymbolicLinkIsNoObject(t *testing.T) {
	priv.Root(t)
	dir := scratch.Filesystem(t, "xfs", 320<<20)
	e, err := reflink.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "a")); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Stat(t.Context(), "a"); err == nil {
		t.Error("a symbolic link was followed")
	}
}

func TestObjectsAreNotCompressed(t *testing.T) {
	priv.Root(t)
	dir := scratch.Filesystem(t, "btrfs", 320<<20)
	scratch.Run(t, "mount", "-o", "remount,compress=zstd", dir)
	e, err := reflink.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Create(t.Context(), "a", 8<<20, nil); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(e.Path("a"), make([]byte, 4<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	scratch.Run(t, "sync", "-f", dir)
	// btrfs's compressed extents are "encoded" to FIEMAP.
	if got := scratch.Run(t, "filefrag", "-v", e.Path("a")); !strings.Contains(got, "last") || strings.Contains(got, "encoded") {
		t.Errorf("the extents are:\n%s", got)
	}
}

// TestNobodyGetsInWhileDataGoes tries to open an object in the middle of erasing it.
func TestNobodyGetsInWhileDataGoes(t *testing.T) {
	priv.Root(t)
	e, err := reflink.Open(scratch.Filesystem(t, "xfs", 320<<20))
	if err != nil {
		t.Fatal(err)
	}
	if err := e.Create(t.Context(), "a", 1<<20, nil); err != nil {
		t.Fatal(err)
	}
	tried := 0
	ctx := crashpoint.With(t.Context(), func(string) {
		tried++
		// Without O_NONBLOCK it would wait.
		f, err := os.OpenFile(e.Path("a"), os.O_RDWR|unix.O_NONBLOCK, 0)
		if !errors.Is(err, unix.EAGAIN) {
			t.Errorf("got %v, %v", f, err)
		}
	})
	if err := e.Erase(ctx, "a"); err != nil || tried != 1 {
		t.Errorf("got %v after %d tries", err, tried)
	}
}
