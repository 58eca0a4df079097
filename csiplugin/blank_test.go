package csiplugin_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/protocol/csi/deferred"
)

// TestNothingIsFormattedThatIsNotKnownToBeBlank puts all sorts of things into a volume, and publishes it as ext4.
func TestNothingIsFormattedThatIsNotKnownToBeBlank(t *testing.T) {
	h := newHost(t, "xfs")
	const size = 320 * mib
	for name, c := range map[string]struct {
		put  func(t *testing.T, file string)
		text string
	}{
		"xfs":                    {func(t *testing.T, f string) { scratch.Run(t, "mkfs.xfs", "-q", f) }, "xfs"},
		"btrfs":                  {func(t *testing.T, f string) { scratch.Run(t, "mkfs.btrfs", "-q", f) }, "btrfs"},
		"a LUKS header":          {func(t *testing.T, f string) { write(t, f, luksHeader(), 0) }, "crypto_LUKS"},
		"an LVM label":           {func(t *testing.T, f string) { write(t, f, lvmLabel(), 512) }, "LVM2_member"},
		"a partition table":      {func(t *testing.T, f string) { write(t, f, partitionTable(), 0) }, "partitions"},
		"data in the middle":     {func(t *testing.T, f string) { write(t, f, []byte("data"), size/2) }, "written to"},
		"a byte at the far end":  {func(t *testing.T, f string) { write(t, f, []byte("d"), size-1) }, "written to"},
		"zeros":                  {func(t *testing.T, f string) { write(t, f, make([]byte, mib), 0) }, "written to"},
		"a half of a filesystem": {halfAFilesystem, "written to"},
		"two filesystems":        {func(t *testing.T, f string) { scratch.Run(t, "mkfs.btrfs", "-q", f); write(t, f, xfsMagic(t), 0) }, "volume"},
	} {
		t.Run(name, func(t *testing.T) {
			v := h.sized(name, mounted("ext4"), size)
			c.put(t, v.file())
			before := dataOf(t, v.file())
			must(t, v.stage())
			for range 2 {
				wantCode(t, v.publish("t"), codes.FailedPrecondition)
			}
			wantCode(t, v.publishReadOnly("t"), codes.FailedPrecondition)
			h.stop()
			h.start()
			wantCode(t, v.publish("t"), codes.FailedPrecondition, "")
			if err := v.publish("t"); c.text != "volume" && !strings.Contains(err.Error(), c.text) {
				t.Errorf("%q does not name %q", err, c.text)
			}
			if after := dataOf(t, v.file()); after != before {
				t.Error("the data has changed")
			}
			if got := append(h.mounts(), h.devices()...); len(got) > 0 {
				t.Errorf("mounted or attached are %v", got)
			}
			must(t, v.unstage(), v.delete())
		})
	}
}

func TestAFilesystemThatIsThereIsMountedAsItIs(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.sized("a", mounted("ext4"), 32*mib)
	source := filepath.Join(h.dir, "source")
	must(t, os.Mkdir(source, 0o700), os.WriteFile(filepath.Join(source, "file"), []byte("data"), 0o600))
	scratch.Run(t, "mkfs.ext4", "-q", "-F", "-d", source, v.file())
	must(t, v.stage(), v.publish("t"))
	if got := string(read(t, h.path("t/file"))); got != "data" {
		t.Errorf("got %q", got)
	}
	must(t, v.unpublish("t"))
}

// dataOf is a digest of a file's data and where it lies.
func dataOf(t *testing.T, file string) string {
	t.Helper()
	h := sha256.New()
	eachExtent(t, file, func(offset int64, data []byte) {
		fmt.Fprintln(h, offset, len(data))
		h.Write(data)
	})
	return string(h.Sum(nil))
}

// sized makes a volume of a size.
func (h *host) sized(name string, c *csi.VolumeCapability, size int64) *volume {
	h.t.Helper()
	resp, err := h.control.CreateVolume(h.call(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{c}, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
	})
	must(h.t, err)
	return &volume{host: h, id: resp.GetVolume().GetVolumeId(), size: size, cap: c}
}

func luksHeader() []byte {
	return append([]byte("LUKS\xba\xbe\x00\x01aes\x00"), make([]byte, 580)...)
}

// lvmLabel is the label of a physical volume, in its second sector (LVM2, lib/label/label.h).
func lvmLabel() []byte {
	label := make([]byte, 512)
	copy(label, "LABELONE")
	label[8] = 1     // its sector
	label[20] = 0x20 // where the contents begin
	copy(label[24:], "LVM2 001")
	copy(label[32:], "0123456789abcdefghijklmnopqrstuv")
	crc := uint32(0xf597a6cf)
	for _, b := range label[20:] {
		crc ^= uint32(b)
		for range 8 {
			if crc&1 != 0 {
				crc = crc>>1 ^ 0xedb88320
			} else {
				crc >>= 1
			}
		}
	}
	label[16], label[17], label[18], label[19] = byte(crc), byte(crc>>8), byte(crc>>16), byte(crc>>24)
	return label
}

func partitionTable() []byte {
	mbr := make([]byte, 512)
	copy(mbr[446:], []byte{0, 0, 2, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 8, 0, 0})
	mbr[510], mbr[511] = 0x55, 0xAA
	return mbr
}

// halfAFilesystem is what is left of an ext4 without its beginning.
func halfAFilesystem(t *testing.T, file string) {
	scratch.Run(t, "mkfs.ext4", "-q", "-F", file)
	write(t, file, make([]byte, 64<<10), 0)
}

