package csiplugin_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/test/priv"
)

// modelSteps is how many steps the model test takes; with -short a tenth of it.
const modelSteps = 10000

// modelBlock is what the model test writes at a time.
const modelBlock = 4096

// thing is a volume or a snapshot as the model has it. Its content is, for each block that is not zero, what was written.
type thing struct {
	id, name string
	size     int64
	source   string
	group    string
	content  map[int64]uint64
}

// model is what there should be, by names; members of groups have their ids for names.
type model struct {
	*host
	r                  *rand.Rand
	volumes, snapshots map[string]*thing
	groups             map[string]map[string]bool // group snapshot id by name is in groupIDs; the members' ids
	groupIDs           map[string]string
	names              int
	stamp              uint64
}

// TestModel makes random calls, valid, repeated, conflicting and concurrent, and holds the plugin and every byte of every
// volume and snapshot against a model after each.
func TestModel(t *testing.T) {
	priv.Root(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	m := &model{
		host: newHostIn(t, filepath.Join(scratch.Filesystem(t, "xfs", 2*gib), "pool")), r: rand.New(rand.NewPCG(seed, 0)),
		volumes: map[string]*thing{}, snapshots: map[string]*thing{}, groups: map[string]map[string]bool{}, groupIDs: map[string]string{},
	}
	steps := modelSteps
	if testing.Short() {
		steps /= 10
	}
	done := map[string]int{}
	for i := range steps {
		name := m.step()
		done[name]++
		m.check(fmt.Sprintf("step %d, %s", i, name))
		if t.Failed() {
			return
		}
	}
	t.Logf("%v", done)
}

func (m *model) step() string {
	steps := []struct {
		weight int
		name   string
		do     func()
	}{
		{30, "write", m.write}, {8, "discard", m.discard}, {8, "create", m.create}, {8, "clone", m.clone}, {8, "restore", m.restore},
		{10, "snapshot", m.cut}, {3, "group", m.cutGroup}, {6, "expand", m.expand}, {10, "delete volume", m.deleteVolume},
		{9, "delete snapshot", m.deleteSnapshot}, {2, "delete group", m.deleteGroup}, {6, "repeat", m.repeat}, {6, "conflict", m.conflict},
		{4, "at once", m.atOnce}, {1, "restart", func() { m.host.stop(); m.host.start() }},
	}
	total := 0
	for _, s := range steps {
		total += s.weight
	}
	n := m.r.IntN(total)
	for _, s := range steps {
		if n -= s.weight; n < 0 {
			s.do()
			return s.name
		}
	}
	return ""
}

func (m *model) newName() string { m.names++; return fmt.Sprint("n", m.names) }

func pick[T any](r *rand.Rand, from map[string]T) (T, bool) {
	var none T
	if len(from) == 0 {
		return none, false
	}
	names := slices.Sorted(maps.Keys(from))
	return from[names[r.IntN(len(names))]], true
}

// blockAt is what a block holds: it says where it belongs and when it was written.
func blockAt(index int64, stamp uint64) []byte {
	data := make([]byte, modelBlock)
	for i := 0; i < modelBlock; i += 16 {
		binary.LittleEndian.PutUint64(data[i:], stamp)
		binary.LittleEndian.PutUint64(data[i+8:], uint64(index)*modelBlock+uint64(i))
	}
	return data
}

func (m *model) write() {
	v, ok := pick(m.r, m.volumes)
	if !ok {
		return
	}
	f, err := os.OpenFile(m.file(v.id), os.O_RDWR, 0)
	must(m.t, err)
	for range 1 + m.r.IntN(4) {
		index := m.r.Int64N(v.size / modelBlock)
		m.stamp++
		_, err := f.WriteAt(blockAt(index, m.stamp), index*modelBlock)
		must(m.t, err)
		v.content[index] = m.stamp
	}
	must(m.t, f.Close())
}

func (m *model) discard() {
	v, ok := pick(m.r, m.volumes)
	if !ok {
		return
	}
	f, err := os.OpenFile(m.file(v.id), os.O_RDWR, 0)
	must(m.t, err)
	first := m.r.Int64N(v.size / modelBlock)
	count := min(1+m.r.Int64N(32), v.size/modelBlock-first)
	must(m.t, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, first*modelBlock, count*modelBlock), f.Close())
	for i := range count {
		delete(v.content, first+i)
	}
}

func request(name string, size int64, source *csi.VolumeContentSource) *csi.CreateVolumeRequest {
	req := &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{block()}, VolumeContentSource: source}
	if size > 0 {
		req.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	}
	return req
}

const maxThings = 8

// made asks for a volume and notes it in the model with the content of a source.
func (m *model) made(size int64, source *csi.VolumeContentSource, sourceID string, from *thing) {
	name := m.newName()
	resp, err := m.control.CreateVolume(m.call(), request(name, size, source))
	must(m.t, err)
	v := &thing{id: resp.GetVolume().GetVolumeId(), name: name, size: resp.GetVolume().GetCapacityBytes(), source: sourceID, content: map[int64]uint64{}}
	if from != nil {
		v.content = maps.Clone(from.content)
	}
	if size > 0 && v.size != size {
		m.t.Errorf("asked for %d bytes, got %d", size, v.size)
	}
	m.volumes[name] = v
}

