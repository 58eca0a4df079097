package watch_test

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"crust.dev/crust/crust/internal/watch"
)

func TestRun(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "a", "b", "driver.sock")
	root := filepath.Join(dir, "run", "kata")
	changes := make(chan string, 100)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- watch.Run(ctx, []string{socket, root}, func(p string) { changes <- p }) }()
	expect := func(t *testing.T, want string, act func() error) {
		t.Helper()
		// The watch may not have begun yet: what was done is undone by nobody, so it is done again until it is seen.
		for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); {
			if err := act(); err != nil {
				t.Fatal(err)
			}
			select {
			case got := <-changes:
				if got == want {
					return
				}
			case <-time.After(time.Second):
			}
		}
		t.Fatalf("no change of %s was told", want)
	}
	touch := func(path string) func() error {
		return func() error {
			_ = os.Remove(path)
			return os.WriteFile(path, nil, 0o600)
		}
	}
	t.Run("a directory that comes into being", func(t *testing.T) {
		expect(t, root, func() error {
			_ = os.RemoveAll(filepath.Dir(root))
			return os.MkdirAll(root, 0o750)
		})
	})
	t.Run("something in it", func(t *testing.T) { expect(t, root, touch(filepath.Join(root, "sandbox"))) })
	t.Run("a socket in a directory that comes into being", func(t *testing.T) {
		if err := os.MkdirAll(filepath.Dir(socket), 0o750); err != nil {
			t.Fatal(err)
		}
		expect(t, socket, touch(socket))
	})
	t.Run("in a directory that was replaced", func(t *testing.T) {
		if err := os.RemoveAll(root); err != nil {
			t.Fatal(err)
		}
		if err := os.MkdirAll(root, 0o750); err != nil {
			t.Fatal(err)
		}
		expect(t, root, touch(filepath.Join(root, "sandbox")))
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
