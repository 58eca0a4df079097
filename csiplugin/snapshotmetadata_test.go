package csiplugin_test

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/scratch"
	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
	"crust.dev/crust/protocol/rpc/crashpoint"
	"crust.dev/crust/test/priv"
)

func TestSnapshotMetadata(t *testing.T) {
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			h := newHost(t, fstype)
			v, base, target := pair(h)
			caps, err := h.identity.GetPluginCapabilities(h.call(), &csi.GetPluginCapabilitiesRequest{})
			if err != nil || !slices.ContainsFunc(caps.GetCapabilities(), func(c *csi.PluginCapability) bool {
				return c.GetService().GetType() == csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE
			}) {
				t.Errorf("the capabilities are %v, %v", caps, err)
			}
			check := func(what string, want []span, capacity int64, call func() (answer, error)) {
				got, err := call()
				if diff := cmp.Diff(want, got.spans, cmp.AllowUnexported(span{})); err != nil || diff != "" || got.capacity != capacity || got.style != csi.BlockMetadataType_VARIABLE_LENGTH {
					t.Errorf("%s: %v, capacity %d, %v (-want +got):\n%s", what, err, got.capacity, got.style, diff)
				}
			}
			changed := pages(20, 1, 40, 2, 2079, 1, 5120, 16)
			check("allocated", pages(16, 64, 1024, 16, 2048, 32), 16*mib, func() (answer, error) { return h.allocated(base, 0, 0, all) })
			check("delta", changed, 24*mib, func() (answer, error) { return h.delta(base, target, 0, 0, all) })
			check("no delta", nil, 16*mib, func() (answer, error) { return h.delta(base, base, 0, 0, all) })
			must(t, v.delete())
			check("delta after the volume is gone", changed, 24*mib, func() (answer, error) { return h.delta(base, target, 0, 0, all) })
			h.stop()
			h.start()
			check("delta after a restart", changed, 24*mib, func() (answer, error) { return h.delta(base, target, 0, 0, all) })
		})
	}
}

// fallocate calls fallocate(2) for pages of a volume's file.
func (v *volume) fallocate(mode uint32, first, count int64) {
	v.t.Helper()
	f, err := os.OpenFile(v.file(), os.O_RDWR, 0)
	must(v.t, err)
	must(v.t, unix.Fallocate(int(f.Fd()), mode|unix.FALLOC_FL_KEEP_SIZE, first*page, count*page), f.Close())
}

// TestWhatReadsAsZeroIsNoData preallocates, zeroes and discards.
func TestWhatReadsAsZeroIsNoData(t *testing.T) {
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			h := newHost(t, fstype)
			v := h.create("v", block(), nil)
			empty := h.snapshot("empty", v.id)
			v.fallocate(0, 8, 64)
			preallocated := h.snapshot("preallocated", v.id)
			v.fill('a', 10, 3, 100, 3)
			written := h.snapshot("written", v.id)
			v.fallocate(unix.FALLOC_FL_ZERO_RANGE, 10, 1)
			v.fallocate(unix.FALLOC_FL_PUNCH_HOLE, 101, 1)
			zeroed := h.snapshot("zeroed", v.id)
			for _, c := range []struct {
				base, snap string
				want       []span
			}{
				{"", preallocated, nil},
				{empty, preallocated, nil},
				{"", written, pages(10, 3, 100, 3)},
				{preallocated, written, pages(10, 3, 100, 3)},
				{"", zeroed, pages(11, 2, 100, 1, 102, 1)},
				{written, zeroed, pages(10, 1, 101, 1)},
				{empty, zeroed, pages(11, 2, 100, 1, 102, 1)},
			} {
				got, err := h.allocated(c.snap, 0, 0, all)
				if c.base != "" {
					got, err = h.delta(c.base, c.snap, 0, 0, all)
				}
				if diff := cmp.Diff(c.want, got.spans, cmp.AllowUnexported(span{})); err != nil || diff != "" {
					t.Errorf("%s since %q: %v (-want +got):\n%s", c.snap, c.base, err, diff)
				}
			}
		})
	}
}

