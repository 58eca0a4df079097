package modules

import (
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	got, err := parse("/lib/a.ko\n-/lib/b.ko\n\n/lib/c.ko")
	if err != nil {
		t.Fatal(err)
	}
	want := []module{{path: "/lib/a.ko"}, {path: "/lib/b.ko", optional: true}, {path: "/lib/c.ko"}}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(module{})); diff != "" {
		t.Error(diff)
	}
	for _, bad := range []string{"a.ko", "-", "-a.ko", "../a.ko"} {
		if _, err := parse(bad); err == nil {
			t.Errorf("%q is a module", bad)
		}
	}
}

// FuzzParse: whatever the list says, only absolute paths come out of it.
func FuzzParse(f *testing.F) {
	f.Add("/a\n-/b\n")
	f.Fuzz(func(t *testing.T, list string) {
		modules, err := parse(list)
		if err != nil {
			return
		}
		for _, m := range modules {
			if !filepath.IsAbs(m.path) {
				t.Errorf("%q", m.path)
			}
		}
	})
}

func TestNoModules(t *testing.T) {
	for _, d := range []Dir{"", Dir(t.TempDir())} {
		if err := d.LoadForBoot(); err != nil {
			t.Errorf("%q: %v", d, err)
		}
		if err := d.LoadForFilesystem("xfs"); err != nil || d.HasFilesystem("xfs") {
			t.Errorf("%q: %v", d, err)
		}
	}
}
