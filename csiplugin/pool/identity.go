package pool

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// format is the version of the layout in doc.go. Any other is refused.
const format = 1

// identity is pool.json.
type identity struct {
	Format int    `json:"format"`
	Pool   string `json:"pool"`
}

func readIdentity(root string) (handle.Pool, error) {
	path := filepath.Join(root, "pool.json")
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	// The format comes first: of a newer one nothing else is known.
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(raw, &version); err != nil {
		return "", fmt.Errorf("%s is damaged: %w: %w", path, err, errdefs.ErrDataLoss)
	}
	if version.Format != format {
		return "", fmt.Errorf("%s has format %d, this version knows format %d; use the version that wrote it: %w", path, version.Format, format, errdefs.ErrFailedPrecondition)
	}
	var id identity
	if err := json.Unmarshal(raw, &id); err != nil {
		return "", fmt.Errorf("%s is damaged: %w: %w", path, err, errdefs.ErrDataLoss)
	}
	pool, err := handle.ParsePool(id.Pool)
	if err != nil {
		return "", fmt.Errorf("%s is damaged: %v: %w", path, err, errdefs.ErrDataLoss)
	}
	return pool, nil
}

func writeIdentity(ctx context.Context, root string, pool handle.Pool) error {
	text, err := json.Marshal(identity{Format: format, Pool: string(pool)})
	if err != nil {
		return err
	}
	path := filepath.Join(root, "pool.json")
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	crashpoint.At(ctx, "pool.json written under its temporary name")
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	return syncDir(root)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

const (
	lockTimeout = time.Second
	lockPoll    = 10 * time.Millisecond
)

// takeLock locks the pool for this process, until the file is closed.
func takeLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	// It is tried for a moment: a process that was killed may not have closed its files yet, and its child neither, between
	// fork and exec.
	for deadline := time.Now().Add(lockTimeout); ; time.Sleep(lockPoll) {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			break
		}
	}
	if errors.Is(err, unix.EWOULDBLOCK) {
		holder, _ := os.ReadFile(path)
		pid := string(bytes.TrimSpace(holder))
		if pid == "" || strings.Trim(pid, "0123456789") != "" {
			pid = "unknown"
		}
		return nil, errors.Join(fmt.Errorf("process %s has it open; stop that first: %w", pid, errdefs.ErrUnavailable), f.Close())
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	// The pid is for people; on a full disk it may be missing.
	_ = f.Truncate(0)
	_, _ = fmt.Fprintln(f, os.Getpid())
	return f, nil
}