func (m *model) create() {
	if len(m.volumes) < maxThings {
		m.made(modelBlock*(1+m.r.Int64N(256)), nil, "", nil)
	}
}

// larger is a size for something that is made from a source: its own by default.
func (m *model) larger(size int64) int64 {
	if m.r.IntN(2) == 0 {
		return 0
	}
	return size + modelBlock*m.r.Int64N(64)
}

func (m *model) clone() {
	if v, ok := pick(m.r, m.volumes); ok && len(m.volumes) < maxThings {
		m.made(m.larger(v.size), volumeSource(v.id), v.id, v)
	}
}

func (m *model) restore() {
	if s, ok := pick(m.r, m.snapshots); ok && len(m.volumes) < maxThings {
		m.made(m.larger(s.size), snapshotSource(s.id), s.id, s)
	}
}

func (m *model) cut() {
	if v, ok := pick(m.r, m.volumes); ok && len(m.snapshots) < maxThings {
		name := m.newName()
		m.snapshots[name] = &thing{id: m.snapshot(name, v.id), name: name, size: v.size, source: v.id, content: maps.Clone(v.content)}
	}
}

func (m *model) cutGroup() {
	if len(m.volumes) < 2 || len(m.groups) > 1 {
		return
	}
	byID := map[string]*thing{}
	for range 3 {
		v, _ := pick(m.r, m.volumes)
		byID[v.id] = v
	}
	name := m.newName()
	g, err := m.groupSnapshot(name, slices.Collect(maps.Keys(byID))...)
	must(m.t, err)
	m.groups[name], m.groupIDs[name] = map[string]bool{}, g.GetGroupSnapshotId()
	for _, s := range g.GetSnapshots() {
		v := byID[s.GetSourceVolumeId()]
		m.groups[name][s.GetSnapshotId()] = true
		m.snapshots[s.GetSnapshotId()] = &thing{id: s.GetSnapshotId(), name: s.GetSnapshotId(), size: v.size, source: v.id, group: g.GetGroupSnapshotId(), content: maps.Clone(v.content)}
	}
}

func (m *model) expand() {
	v, ok := pick(m.r, m.volumes)
	if !ok || v.size > 4*mib {
		return
	}
	size := v.size + modelBlock*m.r.Int64N(16)
	_, err := m.control.ControllerExpandVolume(m.call(), &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: size}})
	must(m.t, err)
	v.size = size
}

func (m *model) deleteVolume() {
	if v, ok := pick(m.r, m.volumes); ok {
		must(m.t, (&volume{host: m.host, id: v.id}).delete())
		delete(m.volumes, v.name)
	}
}

func (m *model) deleteSnapshot() {
	s, ok := pick(m.r, m.snapshots)
	if !ok {
		return
	}
	_, err := m.control.DeleteSnapshot(m.call(), &csi.DeleteSnapshotRequest{SnapshotId: s.id})
	if s.group != "" {
		wantCode(m.t, err, codes.InvalidArgument)
		return
	}
	must(m.t, err)
	delete(m.snapshots, s.name)
}

func (m *model) deleteGroup() {
	for name, members := range m.groups {
		_, err := m.group.DeleteVolumeGroupSnapshot(m.call(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: m.groupIDs[name], SnapshotIds: slices.Collect(maps.Keys(members))})
		must(m.t, err)
		for id := range members {
			delete(m.snapshots, id)
		}
		delete(m.groups, name)
		delete(m.groupIDs, name)
		return
	}
}

// repeat makes a call again that has succeeded.
func (m *model) repeat() {
	if v, ok := pick(m.r, m.volumes); ok {
		resp, err := m.control.CreateVolume(m.call(), request(v.name, v.size, m.sourceOf(v)))
		if err != nil || resp.GetVolume().GetVolumeId() != v.id || resp.GetVolume().GetCapacityBytes() != v.size {
			m.t.Errorf("repeated: %v, %v", resp, err)
		}
	}
	if s, ok := pick(m.r, m.snapshots); ok && s.group == "" {
		if got := m.snapshot(s.name, s.source); got != s.id {
			m.t.Errorf("repeated: %s, want %s", got, s.id)
		}
	}
}

func (m *model) sourceOf(v *thing) *csi.VolumeContentSource {
	h, err := handle.Parse(v.source)
	switch {
	case err != nil:
		return nil
	case h.Kind() == handle.KindSnapshot:
		return snapshotSource(v.source)
	}
	return volumeSource(v.source)
}

