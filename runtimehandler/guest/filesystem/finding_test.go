package filesystem_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"

	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/runtimehandler/guest/filesystem"
)

func TestParseBlkid(t *testing.T) {
	for _, tc := range []struct {
		name           string
		code           int
		stdout, stderr string
		want           filesystem.Finding
		fails          bool
	}{
		{"ext4", 0, "DEVNAME=/dev/vda\nUUID=1\nVERSION=1.0\nBLOCK_SIZE=4096\nUSAGE=filesystem\nTYPE=ext4\n", "", filesystem.Finding{Type: "ext4", Usage: "filesystem"}, false},
		{"a partition table", 0, "DEVNAME=/dev/vda\nPTUUID=1\nPTTYPE=gpt\n", "", filesystem.Finding{Table: "gpt"}, false},
		{"both", 0, "PTTYPE=dos\nUSAGE=filesystem\nTYPE=xfs", "", filesystem.Finding{Type: "xfs", Usage: "filesystem", Table: "dos"}, false},
		{"found, but not what", 0, "DEVNAME=/dev/vda\n", "", filesystem.Finding{Ambivalent: true}, false},
		{"found, and silent about it", 0, "", "", filesystem.Finding{Ambivalent: true}, false},
		{"ambivalent", 8, "", "blkid: /dev/vda: ambivalent result\n", filesystem.Finding{Ambivalent: true}, false},
		{"nothing", 2, "", "", filesystem.Finding{}, false},
		{"a device that cannot be opened", 2, "", "blkid: error: /dev/vda: No such device or address", filesystem.Finding{}, true},
		{"wrong usage", 4, "", "", filesystem.Finding{}, true},
		{"something else", 1, "", "", filesystem.Finding{}, true},
	} {
		var got filesystem.Finding
		err := got.Parse(tc.code, tc.stdout, tc.stderr)
		if (err != nil) != tc.fails {
			t.Errorf("%s: %v", tc.name, err)
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s: %s", tc.name, diff)
		}
	}
}

// FuzzParseBlkid: an answer that is not "nothing was found" never looks like it.
func FuzzParseBlkid(f *testing.F) {
	f.Add(0, "TYPE=ext4\n", "")
	f.Add(2, "", "")
	f.Add(2, "TYPE=\n", "x")
	f.Fuzz(func(t *testing.T, code int, stdout, stderr string) {
		var got filesystem.Finding
		err := got.Parse(code, stdout, stderr)
		nothing := err == nil && got == filesystem.Finding{}
		if nothing && (code != 2 || stderr != "") {
			t.Errorf("code %d, %q, %q is taken for a blank device", code, stdout, stderr)
		}
	})
}

func TestRegions(t *testing.T) {
	const mib = 1 << 20
	for _, bytes := range []int64{512, mib, 64 * mib, 64*mib + 512, 100 * mib, 1 << 30, 10<<40 + 512} {
		first, last := int64(1), int64(0)
		for _, r := range filesystem.Regions(bytes) {
			start, length := r.Bounds()
			if start < 0 || length <= 0 || start+length > bytes {
				t.Errorf("device of %d bytes: region %d+%d", bytes, start, length)
			}
			first, last = min(first, start), max(last, start+length)
		}
		if first != 0 || last != bytes {
			t.Errorf("device of %d bytes is read from %d to %d", bytes, first, last)
		}
	}
	if r := filesystem.Regions(64 * mib); len(r) != 1 {
		t.Errorf("a small device is read in %d parts", len(r))
	}
}

func TestFirstNonZero(t *testing.T) {
	const size = 3<<20 + 512
	for _, at := range []int{-1, 0, 1, 7, 8, 9, 1<<20 - 1, 1 << 20, size - 1} {
		device := make([]byte, size)
		if at >= 0 {
			device[at] = 1
		}
		got, err := filesystem.FirstNonZero(t.Context(), bytes.NewReader(device), size)
		if err != nil || got != int64(at) {
			t.Errorf("a byte at %d was found at %d, %v", at, got, err)
		}
	}
}

func TestFirstNonZeroOfBadDevices(t *testing.T) {
	if _, err := filesystem.FirstNonZero(t.Context(), bytes.NewReader(make([]byte, 4096)), 8192); err == nil {
		t.Error("a device that is shorter than it says is blank")
	}
	if _, err := filesystem.FirstNonZero(t.Context(), broken{}, 8192); !errors.Is(err, errBroken) {
		t.Errorf("a device that cannot be read: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := filesystem.FirstNonZero(ctx, bytes.NewReader(make([]byte, 8192)), 8192); !errors.Is(err, context.Canceled) {
		t.Errorf("when nobody wants to know any more: %v", err)
	}
}

var errBroken = errors.New("broken")

type broken struct{}

func (broken) ReadAt([]byte, int64) (int, error) { return 0, errBroken }

var _ io.ReaderAt = broken{}

func TestXFSBlocks(t *testing.T) {
	for _, tc := range []struct{ device, group, want uint64 }{
		{1000, 100, 1000},
		{1063, 1000, 1000}, // the last group would have 63 blocks
		{1064, 1000, 1064}, // 64 are enough
		{1999, 1000, 1999},
		{63, 1000, 0},
	} {
		if got := filesystem.XFSBlocks(tc.device, tc.group); got != tc.want {
			t.Errorf("XFSBlocks(%d, %d) = %d, want %d", tc.device, tc.group, got, tc.want)
		}
	}
}

func TestKernelText(t *testing.T) {
	for record, want := range map[string]string{
		"4,1234,56789,-;XFS (vda): Unmount and run xfs_repair\n SUBSYSTEM=block\n": "XFS (vda): Unmount and run xfs_repair",
		"6,1,2,-;":      "",
		"no record":     "",
		"4,1,2,-;a;b\n": "a;b",
	} {
		if got := filesystem.KernelText(record); got != want {
			t.Errorf("%q is %q, want %q", record, got, want)
		}
	}
}
