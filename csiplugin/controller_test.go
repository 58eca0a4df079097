package csiplugin_test

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/protocol/csi/deferred"
)

func TestDeleteVolume(t *testing.T) {
	h := newHost(t, "xfs")
	v, other := h.create("a", mounted("ext4"), nil), h.create("b", mounted("ext4"), nil)
	must(t, v.delete(), v.delete())
	if got := h.objects(); len(got) != 1 || got[0] != other.id {
		t.Errorf("the pool holds %v", got)
	}
	for name, c := range map[string]struct {
		id   string
		want codes.Code
		text string
	}{
		"no id":               {"", codes.InvalidArgument, "volume_id"},
		"one that never was":  {handle.NewVolume(handle.Pool(h.poolID())).String(), codes.OK, ""},
		"another driver's id": {"pvc-1", codes.OK, ""},
		"a path":              {"../catalog.db", codes.OK, ""},
		"another pool's":      {handle.NewVolume("ffffffffffff").String(), codes.FailedPrecondition, "ffffffffffff"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.control.DeleteVolume(h.call(), &csi.DeleteVolumeRequest{VolumeId: c.id})
			wantCode(t, err, c.want, c.text)
		})
	}
	// A name is free again when its volume is gone.
	if again := h.create("a", mounted("ext4"), nil); again.id == v.id {
		t.Error("a handle was used again")
	}
}

func TestAVolumeInUseIsNotDeleted(t *testing.T) {
	h := newHost(t, "xfs")
	for name, c := range map[string]struct {
		use  func(t *testing.T, v *volume) (end func())
		text string
	}{
		"staged": {func(t *testing.T, v *volume) func() {
			must(t, v.stage())
			return func() { must(t, v.unstage()) }
		}, "staged at"},
		"published on the host": {func(t *testing.T, v *volume) func() {
			must(t, v.stage(), v.publish("t"))
			return func() { must(t, v.unpublish("t"), v.unstage()) }
		}, "published at"},
		"published to a sandbox": {func(t *testing.T, v *volume) func() {
			_, err := v.deferTo("t", false)
			wantCode(t, err, codes.FailedPrecondition) // not staged
			must(t, v.stage())
			_, err = v.deferTo("t", false)
			must(t, err)
			return func() { must(t, v.undefer("t", false), v.unstage()) }
		}, "published at"},
		"attached by hand": {func(t *testing.T, v *volume) func() {
			dev := strings.TrimSpace(scratch.Run(t, "losetup", "--find", "--show", v.file()))
			return func() { scratch.Run(t, "losetup", "--detach", dev) }
		}, "/dev/loop"},
		"open in another process": {func(t *testing.T, v *volume) func() {
			f, err := os.Open(v.file())
			must(t, err)
			user := exec.Command("sleep", "60")
			user.Stdin = f
			must(t, user.Start(), f.Close())
			return func() { _ = user.Process.Kill(); _ = user.Wait() }
		}, "(sleep)"},
	} {
		t.Run(name, func(t *testing.T) {
			v := h.create(name, mounted("ext4"), nil)
			end := c.use(t, v)
			wantCode(t, v.delete(), codes.FailedPrecondition, c.text)
			if _, err := os.Stat(v.file()); err != nil {
				t.Errorf("the data is gone: %v", err)
			}
			end()
			must(t, v.delete())
		})
	}
}

