package qemu

import (
	"errors"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

func TestClaimCID(t *testing.T) {
	calls := 0
	cid, err := claimCID(func(cid uint32) error {
		if cid < firstCID || cid >= cidSpan {
			t.Errorf("context id %d", cid)
		}
		if calls++; calls < 3 {
			return unix.EADDRINUSE
		}
		return nil
	})
	if err != nil || calls != 3 || cid < firstCID {
		t.Errorf("%d, %v after %d calls", cid, err, calls)
	}
	if _, err := claimCID(func(uint32) error { return unix.EADDRINUSE }); !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("when all are taken: %v", err)
	}
	if _, err := claimCID(func(uint32) error { return unix.EPERM }); !errors.Is(err, unix.EPERM) {
		t.Errorf("when it is not allowed: %v", err)
	}
}
