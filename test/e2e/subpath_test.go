package e2e

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"crust.dev/crust/test/node"
)

// subPath does what a kubelet does for a container's subPath: it makes the directory in the target path, and binds it
// elsewhere (pkg/volume/util/subpath of Kubernetes). What it returns is what the runtime gets.
func subPath(t *testing.T, n *node.Node, v *node.Volume, dir string) string {
	t.Helper()
	must(t, os.MkdirAll(v.Target()+"/"+dir, 0o750))
	bind := n.Path("pods", v.Pod, "volume-subpaths", v.Name, "app", strings.ReplaceAll(dir, "/", "_"))
	must(t, os.MkdirAll(bind, 0o750))
	must(t, unix.Mount(v.Target()+"/"+dir, bind, "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(bind, unix.MNT_DETACH) })
	return bind
}

// TestSubPath gives a container a sub-directory of a deferred volume, as an unmodified kubelet asks for it.
func TestSubPath(t *testing.T) {
	n := start(t)
	v := published(t, n, "sub", "ext4", 64*mib)
	s := sandbox(t, n, "first", node.Mount{Source: v.Target(), Destination: "/whole"}, node.Mount{Source: subPath(t, n, v, "logs/app"), Destination: "/part"})
	sh(t, s, "echo inside > /part/file; mkdir -p /whole/real; ln -s /etc /whole/absolute; ln -s ../../.. /whole/upwards; ln -s real /whole/within")
	if got := sh(t, s, "cat /whole/logs/app/file"); got != "inside" {
		t.Errorf("the file has %q", got)
	}
	must(t, s.Stop(ctx(t)))
	for _, name := range []string{"absolute", "upwards"} {
		t.Run("a link that leads out is refused: "+name, func(t *testing.T) {
			_, err := n.StartSandbox(ctx(t), name, node.Mount{Source: subPath(t, n, v, name), Destination: "/part"})
			if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("path %q in the volume: it leads out of the volume", name)) {
				t.Errorf("error %v", err)
			}
		})
	}
	t.Run("the next sandbox finds it", func(t *testing.T) {
		s := sandbox(t, n, "second", node.Mount{Source: subPath(t, n, v, "logs/app"), Destination: "/part"})
		if got := sh(t, s, "ls /part; cat /part/file"); got != "file\ninside" {
			t.Errorf("the sub-directory has %q", got)
		}
		must(t, s.Stop(ctx(t)))
	})
	// The node has no byte of it: what the kubelet made are directories in the seal.
	if entries, err := os.ReadDir(v.Target() + "/logs/app"); err != nil || len(entries) > 0 {
		t.Errorf("on the node there is %v, error %v", entries, err)
	}
}
