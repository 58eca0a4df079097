package seal

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
)

// FuzzLocate reads mount tables of any content. What is found is a path beneath the volume, with no way out.
func FuzzLocate(f *testing.F) {
	f.Add("36 35 0:98 /volume /pods/1/mount rw,nosuid - bpf crust-seal rw\n", "/pods/1/mount/a/b")
	f.Add("36 35 0:98 /volume/logs /pods/1/volume-subpaths/pv/app/0 rw - bpf crust-seal rw\n", "/pods/1/volume-subpaths/pv/app/0")
	f.Add("36 35 0:98 /volume/logs//deleted /x rw - bpf crust-seal rw\n", "/x")
	f.Add("36 35 0:98 /other /x rw - bpf crust-seal rw\n37 36 0:99 /volume /x\\040y rw - bpf crust-seal rw\n", "/x y")
	f.Fuzz(func(t *testing.T, table, path string) {
		if !filepath.IsAbs(path) || filepath.Clean(path) != path {
			return // a path without links is always clean
		}
		mounts, err := mountinfo.GetMountsFromReader(strings.NewReader(table), func(m *mountinfo.Info) (bool, bool) {
			return !beneath(path, m.Mountpoint), false
		})
		if err != nil {
			return
		}
		_, sub, ok, err := locate(path, mounts)
		if err != nil || !ok {
			return
		}
		if sub != "" && (!filepath.IsLocal(sub) || filepath.Clean(sub) != sub) {
			t.Errorf("sub-path %q", sub)
		}
	})
}
