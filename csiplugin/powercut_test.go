package csiplugin_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/internal/blocklog"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

// powerWorld is what the power cut test's calls are about; ids are known once a call was answered.
type powerWorld struct {
	*host
	a, s, c, g string
	members    map[string]string // of g, by volume
}

var firstData, secondData = bytes.Repeat([]byte("first..."), 2048), bytes.Repeat([]byte("second.."), 1024)

// powerStep is one call, and what holds from its answer until a later call begins that ends it.
type powerStep struct {
	name  string
	do    func(w *powerWorld) error
	holds func(w *powerWorld) error
	until string
}

func powerSteps() []powerStep {
	return []powerStep{
		{"create", func(w *powerWorld) error {
			resp, err := w.control.CreateVolume(w.call(), request("a", mib, nil))
			w.a = resp.GetVolume().GetVolumeId()
			return err
		}, func(w *powerWorld) error { return w.has(w.a, mib, nil) }, "expand"},
		{"write", func(w *powerWorld) error { return writeSynced(w.file(w.a), firstData, 0) },
			func(w *powerWorld) error { return w.has(w.a, 0, firstData) }, "overwrite"},
		{"snapshot", func(w *powerWorld) error {
			resp, err := w.control.CreateSnapshot(w.call(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: w.a})
			w.s = resp.GetSnapshot().GetSnapshotId()
			return err
		}, func(w *powerWorld) error { return w.has(w.s, mib, firstData) }, "delete snapshot"},
		{"overwrite", func(w *powerWorld) error { return writeSynced(w.file(w.a), secondData, 0) },
			func(w *powerWorld) error { return w.has(w.a, 0, secondData) }, ""},
		{"restore", func(w *powerWorld) error {
			resp, err := w.control.CreateVolume(w.call(), request("c", 2*mib, snapshotSource(w.s)))
			w.c = resp.GetVolume().GetVolumeId()
			return err
		}, func(w *powerWorld) error { return w.has(w.c, 2*mib, firstData) }, "delete clone"},
		{"group", func(w *powerWorld) error {
			g, err := w.groupSnapshot("g", w.a, w.c)
			w.g, w.members = g.GetGroupSnapshotId(), map[string]string{}
			for _, m := range g.GetSnapshots() {
				w.members[m.GetSourceVolumeId()] = m.GetSnapshotId()
			}
			return err
		}, func(w *powerWorld) error {
			return errors.Join(w.has(w.members[w.a], mib, secondData), w.has(w.members[w.c], 2*mib, firstData))
		}, "delete group"},
		{"expand", func(w *powerWorld) error {
			_, err := w.control.ControllerExpandVolume(w.call(), &csi.ControllerExpandVolumeRequest{VolumeId: w.a, CapacityRange: &csi.CapacityRange{RequiredBytes: 3 * mib}})
			return err
		}, func(w *powerWorld) error { return w.has(w.a, 3*mib, secondData) }, ""},
		{"delete snapshot", func(w *powerWorld) error {
			_, err := w.control.DeleteSnapshot(w.call(), &csi.DeleteSnapshotRequest{SnapshotId: w.s})
			return err
		}, func(w *powerWorld) error { return w.hasNot(w.s) }, ""},
		{"delete clone", func(w *powerWorld) error { return (&volume{host: w.host, id: w.c}).delete() },
			func(w *powerWorld) error { return w.hasNot(w.c) }, ""},
		{"delete group", func(w *powerWorld) error {
			_, err := w.group.DeleteVolumeGroupSnapshot(w.call(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: w.g})
			return err
		}, func(w *powerWorld) error { return w.hasNot(w.members[w.a]) }, ""},
	}
}

func writeSynced(path string, data []byte, offset int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, offset)
	return errors.Join(err, f.Sync(), f.Close())
}

