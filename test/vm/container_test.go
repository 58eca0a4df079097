package vm_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/test/vm"
)

// startIn starts a shell script as a container's.
func startIn(t *testing.T, m *vm.Machine, c *guestv1.ContainerProcess, script string, env ...string) (*vm.Command, error) {
	t.Helper()
	resp, err := m.Agent().StartExec(vm.Context(t), &guestv1.StartExecRequest{
		Argv: []string{"sh", "-c", script}, Env: append([]string{"PATH=/usr/bin:/usr/sbin"}, env...), Cwd: "/job", Container: c,
	})
	if err != nil {
		return nil, rpc.FromWire(err)
	}
	return m.Attend(t, resp.GetExecId()), nil
}

func mustStartIn(t *testing.T, m *vm.Machine, c *guestv1.ContainerProcess, script string, env ...string) *vm.Command {
	t.Helper()
	started, err := startIn(t, m, c, script, env...)
	if err != nil {
		t.Fatal(err)
	}
	return started
}

// TestContainers is what a runtime builds containers from: a root filesystem, and processes that live in it.
func TestContainers(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t)
	fresh(t, m, "root", "ext4", usual)
	fresh(t, m, "data", "ext4", usual)
	root := mountPath("root")
	m.Shell(t, "cp -a /usr /bin /sbin /lib /lib64 "+root+"; cd "+root+"; mkdir job etc; echo here > etc/mark; echo file > etc/config; ln -s /tmp trap; chown 7:8 job; touch plain; chmod 666 plain")
	first := &guestv1.ContainerProcess{Root: root}
	if _, err := startIn(t, m, first, "true"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("a process in a volume that was not prepared: %v", err)
	}
	prepare := &guestv1.PrepareRootRequest{MountPath: root, Mounts: []*guestv1.RootMount{
		{Destination: "/scratch", Shared: "pod.scratch"}, {Destination: "/etc/config", ReadOnly: true}, {Destination: "/half", Shared: "pod.scratch", ReadOnly: true},
	}}
	prepareRoot := func(req *guestv1.PrepareRootRequest) error {
		_, err := m.Agent().PrepareRoot(vm.Context(t), req)
		return rpc.FromWire(err)
	}
	if err := prepareRoot(&guestv1.PrepareRootRequest{MountPath: root, Mounts: []*guestv1.RootMount{{Destination: "/trap/x", Shared: "s"}}}); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("a mount behind a symbolic link: %v", err)
	}
	m.Shell(t, "! grep "+root+"/ /proc/mounts") // a failure leaves nothing
	for range 2 {
		if err := prepareRoot(prepare); err != nil {
			t.Fatal(err)
		}
	}
	if err := prepareRoot(&guestv1.PrepareRootRequest{MountPath: root}); !errors.Is(err, errdefs.ErrAlreadyExists) {
		t.Errorf("another preparation: %v", err)
	}
	if err := tryBind(t, m, "data", "", root+"/data", false); err != nil {
		t.Fatal(err)
	}
	t.Run("view", func(t *testing.T) { containerView(t, m, root) })
	t.Run("user", func(t *testing.T) { containerUser(t, m, root) })
	t.Run("life", func(t *testing.T) { containerLife(t, m, root) })
	t.Run("end", func(t *testing.T) { containerEnd(t, m, root) })
}

func containerView(t *testing.T, m *vm.Machine, root string) {
	c := mustStartIn(t, m, &guestv1.ContainerProcess{Root: root}, `set -e; pwd; cat /etc/mark; echo $A $HOME; test ! -e /init
		echo x > /dev/null; head -c 1 /dev/urandom | wc -c; test -e /proc/self/status; ls /dev/vd* 2>/dev/null && exit 9
		touch /scratch/s; test -e /half/s; touch /half/t 2>/dev/null && exit 8; echo y > /etc/config && exit 7; echo data > /data/f; exit 3`, "A=b")
	stdout, stderr, code := c.Wait()
	if stdout != "/job\nhere\nb\n1\n" || code != 3 {
		t.Errorf("%q, %q, code %d", stdout, stderr, code)
	}
	if got := m.Run(t, "cat", mountPath("data")+"/f"); got != "data" {
		t.Errorf("the volume has %q", got)
	}
	for name, req := range map[string]*guestv1.StartExecRequest{
		"a program that is only in the guest": {Argv: []string{"/init"}, Container: &guestv1.ContainerProcess{Root: root}},
		"a directory that is not there":       {Argv: []string{"/bin/sh"}, Cwd: "/nowhere", Container: &guestv1.ContainerProcess{Root: root}},
		"no search path":                      {Argv: []string{"sh"}, Container: &guestv1.ContainerProcess{Root: root}},
		"a container to join that is not":     {Argv: []string{"/bin/sh"}, Container: &guestv1.ContainerProcess{Root: root, Join: "999"}},
	} {
		if _, err := m.Agent().StartExec(vm.Context(t), req); !errors.Is(rpc.FromWire(err), errdefs.ErrNotFound) {
			t.Errorf("%s: %v", name, rpc.FromWire(err))
		}
	}
}

