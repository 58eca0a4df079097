package csiplugin_test

import (
	"os"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/csi/deferred"
)

func TestStagingMountsNothing(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), map[string]string{deferred.ParameterDefer: "auto"})
	must(t, v.stage(), v.stage())
	if got := h.mounts(); len(got) > 0 {
		t.Errorf("mounted are %v", got)
	}
	if !blank(t, v.file()) {
		t.Error("the volume was written to")
	}
	must(t, v.unstage(), v.unstage())
}

func TestNodeStageVolumeRefusesBadRequests(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), map[string]string{deferred.ParameterDefer: "auto"})
	must(t, os.Mkdir(v.staging(), 0o700), os.WriteFile(h.path("file"), nil, 0o600))
	for name, c := range map[string]struct {
		change func(*csi.NodeStageVolumeRequest)
		want   codes.Code
		text   string
	}{
		"no id":                 {func(r *csi.NodeStageVolumeRequest) { r.VolumeId = "" }, codes.InvalidArgument, "volume_id"},
		"no such volume":        {func(r *csi.NodeStageVolumeRequest) { r.VolumeId = handle.NewVolume(handle.Pool(h.poolID())).String() }, codes.NotFound, ""},
		"another pool's volume": {func(r *csi.NodeStageVolumeRequest) { r.VolumeId = handle.NewVolume("ffffffffffff").String() }, codes.NotFound, "ffffffffffff"},
		"no path":               {func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = "" }, codes.InvalidArgument, "staging_target_path"},
		"a relative path":       {func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = "stage" }, codes.InvalidArgument, "absolute"},
		"a path with ..":        {func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath += "/../x" }, codes.InvalidArgument, ".."},
		"the root":              {func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = "//" }, codes.InvalidArgument, "root"},
		"a path with a zero":    {func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath += "\x00" }, codes.InvalidArgument, "zero"},
		"a very long path":      {func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath += strings.Repeat("/a", 4096) }, codes.InvalidArgument, "bytes"},
		"a missing directory":   {func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath += "x" }, codes.FailedPrecondition, "directory"},
		"a file":                {func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = h.path("file") }, codes.FailedPrecondition, "directory"},
		"no capability":         {func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = nil }, codes.InvalidArgument, "volume_capability"},
		"no access mode":        {func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability.AccessMode = nil }, codes.InvalidArgument, "access_mode"},
		"no access type":        {func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability.AccessType = nil }, codes.InvalidArgument, "access_type"},
		"a bad mount flag":      {func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability.GetMount().MountFlags = []string{"bind"} }, codes.InvalidArgument, "bind"},
		"a bad group":           {func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability.GetMount().VolumeMountGroup = "wheel" }, codes.InvalidArgument, "wheel"},
		"another filesystem":    {func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability.GetMount().FsType = "xfs" }, codes.FailedPrecondition, "ext4"},
		"a block device":        {func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = block() }, codes.FailedPrecondition, "block"},
		"many nodes":            {func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability.AccessMode.Mode = 5 }, codes.FailedPrecondition, "MULTI_NODE"},
		"another volume context": {func(r *csi.NodeStageVolumeRequest) {
			r.VolumeContext = map[string]string{deferred.ParameterDefer: "never"}
		}, codes.InvalidArgument, "volume_context"},
	} {
		t.Run(name, func(t *testing.T) {
			req := &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging(), VolumeCapability: mounted("ext4"), VolumeContext: v.context}
			c.change(req)
			_, err := h.node.NodeStageVolume(h.call(), req)
			wantCode(t, err, c.want, c.text)
		})
	}
	must(t, v.delete()) // none of them has staged it
}

func TestAVolumeIsStagedInOneWay(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage())
	other := *v
	other.cap = capability(writer, &csi.VolumeCapability_MountVolume{FsType: "ext4"})
	wantCode(t, other.stage(), codes.AlreadyExists)
	other.cap = capability(multiWriter, &csi.VolumeCapability_MountVolume{FsType: "ext4", MountFlags: []string{"noatime"}})
	wantCode(t, other.stage(), codes.AlreadyExists)
	// A group is the pod's, and staging does nothing with it.
	other.cap = capability(multiWriter, &csi.VolumeCapability_MountVolume{FsType: "ext4", VolumeMountGroup: "7"})
	wantCode(t, other.stage(), codes.OK)
	must(t, os.Mkdir(h.path("elsewhere"), 0o700))
	_, err := h.node.NodeStageVolume(h.call(), &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: h.path("elsewhere"), VolumeCapability: v.cap})
	wantCode(t, err, codes.FailedPrecondition, v.staging())
	_, err = h.node.NodeUnstageVolume(h.call(), &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: h.path("elsewhere")})
	wantCode(t, err, codes.OK) // it is not staged there
	wantCode(t, v.delete(), codes.FailedPrecondition, v.staging())

	// After a reboot nothing is staged, so it can be staged elsewhere, or deleted.
	h.reboot()
	_, err = h.node.NodeStageVolume(h.call(), &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: h.path("elsewhere"), VolumeCapability: v.cap})
	wantCode(t, err, codes.OK)
	h.reboot()
	must(t, v.delete())
}

func TestNodeUnstageVolumeRefusesBadRequests(t *testing.T) {
	h := newHost(t, "xfs")
	v := h.create("a", mounted("ext4"), nil)
	must(t, v.stage(), v.publish("t"))
	wantCode(t, v.unstage(), codes.FailedPrecondition, v.path("t"))
	for name, c := range map[string]struct {
		id, path string
		want     codes.Code
	}{
		"no id":                 {"", "/stage", codes.InvalidArgument},
		"no path":               {v.id, "", codes.InvalidArgument},
		"a relative path":       {v.id, "stage", codes.InvalidArgument},
		"no such volume":        {"none", "/stage", codes.NotFound},
		"another pool's volume": {handle.NewVolume("ffffffffffff").String(), "/stage", codes.NotFound},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := h.node.NodeUnstageVolume(h.call(), &csi.NodeUnstageVolumeRequest{VolumeId: c.id, StagingTargetPath: c.path})
			wantCode(t, err, c.want)
		})
	}
	must(t, v.unpublish("t"), v.unstage(), v.delete())
}
