package diskfull_test

import (
	"errors"
	"os"
	"testing"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/internal/diskfull"
)

func TestKind(t *testing.T) {
	for _, errno := range []error{unix.ENOSPC, unix.EDQUOT} {
		err := diskfull.Kind(&os.PathError{Op: "write", Path: "a", Err: errno})
		if !errors.Is(err, errdefs.ErrResourceExhausted) || !errors.Is(err, errno) {
			t.Errorf("got %v", err)
		}
	}
	if err := diskfull.Kind(unix.EIO); err != unix.EIO {
		t.Errorf("got %v", err)
	}
	if err := diskfull.Kind(nil); err != nil {
		t.Errorf("got %v", err)
	}
}
