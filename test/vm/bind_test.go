package vm_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/test/vm"
)

// TestContainersView is what a container gets to see of a volume: parts of it, files of its group.
func TestContainersView(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t)
	t.Run("parts of a volume", func(t *testing.T) { parts(t, m) })
	t.Run("a part that leads out of the volume", func(t *testing.T) { escapes(t, m) })
	t.Run("parts of a read-only volume", func(t *testing.T) { readOnlyParts(t, m) })
	for _, fs := range filesystems {
		t.Run("files of a group on "+fs, func(t *testing.T) { group(t, m, fs) })
	}
}

func tryBind(t *testing.T, m *vm.Machine, serial, subPath, destination string, readOnly bool) error {
	t.Helper()
	_, err := m.Agent().BindPath(vm.Context(t), &guestv1.BindPathRequest{
		MountPath: mountPath(serial), SubPath: subPath, Destination: destination, ReadOnly: readOnly,
	})
	return rpc.FromWire(err)
}

func parts(t *testing.T, m *vm.Machine) {
	fresh(t, m, "parts", "ext4", usual)
	root := mountPath("parts")
	m.Shell(t, "cd "+root+"; chmod 2771 .; mkdir -p a/b; echo b > a/b/file; ln -s a/b link; mkfifo fifo; ln -s nowhere dangling")
	for _, tc := range []struct {
		name, subPath, destination string
		readOnly                   bool
		check                      string
	}{
		{"all of it", "", "/data/all", false, "test -f /data/all/a/b/file"},
		{"a directory", "a/b", "/data/dir", false, "test $(cat /data/dir/file) = b; echo c > /data/dir/new; test -f " + root + "/a/b/new"},
		{"a file", "a/b/file", "/data/deep/file", false, "test -f /data/deep/file; test $(cat /data/deep/file) = b"},
		{"through a symbolic link that stays inside", "link", "/data/link", false, "test $(cat /data/link/file) = b"},
		{"read-only", "a", "/data/ro", true, "! touch /data/ro/x 2>/dev/null"},
		{"a directory that is made", "new/sub", "/data/new", false, "test $(stat -c %a " + root + "/new) = 2771; test $(stat -c %a /data/new) = 2771"},
	} {
		if err := tryBind(t, m, "parts", tc.subPath, tc.destination, tc.readOnly); err != nil {
			t.Errorf("%s: %v", tc.name, err)
			continue
		}
		m.Shell(t, tc.check)
		if err := tryBind(t, m, "parts", tc.subPath, tc.destination, tc.readOnly); err != nil {
			t.Errorf("%s, again: %v", tc.name, err)
		}
		if err := tryBind(t, m, "parts", "other", tc.destination, tc.readOnly); !errors.Is(err, errdefs.ErrAlreadyExists) {
			t.Errorf("%s, another part at the same place: %v", tc.name, err)
		}
	}
	for subPath, says := range map[string]string{"fifo": "neither a directory nor", "dangling": "leads nowhere", "dangling/x": "leads nowhere", "a/b/file/x": "not a directory"} {
		if err := tryBind(t, m, "parts", subPath, "/data/odd", false); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", subPath, err)
		}
	}
	if err := tryBind(t, m, "parts", "a", "/proc", false); !errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("over another mount: %v", err)
	}
	if err := tryBind(t, m, "elsewhere", "a", "/data/x", false); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("of a volume that is not mounted: %v", err)
	}
	m.Shell(t, "ln -s /tmp /trap")
	if err := tryBind(t, m, "parts", "a", "/trap/x", false); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("to a place behind a symbolic link: %v", err)
	}
	m.Unmount(t, root)
	if left := m.Shell(t, "cd /data; ls -d all dir deep/file link ro new 2>/dev/null || true; findmnt -n -l -o TARGET | grep /data || true"); left != "" {
		t.Errorf("left after the unmount: %s", left)
	}
}