// TestManyRanges has more of them than one message may have.
func TestManyRanges(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.sized("v", block(), gib)
	base := h.snapshot("base", v.id)
	v.fill('a', 0, 1)
	const count = 70_000
	f, err := os.OpenFile(v.file(), os.O_RDWR, 0)
	must(t, err)
	// A page and a hole, twice, four times, ...
	for made := int64(1); made < count; made *= 2 {
		more := min(made, count-made)
		must(t, unix.IoctlFileCloneRange(int(f.Fd()), &unix.FileCloneRange{
			Src_fd: int64(f.Fd()), Src_length: uint64(2 * more * page), Dest_offset: uint64(2 * made * page),
		}))
	}
	must(t, f.Close())
	target := h.snapshot("target", v.id)
	for limit, messages := range map[int32]int{0: 9, 1000: 70, 65536: 2, 65537: 2, math.MaxInt32: 2} {
		for what, call := range map[string]func() (answer, error){
			"allocated": func() (answer, error) { return h.allocated(target, 0, limit, all) },
			"delta":     func() (answer, error) { return h.delta(base, target, 0, limit, all) },
		} {
			got, err := call()
			if err != nil || got.messages != messages || len(got.spans) != count || got.spans[count-1] != pages(2*(count-1), 1)[0] {
				t.Errorf("%s, at most %d in a message: %d ranges in %d messages, %v; want %d in %d", what, limit, len(got.spans), got.messages, err, count, messages)
			}
		}
	}
}

// union joins spans, which may overlap, and cuts them at an offset.
func union(from int64, lists ...[]span) (joined []span) {
	list := slices.Concat(lists...)
	slices.SortFunc(list, func(a, b span) int { return int(a.offset - b.offset) })
	for _, s := range list {
		s.offset = max(s.offset, from)
		if n := len(joined); n > 0 && s.offset <= joined[n-1].end {
			joined[n-1].end = max(joined[n-1].end, s.end)
		} else if s.end > s.offset {
			joined = append(joined, s)
		}
	}
	return joined
}

// TestResume begins at every offset at which something begins or ends, around it, and after any number of messages of any
// size; what comes is always the rest.
func TestResume(t *testing.T) {
	for name, block := range map[string]int64{"variable": 0, "fixed": 64 << 10} {
		t.Run(name, func(t *testing.T) {
			priv.Root(t)
			h := prepareHost(t, filepath.Join(scratch.Filesystem(t, "xfs", 2*gib), "pool"))
			h.cfg.MetadataBlock = block
			h.start()
			_, base, target := pair(h)
			for what, call := range map[string]func(int64, int32, int) (answer, error){
				"allocated": func(offset int64, limit int32, most int) (answer, error) {
					return h.allocated(target, offset, limit, most)
				},
				"delta": func(offset int64, limit int32, most int) (answer, error) {
					return h.delta(base, target, offset, limit, most)
				},
			} {
				whole, err := call(0, 0, all)
				must(t, err)
				capacity := whole.capacity
				offsets := []int64{0, 1, page - 1, page, 100*page + 7, capacity - 1, capacity}
				for _, s := range whole.spans {
					offsets = append(offsets, s.offset-1, s.offset, s.offset+1, s.offset+page/2, s.end-1, s.end, s.end+1)
				}
				for _, offset := range offsets {
					rest, err := call(offset, 0, all)
					if diff := cmp.Diff(union(offset, whole.spans), union(offset, rest.spans), cmp.AllowUnexported(span{})); err != nil || diff != "" || rest.messages == 0 || rest.capacity != capacity {
						t.Errorf("%s from %d: %v in %d messages (-want +got):\n%s", what, offset, err, rest.messages, diff)
					}
				}
				for _, limit := range []int32{1, 2, 3, math.MaxInt32} {
					for most := 1; ; most++ {
						first, err := call(0, limit, most)
						must(t, err)
						offset := int64(0)
						if n := len(first.spans); n > 0 {
							offset = first.spans[n-1].end
						}
						rest, err := call(offset, limit, all)
						if diff := cmp.Diff(union(0, whole.spans), union(0, first.spans, rest.spans), cmp.AllowUnexported(span{})); err != nil || diff != "" {
							t.Errorf("%s, %d at a time, interrupted after %d: %v (-want +got):\n%s", what, limit, most, err, diff)
						}
						if first.messages < most {
							break
						}
					}
				}
			}
		})
	}
}

