package csiplugin_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/scratch"
	poolv1 "crust.dev/crust/protocol/crust/pool/v1"
	"crust.dev/crust/test/priv"
)

// keep cuts a snapshot that is kept as one of so many bases when it is deleted.
func (h *host) keep(name, volume string, bases int) string {
	h.t.Helper()
	resp, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{
		Name: name, SourceVolumeId: volume, Parameters: map[string]string{csiplugin.ParameterKeepBases: fmt.Sprint(bases)},
	})
	must(h.t, err)
	return resp.GetSnapshot().GetSnapshotId()
}

func (h *host) drop(snap string) {
	h.t.Helper()
	_, err := h.control.DeleteSnapshot(h.call(), &csi.DeleteSnapshotRequest{SnapshotId: snap})
	must(h.t, err)
}

// bases are the ids of the bases, in order.
func (h *host) bases() []string {
	h.t.Helper()
	resp, err := poolv1.NewBasesClient(h.conn).ListBases(h.call(), &poolv1.ListBasesRequest{})
	must(h.t, err)
	ids := []string{}
	for _, b := range resp.GetBases() {
		ids = append(ids, b.GetId())
	}
	return ids
}

func (h *host) wantBases(what string, want ...string) {
	h.t.Helper()
	slices.Sort(want)
	if got := h.bases(); !slices.Equal(got, want) {
		h.t.Errorf("%s: the bases are %v, want %v", what, got, want)
	}
}

// TestBases is the life of an incremental backup that keeps no snapshot: each is deleted as soon as it was backed up.
func TestBases(t *testing.T) {
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			h := newHost(t, fstype)
			v := h.create("v", block(), nil)
			v.fill('a', 0, 64)
			first := h.keep("first", v.id, 1)
			h.drop(first)
			h.drop(first)
			h.wantBases("after the first", first)
			for what, err := range map[string]error{
				"GetSnapshot": func() error {
					_, err := h.control.GetSnapshot(h.call(), &csi.GetSnapshotRequest{SnapshotId: first})
					return err
				}(),
				"CreateVolume": func() error {
					_, err := h.control.CreateVolume(h.call(), cloneRequest("c", snapshotSource(first), 0))
					return err
				}(),
				"GetMetadataAllocated": func() error { _, err := h.allocated(first, 0, 0, all); return err }(),
				"as a target":          func() error { _, err := h.delta(first, first, 0, 0, all); return err }(),
			} {
				if err == nil {
					t.Errorf("%s of a deleted snapshot is answered", what)
				}
				wantCode(t, err, codes.NotFound, first)
			}
			list, err := h.control.ListSnapshots(h.call(), &csi.ListSnapshotsRequest{})
			if err != nil || len(list.GetEntries()) > 0 {
				t.Errorf("a deleted snapshot is listed: %v, %v", list, err)
			}
			v.fill('b', 3, 2)
			second := h.keep("first", v.id, 1) // the name is free
			want := pages(3, 2)
			check := func(what string) {
				t.Helper()
				got, err := h.delta(first, second, 0, 0, all)
				if diff := cmp.Diff(want, got.spans, cmp.AllowUnexported(span{})); err != nil || diff != "" {
					t.Errorf("%s: %v (-want +got):\n%s", what, err, diff)
				}
			}
			check("changes since a deleted snapshot")
			h.stop()
			h.start()
			check("after a restart")
			if f, err := os.OpenFile(h.file(first), os.O_WRONLY, 0); err == nil {
				_ = f.Close()
				t.Error("a base can be written to")
			}
			// What only the base has is what was overwritten since. btrfs gives extents back as a whole, so there it is nothing.
			least := map[string]int64{"xfs": 2 * page}[fstype]
			resp, err := poolv1.NewBasesClient(h.conn).ListBases(h.call(), &poolv1.ListBasesRequest{})
			must(t, err)
			if b := resp.GetBases()[0]; b.GetVolume() != v.id || b.GetSizeBytes() != v.size || b.GetKeep() != 1 || b.GetHeldBytes() < least || b.GetHeldBytes() > 64*page {
				t.Errorf("the base is %v", b)
			}
			h.drop(second)
			h.wantBases("the second takes the first one's place", second)
			if slices.Contains(h.objects(), first) {
				t.Error("the first one's data is still there")
			}
			_, err = h.delta(first, second, 0, 0, all)
			wantCode(t, err, codes.NotFound)
			must(t, v.delete())
			h.wantBases("nothing can be compared any more")
			if left := h.objects(); len(left) > 0 {
				t.Errorf("left are %v", left)
			}
		})
	}
}

