package extents_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/engine"
	"crust.dev/crust/csiplugin/engine/reflink"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

// guest is a history whose volume has a filesystem that is mounted on a loop device, which hands discards on to the file.
type guest struct {
	*history
	dir     string
	online  bool  // the filesystem discards by itself what is freed
	trimmed int64 // bytes, by fstrim
	// discarded are blocks that had data in one snapshot and are a hole in the next.
	discarded int
}

// makeFilesystem formats the volume. That it is small makes comparing bytes fast; mkfs.xfs makes such filesystems only for
// the kernel's own tests (xfstests), which it knows by these variables.
func (g *guest) makeFilesystem(fstype string) {
	g.Helper()
	force := map[string]string{"ext4": "-F", "xfs": "-f"}[fstype]
	mkfs := exec.Command("mkfs."+fstype, "-q", force, g.e.Path(g.live))
	mkfs.Env = append(os.Environ(), "TEST_DIR=1", "TEST_DEV=1", "QA_CHECK_FS=1")
	if out, err := mkfs.CombinedOutput(); err != nil {
		g.Fatalf("%v: %v\n%s", mkfs.Args, err, out)
	}
}

func (g *guest) mount() {
	g.online = g.IntN(2) == 0
	option := map[bool]string{true: "loop,discard", false: "loop,nodiscard"}[g.online]
	g.log = append(g.log, "mount "+option)
	scratch.Run(g, "mount", "-o", option, g.e.Path(g.live), g.dir)
}

func (g *guest) unmount() {
	g.log = append(g.log, "unmount")
	scratch.Run(g, "umount", g.dir)
}

// pick draws a file that there is, or a new one.
func (g *guest) pick() string {
	entries, err := os.ReadDir(g.dir)
	g.must(err)
	if n := g.IntN(24); n < len(entries) && entries[n].Type().IsRegular() {
		return filepath.Join(g.dir, entries[n].Name())
	}
	g.made++
	return filepath.Join(g.dir, fmt.Sprint(g.made))
}

// act does what programs do to a filesystem.
func (g *guest) act() {
	path := g.pick()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, unix.ENOSPC) {
		return
	}
	g.must(err)
	defer f.Close()
	offset, length := g.extent(64 * block)
	note := func(what string) {
		g.log = append(g.log, fmt.Sprintf("%s %s %d+%d", what, filepath.Base(path), offset, length))
	}
	switch g.IntN(9) {
	case 0, 1, 2, 8:
		note("write")
		data := bytes.Repeat([]byte{byte(g.Uint32())}, int(length))
		_, err = f.WriteAt(data, offset)
	case 3, 4:
		note("remove")
		err = os.Remove(path)
	case 5:
		note("truncate")
		err = f.Truncate(offset)
	case 6:
		note("punch")
		err = unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, length)
	case 7:
		note("sync")
		err = f.Sync()
	}
	if !errors.Is(err, unix.ENOSPC) {
		g.must(err)
	}
}

var trimmedBytes = regexp.MustCompile(`\((\d+) bytes\)`)

// trim discards what the filesystem does not use, of all of it or of a part.
func (g *guest) trim() {
	args := []string{"fstrim", "-v", g.dir}
	if g.IntN(2) == 0 {
		offset, length := g.extent(guestBlocks * block)
		// XFS refuses less than a block.
		args = append(args, "--offset", fmt.Sprint(offset), "--length", fmt.Sprint(max(block, 16*length)))
	}
	g.log = append(g.log, fmt.Sprint(args))
	out := scratch.Run(g, args...)
	found := trimmedBytes.FindStringSubmatch(out)
	if found == nil {
		g.Fatalf("%q does not say how much was trimmed", out)
	}
	n, err := strconv.ParseInt(found[1], 10, 64)
	g.must(err)
	g.trimmed += n
}

// count counts what was discarded between the last two snapshots.
func (g *guest) count() {
	if len(g.taken) < 2 {
		return
	}
	before, after := g.content(g.taken[len(g.taken)-2]), g.content(g.taken[len(g.taken)-1])
	f, err := os.Open(g.e.Path(g.taken[len(g.taken)-1]))
	g.must(err)
	defer f.Close()
	for i := range guestBlocks {
		if blockOf(before, i) == zeros || blockOf(after, i) != zeros {
			continue
		}
		if next, err := f.Seek(int64(i)*block, unix.SEEK_DATA); errors.Is(err, unix.ENXIO) || err == nil && next >= int64(i+1)*block {
			g.discarded++
		}
	}
}

// guestBlocks is how large the volume is.
const guestBlocks = 32 << 20 / block

// liveThrough goes through one history.
func (g *guest) liveThrough(fstype string, rounds int) {
	g.live = g.name("vol")
	g.must(g.e.Create(g.Context(), g.live, guestBlocks*block, nil))
	g.makeFilesystem(fstype)
	g.mount()
	for range rounds {
		for range 2 + g.IntN(12) {
			g.act()
		}
		if g.IntN(2) == 0 {
			scratch.Run(g, "sync", "-f", g.dir)
		}
		if g.IntN(3) != 0 {
			g.trim()
		}
		if g.IntN(4) == 0 {
			// A snapshot of a mounted filesystem is as after a crash: the journal of a restored one is replayed.
			g.unmount()
			g.turn()
			g.mount()
		}
		g.snapshot()
		g.count()
		if len(g.taken) > 3 {
			g.must(g.e.Delete(g.Context(), g.taken[0]))
			delete(g.contents, g.taken[0])
			g.taken = g.taken[1:]
		}
	}
	g.unmount()
	for _, name := range append(g.taken, g.live) {
		g.must(g.e.Delete(g.Context(), name))
	}
}

// TestDiscardsOfAFilesystem compares snapshots of ext4 and XFS that free space and discard it, by themselves or by fstrim.
func TestDiscardsOfAFilesystem(t *testing.T) {
	priv.Root(t)
	for _, pool := range []string{"xfs", "btrfs"} {
		for _, fstype := range []string{"ext4", "xfs"} {
			t.Run(fstype+" on "+pool, func(t *testing.T) {
				base := scratch.Filesystem(t, pool, 1<<30)
				objects, dir := filepath.Join(base, "objects"), scratch.Dir(t)
				if err := os.Mkdir(objects, 0o700); err != nil {
					t.Fatal(err)
				}
				e, err := reflink.Open(objects)
				if err != nil {
					t.Fatal(err)
				}
				seed := rand.Uint64()
				var sum counts
				g := &guest{dir: dir, history: &history{TB: t, Rand: rand.New(rand.NewPCG(seed, 0)), e: e, counts: &sum}}
				t.Cleanup(func() {
					if t.Failed() {
						t.Logf("seed %d", seed)
						_ = exec.Command("umount", dir).Run()
					}
				})
				for range max(1, *histories/100) {
					g.log, g.taken, g.contents = nil, nil, map[engine.Name][]byte{}
					g.liveThrough(fstype, 16)
				}
				if g.trimmed == 0 || g.discarded == 0 || sum.differing == 0 {
					t.Errorf("nothing was discarded: %d bytes trimmed, %d blocks are holes that were none: %+v", g.trimmed, g.discarded, sum)
				}
				t.Logf("%d comparisons of %d blocks: %d differ, %d are reported, %d of them needlessly; none is missed. %d bytes were trimmed, %d blocks of data became holes",
					sum.comparisons, sum.blocks, sum.differing, sum.reported, sum.reported-sum.differing, g.trimmed, g.discarded)
			})
		}
	}
}