// has checks that a CO is shown an object of a size, if that is not 0, and that it begins with data.
func (w *powerWorld) has(id string, size int64, data []byte) error {
	volumes, snapshots := w.everything()
	shown := int64(-1)
	for _, e := range volumes.GetEntries() {
		if e.GetVolume().GetVolumeId() == id {
			shown = e.GetVolume().GetCapacityBytes()
		}
	}
	for _, e := range snapshots.GetEntries() {
		if e.GetSnapshot().GetSnapshotId() == id {
			shown = e.GetSnapshot().GetSizeBytes()
		}
	}
	if shown < 0 || size > 0 && shown != size {
		return fmt.Errorf("%s is shown with %d bytes, want %d", id, shown, size)
	}
	content, err := os.ReadFile(w.file(id))
	if err == nil && !bytes.HasPrefix(content, data) {
		err = fmt.Errorf("%s begins with %.16q, want %.16q", id, content, data)
	}
	return err
}

func (w *powerWorld) hasNot(id string) error {
	if strings.Contains(strings.Join(w.objects(), " "), id) {
		return fmt.Errorf("%s was deleted and is there", id)
	}
	return nil
}

// TestPowerCuts makes calls on a disk that remembers its writes, and then cuts the power at every one of them: with all
// writes until then on the disk, and with some of those lost that no flush had followed. Whatever was answered with success
// holds, and a CO that repeats the rest gets where it wanted to.
func TestPowerCuts(t *testing.T) {
	priv.Root(t)
	dir := scratch.Filesystem(t, "xfs", 2*gib)
	image := filepath.Join(dir, "image")
	scratch.Sparse(t, image, 320*mib)
	scratch.Run(t, "mkfs.xfs", "-q", image)
	mnt := scratch.Dir(t)
	mount := func(image string) (unmount func()) {
		scratch.Run(t, "mount", "-t", "xfs", "-o", "loop,nouuid", image, mnt)
		return func() { scratch.Run(t, "umount", mnt) }
	}
	unmount := mount(image)
	h := newHostIn(t, filepath.Join(mnt, "pool")) // so that the pool is there; making it has tests of its own
	h.stop()
	unmount()

	disk := blocklog.New(t, image)
	unmount = mount(disk.Path)
	h.start()
	w := &powerWorld{host: h}
	steps := powerSteps()
	begun, answered := map[string]int{}, map[string]int{}
	for _, s := range steps {
		begun[s.name] = disk.Len()
		must(t, s.do(w))
		answered[s.name] = disk.Len()
	}
	h.stop()
	unmount()
	end := answered[steps[len(steps)-1].name]
	t.Logf("%d writes and flushes", end)

	step := 1
	if testing.Short() {
		step = 8
	}
	r := rand.New(rand.NewPCG(1, uint64(end)))
	for n := begun["create"]; n <= end; n += step {
		for name, lost := range map[string]func() bool{"nothing lost": blocklog.Nothing, "some lost": blocklog.Some(r)} {
			cut := filepath.Join(dir, "cut")
			disk.Cut(t, n, cut, lost)
			unmount := mount(cut)
			again := *w
			err := again.afterCut(n, begun, answered, fmt.Sprintf("cut after %d of %d, %s", n, end, name))
			unmount()
			must(t, err, os.Remove(cut))
		}
	}
}

// afterCut starts the plugin on what a cut after n writes has left, checks what had been answered by then, and repeats
// the rest.
func (w *powerWorld) afterCut(n int, begun, answered map[string]int, when string) error {
	w.start()
	defer func() { w.stop() }()
	for _, s := range powerSteps() {
		ended := s.until != "" && begun[s.until] <= n
		if answered[s.name] > n || ended {
			continue
		}
		if err := s.holds(w); err != nil {
			return fmt.Errorf("%s: what %q answered does not hold: %w", when, s.name, err)
		}
	}
	for _, s := range powerSteps() {
		if answered[s.name] <= n {
			continue
		}
		if err := s.do(w); err != nil {
			return fmt.Errorf("%s: %q repeated: %w", when, s.name, err)
		}
	}
	if got := w.objects(); len(got) != 1 || w.has(w.a, 3*mib, secondData) != nil {
		return fmt.Errorf("%s: in the end there are %v", when, got)
	}
	return nil
}
