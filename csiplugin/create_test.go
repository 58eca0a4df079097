package csiplugin_test

import (
	"context"
	"maps"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/protocol/rpc/crashpoint"
)

// createRequest is a good one.
func createRequest(name string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: 20 * mib},
		VolumeCapabilities: []*csi.VolumeCapability{mounted("ext4")},
		Parameters:         map[string]string{deferred.ParameterDefer: "auto", "csi.storage.k8s.io/pvc/name": "claim"},
	}
}

// objects are the names of the files in the pool.
func (h *host) objects() []string {
	h.t.Helper()
	entries, err := os.ReadDir(h.file(""))
	if err != nil {
		h.t.Fatal(err)
	}
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names
}

func TestCreateVolume(t *testing.T) {
	for _, fstype := range []string{"xfs", "btrfs"} {
		t.Run(fstype, func(t *testing.T) {
			h := newHost(t, fstype)
			resp, err := h.control.CreateVolume(h.call(), createRequest("a"))
			must(t, err)
			v := resp.GetVolume()
			if v.GetCapacityBytes() != 20*mib || len(v.GetVolumeId()) > 128 || !strings.HasPrefix(v.GetVolumeId(), h.poolID()+"-") {
				t.Errorf("got %v", v)
			}
			if want := map[string]string{deferred.ParameterDefer: "auto"}; !maps.Equal(v.GetVolumeContext(), want) {
				t.Errorf("the context is %v, want %v", v.GetVolumeContext(), want)
			}
			if topology := v.GetAccessibleTopology(); len(topology) != 1 || topology[0].GetSegments()["csi.crust.dev/pool"] != h.poolID() {
				t.Errorf("the topology is %v", topology)
			}
			info, err := os.Stat(h.file(v.GetVolumeId()))
			if err != nil || info.Size() != 20*mib || info.Mode().Perm() != 0o600 || !blank(t, h.file(v.GetVolumeId())) {
				t.Errorf("the file is %v, %v", info, err)
			}

			again, err := h.control.CreateVolume(h.call(), createRequest("a"))
			if err != nil || !proto.Equal(again, resp) {
				t.Errorf("asked again: %v, %v, want %v", again, err, resp)
			}
			if other, err := h.control.CreateVolume(h.call(), createRequest("b")); err != nil || other.GetVolume().GetVolumeId() == v.GetVolumeId() {
				t.Errorf("another name: %v, %v", other, err)
			}
			if got := h.objects(); len(got) != 2 {
				t.Errorf("the pool holds %v", got)
			}
		})
	}
}