// TestFixedLength compares ranges of one size with those as they are.
func TestFixedLength(t *testing.T) {
	priv.Root(t)
	for _, c := range []struct{ asked, size, got int64 }{
		{64 << 10, 16 * mib, 64 << 10},
		{mib, 16*mib + 4096, 4096},
		{gib, 16*mib + 65536, 65536},
		{page, 16 * mib, page},
	} {
		t.Run(fmt.Sprint(c.asked, " of ", c.size), func(t *testing.T) {
			h := prepareHost(t, filepath.Join(scratch.Filesystem(t, "xfs", 2*gib), "pool"))
			h.cfg.MetadataBlock = c.asked
			h.start()
			resp, err := h.control.CreateVolume(h.call(), &csi.CreateVolumeRequest{
				Name: "v", VolumeCapabilities: []*csi.VolumeCapability{block()}, CapacityRange: &csi.CapacityRange{RequiredBytes: c.size},
			})
			must(t, err)
			v := &volume{host: h, id: resp.GetVolume().GetVolumeId()}
			last := c.size/page - 1
			v.fill('a', 1, 1, 100, 3, last, 1)
			snap := h.snapshot("s", v.id)
			got, err := h.allocated(snap, 0, 0, all)
			must(t, err)
			if got.style != csi.BlockMetadataType_FIXED_LENGTH {
				t.Errorf("the style is %v", got.style)
			}
			for _, s := range got.spans {
				if s.end-s.offset != c.got || s.offset%c.got != 0 {
					t.Errorf("range %v, want %d bytes", s, c.got)
				}
			}
			for _, want := range pages(1, 1, 100, 3, last, 1) {
				if !slices.ContainsFunc(union(0, got.spans), func(s span) bool { return s.offset <= want.offset && s.end >= want.end }) {
					t.Errorf("%v is not in %v", want, got.spans)
				}
			}
		})
	}
	for _, bad := range []int64{-1, 1, 4095, 12288, 2 * gib} {
		h := prepareHost(t, "/nowhere")
		h.cfg.MetadataBlock = bad
		if _, err := csiplugin.New(h.cfg); err == nil {
			t.Errorf("block size %d is accepted", bad)
		}
	}
}