func TestBasesThatAreNeeded(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("v", block(), nil)
	v.fill('a', 0, 64)
	other := h.create("other", block(), nil)
	others := h.keep("others", other.id, 1)
	h.drop(others)
	var snaps []string
	for i := range 4 {
		snaps = append(snaps, h.keep(fmt.Sprint(i), v.id, 2))
	}
	plain := h.snapshot("plain", v.id)
	h.drop(snaps[2])
	h.drop(snaps[0])
	h.wantBases("two are kept", others, snaps[0], snaps[2])
	h.drop(snaps[1])
	h.wantBases("the oldest gives way, whichever was deleted last", others, snaps[1], snaps[2])
	must(t, v.delete())
	h.wantBases("the volume is gone, snapshots of it are not", others, snaps[1], snaps[2])
	got, err := h.delta(snaps[1], plain, 0, 0, all)
	if err != nil || len(got.spans) > 0 {
		t.Errorf("got %v, %v", got, err)
	}
	release := func(id string) error {
		_, err := poolv1.NewBasesClient(h.conn).ReleaseBase(h.call(), &poolv1.ReleaseBaseRequest{Id: id})
		return err
	}
	must(t, release(snaps[1]), release(snaps[1]))
	h.wantBases("one was released", others, snaps[2])
	wantCode(t, release(plain), codes.OK) // it is no base
	wantCode(t, release(""), codes.InvalidArgument)
	wantCode(t, release(handle.NewSnapshot("ffffffffffff").String()), codes.FailedPrecondition)
	h.drop(plain)
	h.wantBases("the last snapshot but one of the volume is gone", others, snaps[2])
	h.drop(snaps[3])
	h.wantBases("and the last", others)
	for _, bad := range []string{"-1", "17", "x", ""} {
		parameters := map[string]string{csiplugin.ParameterKeepBases: bad}
		_, err := h.control.CreateSnapshot(h.call(), &csi.CreateSnapshotRequest{Name: "bad", SourceVolumeId: other.id, Parameters: parameters})
		wantCode(t, err, codes.InvalidArgument, csiplugin.ParameterKeepBases)
	}
	_, err = h.group.CreateVolumeGroupSnapshot(h.call(), &csi.CreateVolumeGroupSnapshotRequest{
		Name: "g", SourceVolumeIds: []string{other.id}, Parameters: map[string]string{csiplugin.ParameterKeepBases: "1"},
	})
	wantCode(t, err, codes.InvalidArgument, csiplugin.ParameterKeepBases)
}

// TestBasesAndKills kills the plugin in every place of deleting a snapshot that becomes a base and frees another. After each
// the snapshot is there or is a base, and asking again ends the same.
func TestBasesAndKills(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("v", block(), nil)
	v.fill('a', 0, 64)
	places := map[string]bool{}
	last := h.keep("last", v.id, 1)
	h.drop(last)
	for at := 0; ; at++ {
		v.fill(byte(at), 8, 1)
		next := h.keep(fmt.Sprint("next-", at), v.id, 1)
		h.stop()
		end := h.startChild(csi.Controller_DeleteSnapshot_FullMethodName, at)
		_, killed := h.control.DeleteSnapshot(h.call(), &csi.DeleteSnapshotRequest{SnapshotId: next})
		place := end()
		h.start()
		got, err := h.delta(next, next, 0, 0, all)
		if err != nil && !slices.Contains(h.bases(), next) {
			t.Errorf("killed when %q: it is neither a snapshot nor a base: %v, %v", place, got, err)
		}
		h.drop(next)
		h.wantBases(fmt.Sprintf("killed when %q", place), next)
		if objects := h.objects(); len(objects) != 2 {
			t.Errorf("killed when %q: the pool holds %v", place, objects)
		}
		if place == "" {
			must(t, killed)
			break
		}
		places[place] = true
	}
	for _, want := range []string{"base noted with the data", "snapshot made a base", "data of a base deleted", "base forgotten"} {
		if !places[want] {
			t.Errorf("never killed when %q, but when %v", want, places)
		}
	}
}

// TestABaseWhoseDataIsGone is refused, and never answered with less than there is.
func TestABaseWhoseDataIsGone(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("v", block(), nil)
	v.fill('a', 0, 64)
	base := h.keep("base", v.id, 1)
	h.drop(base)
	target := h.snapshot("target", v.id)
	scratch.Run(t, "chattr", "-i", h.file(base))
	must(t, os.Remove(h.file(base)))
	_, err := h.delta(base, target, 0, 0, all)
	wantCode(t, err, codes.FailedPrecondition, base, "full backup")
	h.wantBases("it can still be seen", base)
}