func TestCreateVolumeRefusesBadRequestsAndMakesNothing(t *testing.T) {
	h := newHost(t, "xfs")
	for name, c := range map[string]struct {
		change func(*csi.CreateVolumeRequest)
		want   codes.Code
		text   string
	}{
		"no name":                    {func(r *csi.CreateVolumeRequest) { r.Name = "" }, codes.InvalidArgument, "name"},
		"a name of 129 bytes":        {func(r *csi.CreateVolumeRequest) { r.Name = strings.Repeat("a", 129) }, codes.InvalidArgument, "name"},
		"a control character":        {func(r *csi.CreateVolumeRequest) { r.Name = "a\u0085" }, codes.InvalidArgument, "name"},
		"no capability":              {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = nil }, codes.InvalidArgument, "volume_capabilities"},
		"a nil capability":           {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = []*csi.VolumeCapability{{}} }, codes.InvalidArgument, "access_mode"},
		"no access mode":             {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessMode = nil }, codes.InvalidArgument, "access_mode"},
		"an unknown access mode":     {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessMode.Mode = 99 }, codes.InvalidArgument, "99"},
		"access mode UNKNOWN":        {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessMode.Mode = 0 }, codes.InvalidArgument, "access_mode"},
		"no access type":             {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessType = nil }, codes.InvalidArgument, "access_type"},
		"many nodes that read":       {setMode(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY), codes.InvalidArgument, "MULTI_NODE_READER_ONLY"},
		"many nodes, one writer":     {setMode(csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER), codes.InvalidArgument, "MULTI_NODE_SINGLE_WRITER"},
		"many nodes that write":      {setMode(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER), codes.InvalidArgument, "MULTI_NODE_MULTI_WRITER"},
		"an unsupported filesystem":  {setFS("btrfs"), codes.InvalidArgument, "ext4, xfs"},
		"two filesystems":            {addFS("xfs"), codes.InvalidArgument, "contradicts"},
		"a filesystem parameter too": {setParameter("csi.storage.k8s.io/fstype", "xfs"), codes.InvalidArgument, "contradicts"},
		"a bad mount flag":           {setFlags("remount"), codes.InvalidArgument, "remount"},
		"an unknown parameter":       {setParameter("speed", "high"), codes.InvalidArgument, "speed"},
		"a bad value of defer":       {setParameter(deferred.ParameterDefer, "perhaps"), codes.InvalidArgument, "perhaps"},
		"mutable parameters":         {func(r *csi.CreateVolumeRequest) { r.MutableParameters = map[string]string{"a": "b"} }, codes.InvalidArgument, "mutable_parameters"},
		"a source": {func(r *csi.CreateVolumeRequest) {
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: "a"}}}
		}, codes.NotFound, "volume"},
		"a source without an id": {func(r *csi.CreateVolumeRequest) {
			r.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{}}}
		}, codes.InvalidArgument, "snapshot_id"},
		"a source of no kind":      {func(r *csi.CreateVolumeRequest) { r.VolumeContentSource = &csi.VolumeContentSource{} }, codes.InvalidArgument, "volume_content_source"},
		"an empty range":           {setRange(0, 0), codes.InvalidArgument, "capacity_range"},
		"a negative size":          {setRange(-1, 0), codes.InvalidArgument, "negative"},
		"a negative limit":         {setRange(20*mib, -1), codes.InvalidArgument, "negative"},
		"a limit below the need":   {setRange(20*mib, 19*mib), codes.InvalidArgument, "limit_bytes"},
		"a limit below ext4":       {setRange(0, 15*mib), codes.OutOfRange, "16777216"},
		"no size in the range":     {setRange(20*mib+1, 20*mib+2), codes.OutOfRange, "4096"},
		"more than the pool":       {setRange(3*gib, 0), codes.OutOfRange, "pool"},
		"the largest number":       {setRange(1<<63-1, 0), codes.OutOfRange, "pool"},
		"an empty topology":        {func(r *csi.CreateVolumeRequest) { r.AccessibilityRequirements = &csi.TopologyRequirement{} }, codes.InvalidArgument, "accessibility_requirements"},
		"another pool":             {setTopology("csi.crust.dev/pool", "ffffffffffff"), codes.ResourceExhausted, "csi.crust.dev/pool"},
		"a topology not from here": {setTopology("zone", "z"), codes.ResourceExhausted, "csi.crust.dev/pool"},
	} {
		t.Run(name, func(t *testing.T) {
			req := createRequest("bad")
			c.change(req)
			_, err := h.control.CreateVolume(h.call(), req)
			wantCode(t, err, c.want, c.text)
		})
	}
	if got := h.objects(); len(got) > 0 {
		t.Errorf("the refused requests have made %v", got)
	}
}

func setMode(m csi.VolumeCapability_AccessMode_Mode) func(*csi.CreateVolumeRequest) {
	return func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].AccessMode.Mode = m }
}

func setFS(fstype string) func(*csi.CreateVolumeRequest) {
	return func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].GetMount().FsType = fstype }
}

func addFS(fstype string) func(*csi.CreateVolumeRequest) {
	return func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = append(r.VolumeCapabilities, mounted(fstype)) }
}

func setFlags(flags ...string) func(*csi.CreateVolumeRequest) {
	return func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0].GetMount().MountFlags = flags }
}

func setParameter(key, value string) func(*csi.CreateVolumeRequest) {
	return func(r *csi.CreateVolumeRequest) { r.Parameters[key] = value }
}

func setRange(required, limit int64) func(*csi.CreateVolumeRequest) {
	return func(r *csi.CreateVolumeRequest) {
		r.CapacityRange = &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
	}
}

func setTopology(key, value string) func(*csi.CreateVolumeRequest) {
	return func(r *csi.CreateVolumeRequest) {
		r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{key: value}}}}
	}
}

func TestANameIsOneVolume(t *testing.T) {
	h := newHost(t, "xfs")
	first, err := h.control.CreateVolume(h.call(), createRequest("a"))
	must(t, err)
	for name, c := range map[string]struct {
		change func(*csi.CreateVolumeRequest)
		want   codes.Code
	}{
		"a smaller need":              {setRange(10*mib, 0), codes.OK},
		"no range":                    {func(r *csi.CreateVolumeRequest) { r.CapacityRange = nil }, codes.OK},
		"a limit that it keeps":       {setRange(20*mib, 20*mib), codes.OK},
		"another claim's name":        {setParameter("csi.storage.k8s.io/pvc/name", "other"), codes.OK},
		"the filesystem not named":    {setFS(""), codes.OK},
		"another access mode":         {setMode(onlyWriter), codes.OK},
		"its topology":                {setTopology("csi.crust.dev/pool", h.poolID()), codes.OK},
		"a larger need":               {setRange(21*mib, 0), codes.AlreadyExists},
		"a limit below its size":      {setRange(0, 19*mib), codes.AlreadyExists},
		"another filesystem":          {setFS("xfs"), codes.AlreadyExists},
		"a block device":              {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities[0] = block() }, codes.AlreadyExists},
		"another value of defer":      {setParameter(deferred.ParameterDefer, "always"), codes.AlreadyExists},
		"no parameters":               {func(r *csi.CreateVolumeRequest) { r.Parameters = nil }, codes.AlreadyExists},
		"another topology":            {setTopology("csi.crust.dev/pool", "ffffffffffff"), codes.AlreadyExists},
		"a mount and a block device":  {func(r *csi.CreateVolumeRequest) { r.VolumeCapabilities = append(r.VolumeCapabilities, block()) }, codes.AlreadyExists},
		"an impossible request still": {setParameter("speed", "high"), codes.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			req := createRequest("a")
			c.change(req)
			resp, err := h.control.CreateVolume(h.call(), req)
			wantCode(t, err, c.want)
			if err == nil && resp.GetVolume().GetVolumeId() != first.GetVolume().GetVolumeId() {
				t.Errorf("it is another volume: %v", resp)
			}
		})
	}
	if got := h.objects(); len(got) != 1 {
		t.Errorf("the pool holds %v", got)
	}
}

