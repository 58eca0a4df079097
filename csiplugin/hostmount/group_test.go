package hostmount_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/test/priv"
)

const gid = 4711

func TestGiveToGroup(t *testing.T) {
	priv.Root(t)
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tree := map[string]fs.FileMode{
		".": fs.ModeDir | 0o755, "d": fs.ModeDir | 0o700, "d/sub": fs.ModeDir,
		"f": 0o600, "d/exec": 0o755, "d/sub/deep": 0o000, "suid": fs.ModeSetuid | 0o755,
	}
	for _, name := range []string{"d", "d/sub"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for name, mode := range tree {
		path := filepath.Join(dir, name)
		if !mode.IsDir() {
			if err := os.WriteFile(path, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}

	for range 2 {
		if err := hostmount.GiveToGroup(t.Context(), dir, gid); err != nil {
			t.Fatal(err)
		}
	}
	for name, mode := range tree {
		want := mode | 0o660
		if mode.IsDir() {
			want |= fs.ModeSetgid | 0o770
		}
		info, err := os.Lstat(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want || groupOf(info) != gid {
			t.Errorf("%s has mode %v and group %d, want %v and %d", name, info.Mode(), groupOf(info), want, gid)
		}
	}
	if info, err := os.Lstat(filepath.Join(dir, "link")); err != nil || groupOf(info) != gid {
		t.Errorf("the link: %v, %v", info, err)
	}
	if info, err := os.Stat(outside); err != nil || info.Mode() != 0o600 || groupOf(info) == gid {
		t.Errorf("a link was followed: %v, %v", info, err)
	}
}

func TestAnInterruptedChangeOfGroupLeavesTheRootForLast(t *testing.T) {
	priv.Root(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := hostmount.GiveToGroup(ctx, dir, gid); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if info, err := os.Stat(dir); err != nil || groupOf(info) == gid {
		t.Errorf("the root was changed first: %v, %v", info, err)
	}
}

func groupOf(info fs.FileInfo) int { return int(info.Sys().(*syscall.Stat_t).Gid) }