func containerUser(t *testing.T, m *vm.Machine, root string) {
	c := mustStartIn(t, m, &guestv1.ContainerProcess{Root: root, Uid: 7, Gid: 9, AdditionalGids: []uint32{8, 11}},
		`id -u; id -g; id -G; touch /job/f && stat -c %u:%g /job/f; touch /etc/f 2>/dev/null || echo denied; grep CapEff /proc/self/status`)
	if stdout, stderr, code := c.Wait(); stdout != "7\n9\n9 8 11\n7:9\ndenied\nCapEff:\t0000000000000000\n" || code != 0 {
		t.Errorf("%q, %q, code %d", stdout, stderr, code)
	}
}

func containerLife(t *testing.T, m *vm.Machine, root string) {
	agent := m.Agent()
	c := mustStartIn(t, m, &guestv1.ContainerProcess{Root: root}, `trap 'echo got TERM' TERM; setsid sleep 7777 & echo ready; while :; do sleep 0.1; done`)
	c.ReadUntil("ready")
	joined := &guestv1.ContainerProcess{Root: root, Join: c.ID}
	if stdout, _, code := mustStartIn(t, m, joined, "echo joined; exit 4").Wait(); stdout != "joined\n" || code != 4 {
		t.Errorf("joined: %q, code %d", stdout, code)
	}
	long := mustStartIn(t, m, joined, "echo up; sleep 8888")
	long.ReadUntil("up")
	if _, err := agent.SignalExec(vm.Context(t), &guestv1.SignalExecRequest{ExecId: c.ID, Signal: 15}); err != nil {
		t.Fatal(rpc.FromWire(err))
	}
	c.ReadUntil("got TERM")
	if _, err := agent.SignalExec(vm.Context(t), &guestv1.SignalExecRequest{ExecId: long.ID, Signal: 9, All: true}); !errors.Is(rpc.FromWire(err), errdefs.ErrFailedPrecondition) {
		t.Errorf("to kill a container by one that has joined: %v", rpc.FromWire(err))
	}
	if _, err := agent.SignalExec(vm.Context(t), &guestv1.SignalExecRequest{ExecId: c.ID, Signal: 9}); err != nil {
		t.Fatal(rpc.FromWire(err))
	}
	if _, _, code := c.Wait(); code != 128+9 {
		t.Errorf("killed: code %d", code)
	}
	if _, _, code := long.Wait(); code != 128+9 {
		t.Errorf("what had joined: code %d", code)
	}
	if _, err := startIn(t, m, joined, "true"); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("to join what has ended: %v", err)
	}
	c.Close()
	m.Shell(t, "for i in $(seq 100); do grep -lE '[7]777|[8]888' /proc/[0-9]*/cmdline 2>/dev/null | grep -v /proc/$$/ || break; sleep 0.1; done; test -z \"$(ls -d /sys/fs/cgroup/crust-"+c.ID+" 2>/dev/null)\"")
}

func containerEnd(t *testing.T, m *vm.Machine, root string) {
	c := mustStartIn(t, m, &guestv1.ContainerProcess{Root: root}, "echo in; cd /data; sleep 9999")
	c.ReadUntil("in")
	unbind := func() error {
		_, err := m.Agent().UnbindPath(vm.Context(t), &guestv1.UnbindPathRequest{MountPath: mountPath("data"), Destination: root + "/data"})
		return rpc.FromWire(err)
	}
	if err := unbind(); !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), "pid ") {
		t.Errorf("to unbind what is in use: %v", err)
	}
	c.Close()
	for range 2 {
		if err := unbind(); err != nil {
			t.Error(err)
		}
	}
	m.Unmount(t, root)
	m.Shell(t, "! grep "+root+" /proc/mounts")
	m.Unmount(t, mountPath("data"))
}