func TestSizesAreRaisedToWhatIsPossible(t *testing.T) {
	h := newHost(t, "xfs")
	for name, c := range map[string]struct {
		change func(*csi.CreateVolumeRequest)
		want   int64
	}{
		"xfs needs 300 MiB": {func(r *csi.CreateVolumeRequest) { setFS("xfs")(r); setRange(256*mib, 0)(r) }, 300 * mib},
		"without a size":    {func(r *csi.CreateVolumeRequest) { r.CapacityRange = nil }, gib},
		"only a limit":      {setRange(0, 100*mib+1), 100 * mib},
		"in whole pages":    {setRange(20*mib+1, 0), 20*mib + 4096},
		"a tiny block device": {func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities[0] = block()
			setRange(1, 0)(r)
		}, 4096},
		"the filesystem by parameter": {func(r *csi.CreateVolumeRequest) {
			setFS("")(r)
			setParameter("csi.storage.k8s.io/fstype", "xfs")(r)
		}, 300 * mib},
	} {
		t.Run(name, func(t *testing.T) {
			req := createRequest(name)
			c.change(req)
			resp, err := h.control.CreateVolume(h.call(), req)
			must(t, err)
			if got := resp.GetVolume().GetCapacityBytes(); got != c.want {
				t.Errorf("got %d bytes, want %d", got, c.want)
			}
			if info, err := os.Stat(h.file(resp.GetVolume().GetVolumeId())); err != nil || info.Size() != c.want {
				t.Errorf("the file is %v, %v", info, err)
			}
		})
	}
}

// TestCallsForOneVolumeDoNotOverlap holds a call in the middle of its work and makes others.
func TestCallsForOneVolumeDoNotOverlap(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	h.stop()
	reached, goOn := make(chan struct{}, 1), make(chan struct{})
	h.watch = func(ctx context.Context) context.Context {
		return crashpoint.With(ctx, func(place string) {
			if place == "expansion intended" || place == "creation intended" {
				reached <- struct{}{}
				<-goOn
			}
		})
	}
	h.start()
	var calls sync.WaitGroup
	calls.Go(func() {
		_, err := h.control.ControllerExpandVolume(h.call(), &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 40 * mib}})
		wantCode(t, err, codes.OK)
	})
	<-reached
	wantCode(t, v.delete(), codes.Aborted, v.id)
	wantCode(t, v.stage(), codes.Aborted)
	_, err := h.control.CreateVolume(h.call(), &csi.CreateVolumeRequest{Name: "a", VolumeCapabilities: []*csi.VolumeCapability{v.cap}})
	wantCode(t, err, codes.Aborted)
	// Other volumes are not concerned, and neither is looking.
	_, err = h.node.NodeGetVolumeHealth(h.call(), &csi.NodeGetVolumeHealthRequest{VolumeId: v.id})
	wantCode(t, err, codes.OK)
	calls.Go(func() {
		_, err := h.control.CreateVolume(h.call(), createRequest("b"))
		wantCode(t, err, codes.OK)
	})
	<-reached
	_, err = h.control.CreateVolume(h.call(), createRequest("b"))
	wantCode(t, err, codes.Aborted, "b")
	close(goOn)
	calls.Wait()
	must(t, v.delete())
}

func TestACancelledCreateCanBeRepeated(t *testing.T) {
	h := newHost(t, "xfs")
	h.stop()
	ctx, cancel := context.WithCancel(h.call())
	h.watch = func(ctx context.Context) context.Context {
		return crashpoint.With(ctx, func(string) { cancel() })
	}
	h.start()
	_, err := h.control.CreateVolume(ctx, createRequest("a"))
	wantCode(t, err, codes.Canceled)
	h.stop() // lets the call end
	h.watch = nil
	h.start()
	_, err = h.control.CreateVolume(h.call(), createRequest("a"))
	wantCode(t, err, codes.OK)
	if got := h.objects(); len(got) != 1 {
		t.Errorf("the pool holds %v", got)
	}
}