func escapes(t *testing.T, m *vm.Machine) {
	fresh(t, m, "escape", "ext4", usual)
	m.Shell(t, "mkdir -p /outside; cd "+mountPath("escape")+`
		mkdir in; ln -s /outside absolute; ln -s ../../../../outside up; ln -s /proc/self/root/outside magic; ln -s in/../../../.. later
		ln -s loop loop; ln -s / rootlink`)
	for _, subPath := range []string{"absolute", "up", "magic", "later", "rootlink", "absolute/x", "rootlink/outside", "loop", "up/made"} {
		if err := tryBind(t, m, "escape", subPath, "/data/escape", false); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			t.Errorf("%s: %v", subPath, err)
		}
	}
	if left := m.Shell(t, "ls -A /outside /data/escape 2>&1 || true"); strings.Contains(left, "made") {
		t.Errorf("something was made outside: %s", left)
	}
	for _, subPath := range []string{"/in", "../in", "in/..", "in//x", ".", "in/../../x"} {
		if err := tryBind(t, m, "escape", subPath, "/data/escape", false); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("%s: %v", subPath, err)
		}
	}
}

func readOnlyParts(t *testing.T, m *vm.Machine) {
	path := fresh(t, m, "ro", "xfs", usual)
	m.Shell(t, "mkdir "+mountPath("ro")+"/dir")
	m.Unmount(t, mountPath("ro"))
	m.Detach(t, "ro")
	m.Attach(t, qemu.Disk{Serial: "ro", Path: path, ReadOnly: true})
	req := request("ro", "xfs", never)
	req.ReadOnly = true
	m.Mount(t, req)
	if err := tryBind(t, m, "ro", "dir", "/data/of-ro", false); err != nil {
		t.Errorf("bind: %v", err)
	}
	m.Shell(t, "! touch /data/of-ro/x 2>/dev/null")
	if err := tryBind(t, m, "ro", "missing", "/data/missing", false); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("a part that would have to be made: %v", err)
	}
}

// group holds fsGroup to what Kubernetes makes of a volume.
func group(t *testing.T, m *vm.Machine, fs string) {
	fresh(t, m, "group", fs, usual)
	root := mountPath("group")
	m.Shell(t, "cd "+root+`
		mkdir -p d/e; touch d/f; chmod 400 d/f; touch d/e/x; chmod 4711 d/e/x; chmod 700 d/e; mkfifo d/p; chmod 0 d/p
		ln -s /etc/passwd link; ln -s d/f inner; chmod 600 /etc/passwd; chown 5:6 d/f; ln d/f d/hard`)
	const gid = 2000
	mount := func(policy guestv1.GroupChangePolicy, g uint32) *guestv1.MountVolumeResponse {
		t.Helper()
		m.Unmount(t, root)
		req := request("group", fs, never)
		req.SupplementalGroup, req.SupplementalGroupChangePolicy = &g, policy
		return m.Mount(t, req)
	}
	const always, mismatch = guestv1.GroupChangePolicy_GROUP_CHANGE_POLICY_ALWAYS, guestv1.GroupChangePolicy_GROUP_CHANGE_POLICY_ON_ROOT_MISMATCH
	if resp := mount(mismatch, gid); !resp.GetGroupApplied() {
		t.Errorf("the first time: %v", resp)
	}
	list := func() string {
		return m.Shell(t, "cd "+root+"; stat -c '%n %u:%g %a' . d d/f d/e d/e/x d/p link inner; stat -L -c '%g %a' /etc/passwd")
	}
	want := strings.Join([]string{
		". 0:2000 2775", "d 0:2000 2775", "d/f 5:2000 660", "d/e 0:2000 2770", "d/e/x 0:2000 4771", "d/p 0:2000 660",
		"link 0:2000 777", "inner 0:2000 777", "0 600",
	}, "\n")
	if got := list(); got != want {
		t.Errorf("ownership is\n%s\nwant\n%s", got, want)
	}
	m.Shell(t, "chgrp 7 "+root+"/d/f")
	if resp := mount(mismatch, gid); resp.GetGroupApplied() {
		t.Error("the root fits, and files were given to the group")
	}
	if got := m.Run(t, "stat", "-c", "%g", root+"/d/f"); got != "7" {
		t.Errorf("the file's group is %s", got)
	}
	if resp := mount(always, gid); !resp.GetGroupApplied() || list() != want {
		t.Errorf("always: %v, %s", resp, list())
	}
	m.Shell(t, "chmod g-s "+root)
	if resp := mount(mismatch, gid); !resp.GetGroupApplied() || list() != want {
		t.Errorf("a root without the set-group-id bit: %v, %s", resp, list())
	}
	if resp := mount(mismatch, gid+1); !resp.GetGroupApplied() {
		t.Errorf("another group: %v", resp)
	}
}