func TestControllerExpandVolume(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	write(t, v.file(), []byte("data"), 0)
	expand := func(r *csi.CapacityRange, c *csi.VolumeCapability) (*csi.ControllerExpandVolumeResponse, error) {
		return h.control.ControllerExpandVolume(h.call(), &csi.ControllerExpandVolumeRequest{VolumeId: v.id, CapacityRange: r, VolumeCapability: c})
	}
	for _, c := range []struct {
		name            string
		required, limit int64
		want            codes.Code
		size            int64
	}{
		{"grows", 20 * mib, 0, codes.OK, 20 * mib},
		{"again is the same", 20 * mib, 0, codes.OK, 20 * mib},
		{"never shrinks", 16 * mib, 0, codes.OK, 20 * mib},
		{"rounds up", 20*mib + 1, 0, codes.OK, 20*mib + 4096},
		{"only a limit that it keeps", 0, 30 * mib, codes.OK, 20*mib + 4096},
		{"a limit below its size", 16 * mib, 17 * mib, codes.OutOfRange, 0},
		{"no size in the range", 30*mib + 1, 30*mib + 2, codes.OutOfRange, 0},
		{"more than the pool", 3 * gib, 0, codes.OutOfRange, 0},
		{"the largest number", 1<<63 - 1, 0, codes.OutOfRange, 0},
		{"negative", -1, 0, codes.InvalidArgument, 0},
		{"nothing", 0, 0, codes.InvalidArgument, 0},
		{"a contradiction", 2 * mib, mib, codes.InvalidArgument, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			resp, err := expand(&csi.CapacityRange{RequiredBytes: c.required, LimitBytes: c.limit}, v.cap)
			wantCode(t, err, c.want)
			if err == nil && (resp.GetCapacityBytes() != c.size || !resp.GetNodeExpansionRequired()) {
				t.Errorf("got %v, want %d bytes", resp, c.size)
			}
			if info, err := os.Stat(v.file()); err != nil || info.Size()%4096 != 0 || info.Size() > 20*mib+4096 {
				t.Errorf("the file is %v, %v", info, err)
			}
		})
	}
	_, err := expand(nil, nil)
	wantCode(t, err, codes.InvalidArgument, "capacity_range")
	_, err = expand(&csi.CapacityRange{RequiredBytes: mib}, block())
	wantCode(t, err, codes.InvalidArgument, "block")
	if got := read(t, v.file())[:4]; string(got) != "data" {
		t.Error("the data has changed")
	}
	for id, want := range map[string]codes.Code{
		"": codes.InvalidArgument, "none": codes.NotFound,
		handle.NewVolume(handle.Pool(h.poolID())).String(): codes.NotFound,
		handle.NewVolume("ffffffffffff").String():          codes.NotFound,
	} {
		_, err := h.control.ControllerExpandVolume(h.call(), &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: mib}})
		wantCode(t, err, want)
	}
}

func TestValidateVolumeCapabilities(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), map[string]string{deferred.ParameterDefer: "auto"})
	caps := func(c ...*csi.VolumeCapability) *csi.ValidateVolumeCapabilitiesRequest {
		return &csi.ValidateVolumeCapabilitiesRequest{VolumeId: v.id, VolumeCapabilities: c}
	}
	with := func(change func(*csi.ValidateVolumeCapabilitiesRequest)) *csi.ValidateVolumeCapabilitiesRequest {
		r := caps(mounted("ext4"))
		change(r)
		return r
	}
	for name, c := range map[string]struct {
		req       *csi.ValidateVolumeCapabilitiesRequest
		want      codes.Code
		confirmed bool
	}{
		"what it has":        {caps(mounted("ext4")), codes.OK, true},
		"any filesystem":     {caps(mounted("")), codes.OK, true},
		"several":            {caps(mounted(""), capability(writer, &csi.VolumeCapability_MountVolume{})), codes.OK, true},
		"its context":        {with(func(r *csi.ValidateVolumeCapabilitiesRequest) { r.VolumeContext = v.context }), codes.OK, true},
		"its parameters":     {with(func(r *csi.ValidateVolumeCapabilitiesRequest) { r.Parameters = v.context }), codes.OK, true},
		"another filesystem": {caps(mounted("xfs")), codes.OK, false},
		"a block device":     {caps(mounted(""), block()), codes.OK, false},
		"many nodes":         {caps(capability(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, &csi.VolumeCapability_MountVolume{})), codes.OK, false},
		"another context": {with(func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{deferred.ParameterDefer: "never"}
		}), codes.OK, false},
		"other parameters": {with(func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.Parameters = map[string]string{deferred.ParameterDefer: "never"}
		}), codes.OK, false},
		"parameters of nobody":   {with(func(r *csi.ValidateVolumeCapabilitiesRequest) { r.Parameters = map[string]string{"speed": "high"} }), codes.OK, false},
		"mutable parameters":     {with(func(r *csi.ValidateVolumeCapabilitiesRequest) { r.MutableParameters = map[string]string{"a": "b"} }), codes.OK, false},
		"no capabilities":        {caps(), codes.InvalidArgument, false},
		"a capability of nobody": {caps(&csi.VolumeCapability{}), codes.InvalidArgument, false},
		"no id":                  {with(func(r *csi.ValidateVolumeCapabilitiesRequest) { r.VolumeId = "" }), codes.InvalidArgument, false},
		"no such volume":         {with(func(r *csi.ValidateVolumeCapabilitiesRequest) { r.VolumeId = "none" }), codes.NotFound, false},
		"another pool's volume":  {with(func(r *csi.ValidateVolumeCapabilitiesRequest) { r.VolumeId = handle.NewVolume("ffffffffffff").String() }), codes.NotFound, false},
	} {
		t.Run(name, func(t *testing.T) {
			resp, err := h.control.ValidateVolumeCapabilities(h.call(), c.req)
			wantCode(t, err, c.want)
			if err != nil {
				return
			}
			if got := resp.GetConfirmed() != nil; got != c.confirmed || got == (resp.GetMessage() != "") {
				t.Errorf("got %v", resp)
			}
			if c.confirmed && !proto.Equal(&csi.ValidateVolumeCapabilitiesRequest{VolumeCapabilities: resp.GetConfirmed().GetVolumeCapabilities()},
				&csi.ValidateVolumeCapabilitiesRequest{VolumeCapabilities: c.req.GetVolumeCapabilities()}) {
				t.Errorf("confirmed is %v", resp.GetConfirmed())
			}
		})
	}
}