func TestSnapshotMetadataErrors(t *testing.T) {
	h := newHost(t, "xfs")
	v, base, target := pair(h)
	other := h.create("other", block(), nil)
	others := h.snapshot("others", other.id)
	clone := h.clone("clone", snapshotSource(base), 0)
	clones := h.snapshot("clones", clone.id)
	missing := handle.NewSnapshot(handle.Pool(h.poolID())).String()
	foreign := handle.NewSnapshot("ffffffffffff").String()
	const size = 24 * mib
	for name, c := range map[string]struct {
		base, target string
		offset       int64
		max          int32
		want         codes.Code
		text         string
	}{
		"no base":               {"", target, 0, 0, codes.InvalidArgument, "base_snapshot_id"},
		"no target":             {base, "", 0, 0, codes.InvalidArgument, "target_snapshot_id"},
		"negative max":          {base, target, 0, -1, codes.InvalidArgument, "max_results"},
		"least max":             {base, target, 0, math.MinInt32, codes.InvalidArgument, "max_results"},
		"most max":              {base, target, 0, math.MaxInt32, codes.OK, ""},
		"negative offset":       {base, target, -1, 0, codes.OutOfRange, "starting_offset"},
		"least offset":          {base, target, math.MinInt64, 0, codes.OutOfRange, "starting_offset"},
		"the last byte":         {base, target, size - 1, 0, codes.OK, ""},
		"the end":               {base, target, size, 0, codes.OK, ""},
		"beyond the end":        {base, target, size + 1, 0, codes.OutOfRange, "starting_offset"},
		"greatest offset":       {base, target, math.MaxInt64, 0, codes.OutOfRange, "starting_offset"},
		"no such base":          {missing, target, 0, 0, codes.NotFound, missing},
		"no such target":        {base, missing, 0, 0, codes.NotFound, missing},
		"no id":                 {"what?", target, 0, 0, codes.NotFound, "what?"},
		"a volume's id":         {v.id, target, 0, 0, codes.NotFound, v.id},
		"another pool's":        {foreign, target, 0, 0, codes.NotFound, "ffffffffffff"},
		"another volume's":      {base, others, 0, 0, codes.InvalidArgument, other.id},
		"a clone's":             {base, clones, 0, 0, codes.InvalidArgument, clone.id},
		"reversed":              {target, base, 0, 0, codes.InvalidArgument, "exchange"},
		"equal":                 {base, base, 0, 0, codes.OK, ""},
		"equal, at its end":     {base, base, 16 * mib, 0, codes.OK, ""},
		"equal, beyond its end": {base, base, size, 0, codes.OutOfRange, base},
	} {
		t.Run("delta: "+name, func(t *testing.T) {
			got, err := h.delta(c.base, c.target, c.offset, c.max, all)
			wantCode(t, err, c.want, c.text)
			if err != nil && len(got.spans) > 0 {
				t.Errorf("ranges before the error: %v", got.spans)
			}
		})
		if c.base != base || name == "another volume's" || name == "a clone's" {
			continue
		}
		t.Run("allocated: "+name, func(t *testing.T) {
			text := c.text
			if c.target == "" {
				text = "snapshot_id"
			}
			_, err := h.allocated(c.target, c.offset, c.max, all)
			wantCode(t, err, c.want, text)
		})
	}
}

// TestSnapshotsWhoseDataIsGone takes away what the catalog knows of.
func TestSnapshotsWhoseDataIsGone(t *testing.T) {
	h := newHost(t, "xfs")
	v, base, target := pair(h)
	lose := func(snap string) {
		scratch.Run(t, "chattr", "-i", h.file(snap))
		must(t, os.Remove(h.file(snap)))
	}
	lose(base)
	_, err := h.delta(base, target, 0, 0, all)
	wantCode(t, err, codes.FailedPrecondition, base, "full backup")
	_, err = h.allocated(base, 0, 0, all)
	wantCode(t, err, codes.DataLoss, base)
	// Shorter than it was cut is as bad as gone.
	cut := h.snapshot("cut", v.id)
	scratch.Run(t, "chattr", "-i", h.file(cut))
	must(t, os.Truncate(h.file(cut), mib))
	later := h.snapshot("later", v.id)
	_, err = h.delta(cut, later, 0, 0, all)
	wantCode(t, err, codes.FailedPrecondition, cut)
	lose(later)
	_, err = h.delta(target, later, 0, 0, all)
	wantCode(t, err, codes.DataLoss, later)
}

// editSnapshot changes the record of a snapshot while no plugin runs, and returns it.
func (h *host) editSnapshot(text string, edit func(*catalog.Snapshot)) catalog.Snapshot {
	h.t.Helper()
	c, err := catalog.Open(filepath.Join(h.root(), "catalog.db"))
	must(h.t, err)
	id, err := handle.ParseSnapshot(text)
	must(h.t, err)
	snap, err := c.Snapshot(id)
	must(h.t, err)
	edit(&snap)
	must(h.t, c.PutSnapshot(snap), c.Close())
	return snap
}