// xfsMagic is the superblock of an XFS.
func xfsMagic(t *testing.T) []byte {
	image := filepath.Join(scratch.Dir(t), "xfs")
	scratch.Sparse(t, image, 300*mib)
	scratch.Run(t, "mkfs.xfs", "-q", image)
	f, err := os.Open(image)
	must(t, err)
	defer f.Close()
	sector := make([]byte, 512)
	_, err = f.Read(sector)
	must(t, err)
	return sector
}

// slowMkfs puts a mkfs.ext4 in front of the others that writes a fragment and then takes long. It says so in a file.
func slowMkfs(t *testing.T) (begun func()) {
	dir := scratch.Dir(t)
	note := filepath.Join(dir, "begun")
	script := "#!/bin/sh\nfor d; do :; done\nprintf fragment | dd of=$d bs=8 seek=1000 conv=notrunc,fsync 2>/dev/null\ntouch " + note + "\nexec sleep 600\n"
	must(t, os.WriteFile(filepath.Join(dir, "mkfs.ext4"), []byte(script), 0o700))
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return func() {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			if _, err := os.Stat(note); err == nil {
				return
			}
			if time.Now().After(deadline) {
				t.Fatal("mkfs was never run")
			}
		}
	}
}

// TestAnInterruptedFormatIsMadeAgain interrupts mkfs by cancelling the call, or by killing the plugin, and then publishes:
// on the host, or to a sandbox.
func TestAnInterruptedFormatIsMadeAgain(t *testing.T) {
	path := os.Getenv("PATH")
	for _, next := range []string{"on the host", "to a sandbox", "on the host after a kill", "on the host after a reboot"} {
		t.Run(next, func(t *testing.T) {
			h := newHost(t, "xfs")
			v := h.create("a", mounted("ext4"), nil)
			must(t, v.stage())
			begun := slowMkfs(t)
			endChild := func() string { return "" }
			if next == "on the host after a kill" {
				h.stop()
				endChild = h.startChild("", -1)
			}
			ctx, cancel := context.WithCancel(h.call())
			failed := make(chan error, 1)
			go func() { _, err := h.node.NodePublishVolume(ctx, v.publishRequest("t")); failed <- err }()
			begun()
			if next == "on the host after a kill" {
				h.stop()
				wantCode(t, <-failed, codes.Unavailable)
				endChild()
			} else {
				cancel()
				wantCode(t, <-failed, codes.Canceled)
				h.stop() // lets the call end
			}
			cancel()
			t.Setenv("PATH", path)
			if next == "on the host after a reboot" {
				h.boot = "another"
			}
			h.start()
			if blank(t, v.file()) {
				t.Fatal("the fragment is not there: this test tests nothing")
			}
			if got := append(h.mounts(), h.devices()...); len(got) > 0 {
				t.Errorf("mounted or attached are %v", got)
			}
			if next == "to a sandbox" {
				fs, err := v.deferTo("t", false)
				must(t, err)
				if !fs.GetNeverWritten() || fs.GetFormatPolicy() != deferred.FormatPolicy_FORMAT_POLICY_IF_BLANK || !blank(t, v.file()) {
					t.Errorf("got %v", fs)
				}
				must(t, v.undefer("t", false), v.unstage())
				return
			}
			must(t, v.publish("t"))
			if bytes.Contains(read(t, v.file()), []byte("fragment")) {
				t.Error("the fragment is left")
			}
			must(t, os.WriteFile(h.path("t/file"), []byte("data"), 0o600))
			// From now on there is data, and no more erasing.
			must(t, v.unpublish("t"), v.publish("t"))
			if got := string(read(t, h.path("t/file"))); got != "data" {
				t.Errorf("got %q", got)
			}
			must(t, v.unpublish("t"), v.unstage())
		})
	}
}

// TestAFragmentIsGoneBeforeABlockDeviceIsHandedOut interrupts a format, then uses the volume as a block device, and then
// publishes it as a filesystem again: what was written to the device is data.
func TestAFragmentIsGoneBeforeABlockDeviceIsHandedOut(t *testing.T) {
	path := os.Getenv("PATH")
	h := newHost(t, "xfs")
	resp, err := h.control.CreateVolume(h.call(), &csi.CreateVolumeRequest{
		Name: "both", VolumeCapabilities: []*csi.VolumeCapability{mounted("ext4"), block()}, CapacityRange: &csi.CapacityRange{RequiredBytes: 16 * mib},
	})
	must(t, err)
	v := &volume{host: h, id: resp.GetVolume().GetVolumeId(), cap: mounted("ext4")}
	must(t, v.stage())
	begun := slowMkfs(t)
	ctx, cancel := context.WithCancel(h.call())
	failed := make(chan error, 1)
	go func() { _, err := h.node.NodePublishVolume(ctx, v.publishRequest("t")); failed <- err }()
	begun()
	cancel()
	<-failed
	t.Setenv("PATH", path)
	h.stop() // lets the call end
	h.start()
	must(t, v.unstage())

	v.cap = block()
	must(t, v.stage(), v.publish("t"))
	if !blank(t, v.file()) {
		t.Error("the device has the fragment of a filesystem")
	}
	dev, err := os.OpenFile(h.path("t"), os.O_WRONLY|unix.O_DIRECT, 0)
	must(t, err)
	page := alignedPage()
	copy(page, "precious")
	_, err = dev.WriteAt(page, mib)
	must(t, err, dev.Close(), v.unpublish("t"), v.unstage())

	v.cap = mounted("ext4")
	must(t, v.stage())
	wantCode(t, v.publish("t"), codes.FailedPrecondition, "written to")
	if !bytes.Contains(read(t, v.file()), []byte("precious")) {
		t.Error("the data is gone")
	}
}
