package router

import (
	"testing"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/codes"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/rpc"
)

const (
	zeros    = "00000000000000000000000000000000"
	ofDemand = "bi://backing?backingImageDataSourceType=download&backingImage=x&url=http%3A%2F%2Fimages.example.com%2Fx"
	ofExport = "bi://backing?backingImageDataSourceType=export-from-volume&backingImage=x&export-type=raw"
	another  = "ba9876543210"
)

func TestWhichPoolASnapshotIsIn(t *testing.T) {
	for name, row := range map[string]struct {
		id   string
		pool handle.Pool
		code codes.Code
	}{
		"a snapshot":                      {here + "-snap-" + zeros, here, codes.OK},
		"a volume":                        {here + "-vol-" + zeros, "", codes.NotFound},
		"nothing":                         {"", "", codes.InvalidArgument},
		"another driver's":                {"snap-1", "", codes.NotFound},
		"another driver's handle":         {"bak://x/y", "", codes.NotFound},
		"a wrong handle":                  {"bi://backing?x=y", "", codes.InvalidArgument},
		"a download":                      {ofDemand, "", codes.OK},
		"one image":                       {ofDemand + "&image-id=" + here + "-img-" + zeros, here, codes.OK},
		"an export of a volume":           {ofExport + "&volume-name=" + here + "-vol-" + zeros, here, codes.OK},
		"an export of a volume by name":   {ofExport + "&volume-name=pvc-1", "", codes.OK},
		"an export of nothing":            {ofExport, "", codes.OK},
		"one image of a volume elsewhere": {ofExport + "&volume-name=" + another + "-vol-" + zeros + "&image-id=" + here + "-img-" + zeros, here, codes.OK},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := parseSnapshot(row.id)
			if got.pool != row.pool || rpc.Code(err) != row.code {
				t.Errorf("it is in pool %q, %v", got.pool, err)
			}
		})
	}
}

// FuzzParseSnapshot: whatever has no pool is the handle of an image, and every pool is one.
func FuzzParseSnapshot(f *testing.F) {
	for _, id := range []string{here + "-snap-" + zeros, ofDemand, ofDemand + "&image-id=" + here + "-img-" + zeros, ofExport + "&volume-name=" + here + "-vol-" + zeros, "bak://x"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, text string) {
		id, err := parseSnapshot(text)
		if err != nil {
			if !errdefs.IsNotFound(err) && !errdefs.IsInvalidArgument(err) {
				t.Errorf("%q: %v", text, err)
			}
			return
		}
		if id.pool == "" {
			if !backing.IsHandle(text) || id.image.Image == "" {
				t.Errorf("%q is in no pool", text)
			}
			if snap, err := anywhere(text, id.image); err == nil && (snap.GetSnapshotId() != text || !snap.GetReadyToUse()) || err != nil && !errdefs.IsInvalidArgument(err) {
				t.Errorf("%q is %v, %v", text, snap, err)
			}
			return
		}
		if _, err := handle.ParsePool(string(id.pool)); err != nil {
			t.Errorf("%q: %v", text, err)
		}
	})
}
