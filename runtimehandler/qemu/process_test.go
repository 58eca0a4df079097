package qemu

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
)

func TestProcess(t *testing.T) {
	if _, err := startProcess("no-such-qemu", nil, nil); !errors.Is(err, errdefs.ErrNotFound) || !strings.Contains(err.Error(), "qemu-system-x86") {
		t.Errorf("a program that is not there: %v", err)
	}
	h, err := startProcess("/bin/sh", []string{"-c", "yes complaint | head -c 100000 >&2; echo last >&2; exit 3"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	<-h.done
	if text := h.stderr.String(); h.err == nil || len(text) > maxStderr || !strings.HasSuffix(text, "last") {
		t.Errorf("%v, %d bytes, %q", h.err, len(text), text[max(0, len(text)-20):])
	}
	h.kill() // it has ended
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	h, err = startProcess("/bin/sh", []string{"-c", "echo here >&3; exec sleep 1000"}, []*os.File{w})
	if err != nil {
		t.Fatal(err)
	}
	_ = w.Close()
	buf := make([]byte, 16)
	if n, err := r.Read(buf); err != nil || string(buf[:n]) != "here\n" {
		t.Errorf("from descriptor 3: %q, %v", buf[:n], err)
	}
	h.kill()
	if h.err == nil {
		t.Error("it was killed, and has ended well")
	}
}