// TestASnapshotThatIsBeingMadeOrDeleted looks at one while it is cut, and after a process has died in deleting it.
func TestASnapshotThatIsBeingMadeOrDeleted(t *testing.T) {
	h := newHost(t, "xfs")
	v, base, target := pair(h)
	h.stop()
	h.editSnapshot(target, func(snap *catalog.Snapshot) { snap.State = catalog.Deleting })
	h.start()
	_, err := h.delta(base, target, 0, 0, all)
	wantCode(t, err, codes.NotFound, target)
	h.stop()
	cutting := ""
	h.watch = func(ctx context.Context) context.Context {
		return crashpoint.With(ctx, func(place string) {
			if place != "snapshot intended" || cutting != "" {
				return
			}
			// Its id is not known to anybody yet, but it can be guessed from the records.
			resp, err := poolv1.NewPoolClient(h.conn).ListObjects(context.Background(), &poolv1.ListObjectsRequest{})
			if err != nil {
				t.Error(err)
				return
			}
			for _, o := range resp.GetObjects() {
				if o.GetSnapshot() && o.GetState() == string(catalog.Creating) {
					cutting = o.GetId()
					_, err := h.allocated(cutting, 0, 0, all)
					wantCode(t, err, codes.Unavailable, cutting)
				}
			}
		})
	}
	h.start()
	h.snapshot("cutting", v.id)
	if cutting == "" {
		t.Error("no snapshot was seen while it was cut")
	}
}

// TestACancelledStreamNeverEndsWell ends the CO's patience in the middle of a stream.
func TestACancelledStreamNeverEndsWell(t *testing.T) {
	h := newHost(t, "xfs")
	resp, err := h.control.CreateVolume(h.call(), &csi.CreateVolumeRequest{
		Name: "v", VolumeCapabilities: []*csi.VolumeCapability{block()}, CapacityRange: &csi.CapacityRange{RequiredBytes: 256 * mib},
	})
	must(t, err)
	v := &volume{host: h, id: resp.GetVolume().GetVolumeId()}
	var odd []int64
	for i := int64(1); i < 256*mib/page; i += 2 {
		odd = append(odd, i, 1)
	}
	v.fill('a', odd...)
	snap := h.snapshot("s", v.id)
	client := csi.NewSnapshotMetadataClient(h.conn)
	for name, end := range map[string]struct {
		context func() (context.Context, context.CancelFunc)
		want    codes.Code
	}{
		"cancelled": {func() (context.Context, context.CancelFunc) { return context.WithCancel(t.Context()) }, codes.Canceled},
		"too late":  {func() (context.Context, context.CancelFunc) { return context.WithTimeout(t.Context(), 2*time.Second) }, codes.DeadlineExceeded},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := end.context()
			defer cancel()
			// So many small messages that they do not fit into the connection's window: the plugin waits for the CO.
			stream, err := client.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: snap, MaxResults: 1})
			must(t, err)
			_, err = stream.Recv()
			must(t, err)
			if end.want == codes.Canceled {
				// The snapshot cannot be deleted meanwhile.
				_, busy := h.control.DeleteSnapshot(h.call(), &csi.DeleteSnapshotRequest{SnapshotId: snap})
				wantCode(t, busy, codes.Aborted, snap)
				cancel()
			} else {
				<-ctx.Done()
			}
			for err == nil {
				_, err = stream.Recv()
			}
			wantCode(t, err, end.want)
		})
	}
	h.stop()
	// The CO would not see how a stream ended that it had turned its back on; the plugin's log does.
	log := h.log.String()
	if n := strings.Count(log, "GetMetadataAllocated code="); n != 2 || strings.Contains(log, "GetMetadataAllocated code=OK") {
		t.Errorf("%d streams have ended, or one of them well", n)
	}
}

// TestTheClockIsSetBack cuts a snapshot when an earlier one seems to be from the future.
func TestTheClockIsSetBack(t *testing.T) {
	h := newHost(t, "xfs")
	_, _, target := pair(h)
	h.stop()
	snap := h.editSnapshot(target, func(snap *catalog.Snapshot) { snap.Created = snap.Created.Add(time.Hour) })
	h.start()
	later := h.snapshot("later", snap.Volume.String())
	got, err := h.delta(target, later, 0, 0, all)
	if err != nil || len(got.spans) > 0 {
		t.Errorf("got %v, %v", got.spans, err)
	}
	_, err = h.delta(later, target, 0, 0, all)
	wantCode(t, err, codes.InvalidArgument, "exchange")
}