func TestGetCapacity(t *testing.T) {
	h := newHost(t, "xfs")
	get := func(change func(*csi.GetCapacityRequest)) (*csi.GetCapacityResponse, error) {
		req := &csi.GetCapacityRequest{VolumeCapabilities: []*csi.VolumeCapability{mounted("xfs")}}
		change(req)
		return h.control.GetCapacity(h.call(), req)
	}
	before, err := get(func(*csi.GetCapacityRequest) {})
	must(t, err)
	if free := before.GetAvailableCapacity(); free < gib || free > 2*gib || before.GetMinimumVolumeSize().GetValue() != 300*mib {
		t.Errorf("got %v", before)
	}
	// The largest volume can be made, and a larger one cannot.
	largest := before.GetMaximumVolumeSize().GetValue()
	for size, want := range map[int64]codes.Code{largest: codes.OK, largest + 1: codes.OutOfRange} {
		req := createRequest(fmt.Sprint(size))
		setRange(size, 0)(req)
		_, err := h.control.CreateVolume(h.call(), req)
		wantCode(t, err, want)
	}
	v := h.create("a", block(), nil)
	write(t, v.file(), make([]byte, 16*mib), 0)
	scratch.Run(t, "sync", "-f", v.file())
	if after, err := get(func(*csi.GetCapacityRequest) {}); err != nil || after.GetAvailableCapacity() > before.GetAvailableCapacity()-15*mib {
		t.Errorf("after writing 16 MiB: %v, %v, before: %v", after, err, before)
	}
	for name, c := range map[string]struct {
		change func(*csi.GetCapacityRequest)
		want   codes.Code
		space  bool
	}{
		"anything":               {func(r *csi.GetCapacityRequest) { r.VolumeCapabilities = nil }, codes.OK, true},
		"here":                   {func(r *csi.GetCapacityRequest) { r.AccessibleTopology = topology("csi.crust.dev/pool", h.poolID()) }, codes.OK, true},
		"elsewhere":              {func(r *csi.GetCapacityRequest) { r.AccessibleTopology = topology("csi.crust.dev/pool", "ffffffffffff") }, codes.OK, false},
		"nowhere":                {func(r *csi.GetCapacityRequest) { r.AccessibleTopology = &csi.Topology{} }, codes.OK, false},
		"what it cannot make":    {func(r *csi.GetCapacityRequest) { r.VolumeCapabilities[0].GetMount().FsType = "ntfs" }, codes.OK, false},
		"an unknown parameter":   {func(r *csi.GetCapacityRequest) { r.Parameters = map[string]string{"speed": "high"} }, codes.InvalidArgument, false},
		"a capability of nobody": {func(r *csi.GetCapacityRequest) { r.VolumeCapabilities[0] = &csi.VolumeCapability{} }, codes.InvalidArgument, false},
	} {
		t.Run(name, func(t *testing.T) {
			resp, err := get(c.change)
			wantCode(t, err, c.want)
			if err == nil && resp.GetAvailableCapacity() > 0 != c.space {
				t.Errorf("got %v", resp)
			}
		})
	}
}

func topology(key, value string) *csi.Topology {
	return &csi.Topology{Segments: map[string]string{key: value}}
}
