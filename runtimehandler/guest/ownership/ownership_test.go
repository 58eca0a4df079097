package ownership_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/guest/ownership"
	"crust.dev/crust/test/priv"
)

const gid = 4711

// describe lists a tree: path, owner, group, mode.
func describe(t *testing.T, root string) string {
	t.Helper()
	var lines []string
	err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		lines = append(lines, fmt.Sprintf("%s %d:%d %o", rel, st.Uid, st.Gid, st.Mode&0o7777))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

// tree makes a directory with what is special.
func tree(t *testing.T) string {
	t.Helper()
	outside := filepath.Join(t.TempDir(), "outside")
	root := t.TempDir()
	at := func(name string) string { return filepath.Join(root, name) }
	err := errors.Join(
		os.WriteFile(outside, nil, 0o600),
		os.Chmod(root, 0o700),
		os.MkdirAll(at("dir/sub"), 0o700),
		os.WriteFile(at("dir/file"), nil, 0o400),
		os.WriteFile(at("dir/sub/suid"), nil, 0o700),
		unix.Chmod(at("dir/sub/suid"), 0o4711),
		unix.Chmod(at("dir/sub"), 0o1700),
		os.Link(at("dir/file"), at("hard")),
		os.Symlink(outside, at("link")),
		os.Symlink("dir", at("dirlink")),
		unix.Mkfifo(at("fifo"), 0o200),
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if got := describe(t, outside); got != ". 0:0 600" {
			t.Errorf("outside: %s", got)
		}
	})
	return root
}

func TestApply(t *testing.T) {
	priv.Root(t)
	root := tree(t)
	fits := func() bool {
		t.Helper()
		fits, err := ownership.Fits(root, gid)
		if err != nil {
			t.Fatal(err)
		}
		return fits
	}
	if fits() {
		t.Error("it fits before")
	}
	want := strings.Join([]string{
		". 0:4711 2770", "dir 0:4711 2770", "dir/file 0:4711 660", "dir/sub 0:4711 3770", "dir/sub/suid 0:4711 4771",
		"dirlink 0:4711 777", "fifo 0:4711 660", "hard 0:4711 660", "link 0:4711 777",
	}, "\n")
	for range 2 {
		if err := ownership.Apply(t.Context(), root, gid); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, describe(t, root)); diff != "" {
			t.Error(diff)
		}
		if !fits() {
			t.Error("it does not fit afterwards")
		}
	}
	for _, mode := range []uint32{0o770, 0o2750, 0o2700} {
		if err := unix.Chmod(root, mode); err != nil {
			t.Fatal(err)
		}
		if fits() {
			t.Errorf("a root of mode %o fits", mode)
		}
	}
}

// TestInterrupted: a walk that was not finished does not look finished.
func TestInterrupted(t *testing.T) {
	priv.Root(t)
	root := tree(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := ownership.Apply(ctx, root, gid); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if fits, err := ownership.Fits(root, gid); err != nil || fits {
		t.Errorf("it fits: %v, %v", fits, err)
	}
}

// TestDeepTree: paths longer than the kernel takes are no obstacle.
func TestDeepTree(t *testing.T) {
	priv.Root(t)
	root := t.TempDir()
	fd, err := unix.Open(root, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	const depth = 100
	name := strings.Repeat("x", 100)
	for range depth {
		if err := unix.Mkdirat(fd, name, 0o700); err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		_ = unix.Close(fd)
		if err != nil {
			t.Fatal(err)
		}
		fd = next
	}
	defer unix.Close(fd)
	if err := ownership.Apply(t.Context(), root, gid); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Gid != gid {
		t.Errorf("the deepest directory has group %d, %v", st.Gid, err)
	}
}
