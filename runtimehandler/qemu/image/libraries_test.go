package image

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLdSoConf(t *testing.T) {
	root := t.TempDir()
	write(t, root, map[string]string{
		"etc/ld.so.conf":          "# comment\ninclude ld.so.conf.d/*.conf\n/opt/lib # mine\n\ninclude /etc/other.conf\nhwcap 1 x\n",
		"etc/ld.so.conf.d/b.conf": "/b\n",
		"etc/ld.so.conf.d/a.conf": "/a\n/a2\n",
		"etc/ld.so.conf.d/c.txt":  "/c\n",
		"etc/other.conf":          "include /etc/ld.so.conf\n/other\n",
	})
	l, err := newLibraries(root)
	if err != nil {
		t.Fatal(err)
	}
	// A file that includes itself comes to an end.
	if diff := cmp.Diff([]string{"/a", "/a2", "/b", "/opt/lib", "/a", "/a2", "/b", "/opt/lib"}, l.dirs[:8]); diff != "" {
		t.Error(diff)
	}
	empty, err := newLibraries(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(defaultLibraryDirs, empty.dirs); diff != "" {
		t.Error(diff)
	}
}
