package journal

import (
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/containerd/errdefs"
	"go.etcd.io/bbolt"
)

// committer groups commits: while one is being written, the changes that arrive wait and then go to the disk together.
// (bbolt's own Batch waits for company even when there is none, which costs a lone caller its whole delay.)
type committer struct {
	db *bbolt.DB

	writing sync.Mutex // held by the caller that writes for all

	mu      sync.Mutex
	waiting []*change
}

// change is one caller's part of a commit.
type change struct {
	apply func(records *bbolt.Bucket) error
	done  bool
	err   error
}

// do applies a change to the bucket of records and returns when it is on the disk, or none of it is.
func (c *committer) do(apply func(records *bbolt.Bucket) error) error {
	own := &change{apply: apply}
	c.mu.Lock()
	c.waiting = append(c.waiting, own)
	c.mu.Unlock()

	c.writing.Lock()
	defer c.writing.Unlock()
	if own.done {
		return own.err
	}
	c.mu.Lock()
	group := c.waiting
	c.waiting = nil
	c.mu.Unlock()
	err := c.write(group)
	for _, ch := range group {
		ch.done, ch.err = true, err
	}
	return err
}

func (c *committer) write(group []*change) error {
	err := c.db.Update(func(tx *bbolt.Tx) error {
		records := tx.Bucket(recordsBucket)
		for _, ch := range group {
			if err := ch.apply(records); err != nil {
				return err
			}
		}
		return nil
	})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("write journal: %w; free some space on its disk: %w", err, errdefs.ErrResourceExhausted)
	default:
		return fmt.Errorf("write journal: %w", err)
	}
}