// conflict asks for what cannot be had.
func (m *model) conflict() {
	pool := handle.Pool(m.poolID())
	_, err := m.control.CreateVolume(m.call(), request("none", 0, snapshotSource(handle.NewSnapshot(pool).String())))
	wantCode(m.t, err, codes.NotFound)
	v, ok := pick(m.r, m.volumes)
	if !ok {
		return
	}
	_, err = m.control.CreateVolume(m.call(), request(v.name, v.size+modelBlock, m.sourceOf(v)))
	wantCode(m.t, err, codes.AlreadyExists)
	_, err = m.control.CreateVolume(m.call(), request(v.name, v.size, volumeSource(v.id)))
	wantCode(m.t, err, codes.AlreadyExists)
	if v.size > modelBlock {
		_, err = m.control.CreateVolume(m.call(), request("none", v.size-modelBlock, volumeSource(v.id)))
		wantCode(m.t, err, codes.OutOfRange)
	}
	if s, ok := pick(m.r, m.snapshots); ok && s.group == "" && s.source != v.id {
		_, err = m.control.CreateSnapshot(m.call(), &csi.CreateSnapshotRequest{Name: s.name, SourceVolumeId: v.id})
		wantCode(m.t, err, codes.AlreadyExists)
	}
}

// atOnce makes the same calls several times at once: clones and snapshots of one volume under one name each. Whoever is
// not told to try again gets the same answer.
func (m *model) atOnce() {
	v, ok := pick(m.r, m.volumes)
	if !ok || len(m.volumes) >= maxThings || len(m.snapshots) >= maxThings {
		return
	}
	name := m.newName()
	var mu sync.Mutex
	ids := map[string]bool{}
	var wg sync.WaitGroup
	note := func(id string, err error) {
		mu.Lock()
		defer mu.Unlock()
		if err == nil {
			ids[id] = true
		} else if status.Code(err) != codes.Aborted {
			m.t.Errorf("at once: %v", err)
		}
	}
	ctx := m.call()
	for range 3 {
		wg.Go(func() {
			resp, err := m.control.CreateVolume(ctx, request(name, 0, volumeSource(v.id)))
			note(resp.GetVolume().GetVolumeId(), err)
		})
		wg.Go(func() {
			resp, err := m.control.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: v.id})
			note(resp.GetSnapshot().GetSnapshotId(), err)
		})
	}
	wg.Wait()
	if len(ids) != 2 {
		m.t.Errorf("one name each became %v", ids)
	}
	for id := range ids {
		h, _ := handle.Parse(id)
		made := &thing{id: id, name: name, size: v.size, source: v.id, content: maps.Clone(v.content)}
		if h.Kind() == handle.KindVolume {
			m.volumes[name] = made
		} else {
			m.snapshots[name] = made
		}
	}
}

// check holds the plugin against the model.
func (m *model) check(when string) {
	m.t.Helper()
	volumes, snapshots := m.everything()
	want, got := map[string]string{}, map[string]string{}
	for _, v := range m.volumes {
		want[v.id] = fmt.Sprintf("%d from %s", v.size, v.source)
	}
	for _, s := range m.snapshots {
		want[s.id] = fmt.Sprintf("%d of %s in %s", s.size, s.source, s.group)
	}
	for _, e := range volumes.GetEntries() {
		source := e.GetVolume().GetContentSource()
		got[e.GetVolume().GetVolumeId()] = fmt.Sprintf("%d from %s", e.GetVolume().GetCapacityBytes(), source.GetVolume().GetVolumeId()+source.GetSnapshot().GetSnapshotId())
	}
	for _, e := range snapshots.GetEntries() {
		s := e.GetSnapshot()
		got[s.GetSnapshotId()] = fmt.Sprintf("%d of %s in %s", s.GetSizeBytes(), s.GetSourceVolumeId(), s.GetGroupSnapshotId())
	}
	if !maps.Equal(want, got) {
		m.t.Errorf("%s: there are\n%v, want\n%v", when, got, want)
	}
	if objects, ids := m.objects(), slices.Sorted(maps.Keys(want)); !slices.Equal(objects, ids) {
		m.t.Errorf("%s: the pool holds\n%v, want\n%v", when, objects, ids)
	}
	for _, things := range []map[string]*thing{m.volumes, m.snapshots} {
		for _, x := range things {
			if err := m.compare(x); err != nil {
				m.t.Errorf("%s: %s: %v", when, x.id, err)
			}
		}
	}
}

// compare reads every extent of a thing.
func (m *model) compare(x *thing) error {
	seen, zero := 0, make([]byte, modelBlock)
	var wrong error
	eachExtent(m.t, m.file(x.id), func(offset int64, data []byte) {
		for i := int64(0); i < int64(len(data)); i += modelBlock {
			index := (offset + i) / modelBlock
			want := zero
			if stamp, ok := x.content[index]; ok {
				seen++
				want = blockAt(index, stamp)
			}
			if !bytes.Equal(data[i:i+modelBlock], want) && wrong == nil {
				wrong = fmt.Errorf("block %d is not what was written", index)
			}
		}
	})
	if wrong == nil && seen != len(x.content) {
		wrong = fmt.Errorf("of %d blocks %d are there", len(x.content), seen)
	}
	info, err := os.Stat(m.file(x.id))
	if err == nil && info.Size() != x.size {
		err = fmt.Errorf("the file has %d bytes, want %d", info.Size(), x.size)
	}
	if wrong == nil {
		wrong = err
	}
	return wrong
}