// TestNoBaseOnAFullPool deletes for good what it would keep otherwise: its space is what is missing. What was kept before,
// other snapshots and the volume stay as they are.
func TestNoBaseOnAFullPool(t *testing.T) {
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			priv.Root(t)
			h := newHostIn(t, filepath.Join(scratch.Filesystem(t, fstype, 320*mib), "pool"))
			v := h.create("v", block(), nil)
			v.fill('a', 0, 64)
			kept := h.keep("kept", v.id, 2)
			h.drop(kept)
			v.fill('b', 64, 2048)
			given := h.keep("given up", v.id, 2)
			v.fill('c', 0, 2112)
			target := h.snapshot("target", v.id)
			before := [][]byte{read(t, v.file()), read(t, h.file(kept)), read(t, h.file(target))}
			filler := filepath.Join(h.root(), "filler")
			scratch.Fill(t, filler)

			h.drop(given)
			h.wantBases("the pool is full", kept)
			if !strings.Contains(h.log.String(), "should be kept as a base") || !strings.Contains(h.log.String(), "the pool is full") {
				t.Error("the log does not say what became of the base")
			}
			if slices.Contains(h.objects(), given) {
				t.Error("the data of the snapshot takes space still")
			}
			_, err := h.control.GetSnapshot(h.call(), &csi.GetSnapshotRequest{SnapshotId: given})
			wantCode(t, err, codes.NotFound)
			_, err = h.delta(given, target, 0, 0, all)
			wantCode(t, err, codes.NotFound, given)
			h.drop(given)
			check := func(what string) {
				t.Helper()
				for i, path := range []string{v.file(), h.file(kept), h.file(target)} {
					if !bytes.Equal(before[i], read(t, path)) {
						t.Errorf("%s: %s is not what it was", what, path)
					}
				}
				got, err := h.delta(kept, target, 0, 0, all)
				if diff := cmp.Diff(pages(0, 2112), got.spans, cmp.AllowUnexported(span{})); err != nil || diff != "" {
					t.Errorf("%s: changes since the base that was there: %v (-want +got):\n%s", what, err, diff)
				}
			}
			check("in the full pool")
			h.stop()
			h.start()
			check("after a restart")

			// With space again, bases are kept again.
			must(t, os.Remove(filler))
			h.waitForSpace(16 * mib)
			last := h.keep("last", v.id, 2)
			h.drop(last)
			h.wantBases("there is space again", kept, last)
		})
	}
}

// TestRepairFindsBases loses the catalog.
func TestRepairFindsBases(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("v", block(), nil)
	v.fill('a', 0, 64)
	base := h.keep("base", v.id, 1)
	h.drop(base)
	target := h.snapshot("target", v.id)
	h.stop()
	must(t, os.Remove(filepath.Join(h.root(), "catalog.db")))
	found, err := csiplugin.Repair(t.Context(), h.pool, slog.New(slog.DiscardHandler))
	if err != nil || found.Bases != 1 || found.Snapshots != 1 || len(found.Unknown) > 0 {
		t.Errorf("got %+v, %v", found, err)
	}
	h.start()
	h.wantBases("after the repair", base)
	if _, err := h.delta(base, target, 0, 0, all); err != nil {
		t.Error(err)
	}
}

func TestDispensable(t *testing.T) {
	at := func(hour int) time.Time { return time.Date(2026, 1, 1, hour, 0, 0, 0, time.UTC) }
	base := func(hour, keep int) catalog.Base {
		return catalog.Base{ID: handle.NewSnapshot("ffffffffffff"), Created: at(hour), Keep: keep}
	}
	for name, c := range map[string]struct {
		bases     []catalog.Base
		volume    bool
		snapshots []int
		want      []int
	}{
		"none":                               {nil, true, nil, nil},
		"one, kept":                          {[]catalog.Base{base(1, 1)}, true, nil, nil},
		"two, one kept":                      {[]catalog.Base{base(1, 1), base(2, 1)}, true, nil, []int{1}},
		"each says for itself":               {[]catalog.Base{base(1, 3), base(2, 1), base(3, 1)}, true, nil, []int{2}},
		"no volume":                          {[]catalog.Base{base(1, 1)}, false, nil, []int{1}},
		"no volume, an older snapshot":       {[]catalog.Base{base(2, 1)}, false, []int{1}, []int{2}},
		"no volume, a younger snapshot":      {[]catalog.Base{base(1, 1)}, false, []int{2}, nil},
		"no volume, a snapshot between them": {[]catalog.Base{base(1, 2), base(3, 2)}, false, []int{2}, []int{3}},
	} {
		t.Run(name, func(t *testing.T) {
			var snapshots []catalog.Snapshot
			for _, hour := range c.snapshots {
				snapshots = append(snapshots, catalog.Snapshot{Created: at(hour)})
			}
			var got []int
			for _, b := range csiplugin.Dispensable(c.bases, c.volume, snapshots) {
				got = append(got, b.Created.Hour())
			}
			slices.Sort(got)
			if !slices.Equal(got, c.want) {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}
