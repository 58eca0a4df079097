package csiplugin_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/protocol/csi/deferred"
)

func FuzzParsePath(f *testing.F) {
	for _, s := range []string{"", "/", "/a/b", "a", "/a/../b", "/a//b/", "/a\x00", "/..", "/...", "/a/./b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := csiplugin.ParsePath("path", s)
		if err != nil {
			if !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("%q: %v", s, err)
			}
			return
		}
		if !filepath.IsAbs(got) || filepath.Clean(got) != got || strings.Contains(got+"/", "/../") || strings.Contains(got, "\x00") || got == "/" {
			t.Errorf("%q was parsed as %q", s, got)
		}
	})
}

func FuzzPlanSize(f *testing.F) {
	f.Add(int64(1), int64(0), int64(4096), int64(1<<40))
	f.Add(int64(1<<63-1), int64(0), int64(16<<20), int64(1<<62))
	f.Add(int64(0), int64(5), int64(4096), int64(8192))
	f.Fuzz(func(t *testing.T, required, limit, smallest, largest int64) {
		smallest, largest = smallest&(1<<40-1)&^4095, largest&(1<<62-1)&^4095
		r := &csi.CapacityRange{RequiredBytes: required, LimitBytes: limit}
		got, err := csiplugin.PlanSize(r, smallest, largest)
		within(t, r, got, err, smallest, largest)
		size, err := csiplugin.PlanExpansion(r, smallest, largest)
		within(t, r, size, err, smallest, max(largest, smallest))
	})
}

// within checks a size that was planned.
func within(t *testing.T, r *csi.CapacityRange, got int64, err error, smallest, largest int64) {
	t.Helper()
	if err != nil {
		if !errors.Is(err, errdefs.ErrInvalidArgument) && !errors.Is(err, errdefs.ErrOutOfRange) {
			t.Error(err)
		}
		return
	}
	if got%4096 != 0 || got < r.GetRequiredBytes() || r.GetLimitBytes() > 0 && got > r.GetLimitBytes() || got < smallest || got > largest {
		t.Errorf("%v between %d and %d is %d", r, smallest, largest, got)
	}
}

// FuzzParseCreate reads any message: it is refused with a kind, or it is good.
func FuzzParseCreate(f *testing.F) {
	add := func(m proto.Message) {
		raw, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	add(createRequest("a"))
	add(&csi.CreateVolumeRequest{})
	f.Fuzz(func(t *testing.T, raw []byte) {
		var req csi.CreateVolumeRequest
		if proto.Unmarshal(raw, &req) != nil {
			return
		}
		if err := csiplugin.ParseCreate(&req); err != nil && !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Error(err)
		}
	})
}

// FuzzParsePublish reads any message, extensions included.
func FuzzParsePublish(f *testing.F) {
	req := &csi.NodePublishVolumeRequest{VolumeId: "v", StagingTargetPath: "/s", TargetPath: "/t", VolumeCapability: mounted("ext4")}
	for _, deferFSOps := range []bool{false, true} {
		if err := deferred.Set(req, &deferred.NodePublishVolumeRequestExtension{DeferFsOps: deferFSOps}); err != nil {
			f.Fatal(err)
		}
		raw, err := proto.Marshal(req)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		var req csi.NodePublishVolumeRequest
		if proto.Unmarshal(raw, &req) != nil {
			return
		}
		err := csiplugin.ParsePublish(&req)
		if err != nil && !errors.Is(err, errdefs.ErrInvalidArgument) && !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Error(err)
		}
	})
}
