package image

import (
	"bytes"
	"compress/gzip"
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
)

// kernelTree makes a directory of modules: file name and lines of .modinfo, built-in ones, and aliases of those.
func kernelTree(t *testing.T, modules map[string][]string, builtin, aliases string) string {
	t.Helper()
	dir := t.TempDir()
	files := map[string]string{"modules.builtin": builtin, "modules.builtin.modinfo": aliases}
	for name, info := range modules {
		files["kernel/"+name] = string(moduleELF(t, info...))
	}
	write(t, dir, files)
	return dir
}

func resolved(t *testing.T, dir string, wants ...want) (string, error) {
	t.Helper()
	idx, err := indexModules(dir)
	if err != nil {
		t.Fatal(err)
	}
	list, err := idx.resolve(wants)
	var names []string
	for _, m := range list {
		if m.optional {
			m.name = "-" + m.name
		}
		names = append(names, m.name)
	}
	return strings.Join(names, " "), err
}

func TestResolve(t *testing.T) {
	dir := kernelTree(t, map[string][]string{
		"drivers/a-b.ko":  {"name=a_b", "depends=c,d-e", "license=GPL"},
		"c.ko":            {"depends="},
		"d-e.ko":          {"depends=c,built_in"},
		"soft.ko":         {"depends=c", "softdep=pre: crc32c fast missing post: late"},
		"arch/fast.ko":    {},
		"late.ko":         {},
		"opt.ko":          {"depends=shared"},
		"shared.ko":       {},
		"must.ko":         {"depends=shared"},
		"round.ko":        {"depends=trip"},
		"trip.ko":         {"depends=round"},
		"broken.ko":       {"depends=nowhere"},
		"likes-broken.ko": {"softdep=pre: broken"},
	}, "kernel/crypto/built-in.ko\n", "crc32c_generic.alias=crc32c\x00other.license=GPL\x00")
	for _, tc := range []struct {
		name  string
		wants []want
		want  string
		kind  error
	}{
		{"dependencies come first, hyphens or not", []want{{"a_b", false}}, "c d_e a_b", nil},
		{"what is built in is left out", []want{{"built_in", false}, {"c", false}}, "c", nil},
		{"soft dependencies are had if they are there", []want{{"soft", false}}, "c -fast soft", nil},
		{"each once", []want{{"c", false}, {"a_b", false}, {"c", true}}, "c d_e a_b", nil},
		{"what is needed later is not optional", []want{{"opt", true}, {"must", false}}, "shared -opt must", nil},
		{"an optional one that is missing", []want{{"none", true}, {"c", false}}, "c", nil},
		{"one that is missing", []want{{"none", false}}, "", errdefs.ErrNotFound},
		{"a dependency that is missing", []want{{"broken", false}}, "", errdefs.ErrNotFound},
		{"a soft one with a missing dependency", []want{{"likes_broken", false}}, "likes_broken", nil},
		{"a circle", []want{{"round", false}}, "", errdefs.ErrInvalidArgument},
	} {
		got, err := resolved(t, dir, tc.wants...)
		if !errors.Is(err, tc.kind) {
			t.Errorf("%s: %v", tc.name, err)
		}
		if tc.kind == nil {
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("%s: %s", tc.name, diff)
			}
		}
	}
}

func TestCompressedModules(t *testing.T) {
	dir := kernelTree(t, map[string][]string{"plain.ko": {"depends="}}, "", "")
	var zipped bytes.Buffer
	zw := gzip.NewWriter(&zipped)
	if _, err := zw.Write(moduleELF(t, "depends=plain")); err != nil {
		t.Fatal(err)
	}
	if err := zw.Close(); err != nil {
		t.Fatal(err)
	}
	write(t, dir, map[string]string{"kernel/zipped.ko.gz": zipped.String(), "kernel/xzed.ko.xz": "x", "kernel/zstd.ko.zst": "x", "kernel/rotten.ko.gz": "x", "kernel/text.ko": "x"})
	if got, err := resolved(t, dir, want{"zipped", false}); err != nil || got != "plain zipped" {
		t.Errorf("gzip: %q, %v", got, err)
	}
	for _, name := range []string{"xzed", "zstd"} {
		if _, err := resolved(t, dir, want{name, false}); !errors.Is(err, errdefs.ErrNotImplemented) || !strings.Contains(err.Error(), "decompress") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{"rotten", "text"} {
		if _, err := resolved(t, dir, want{name, true}); err == nil {
			t.Errorf("%s is a module", name)
		}
	}
}

func TestIndexWithoutKernel(t *testing.T) {
	if _, err := indexModules(t.TempDir()); err == nil {
		t.Error("an empty directory has modules")
	}
}

func FuzzModuleInfo(f *testing.F) {
	f.Add(moduleELF(f, "depends=a,b", "softdep=pre: x post: y"))
	f.Fuzz(func(t *testing.T, module []byte) {
		info, err := moduleInfo(module)
		if err != nil {
			return
		}
		needs, likes := dependencies(info)
		for _, name := range append(needs, likes...) {
			if strings.ContainsAny(name, "-,") {
				t.Errorf("module name %q", name)
			}
		}
	})
}
