package doctor

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// capabilities are those that crustd uses, and for what.
var capabilities = []struct {
	bit  uint
	name string
	why  string
}{
	{unix.CAP_SYS_ADMIN, "CAP_SYS_ADMIN", "crustd seals target paths with mounts"},
	{unix.CAP_DAC_READ_SEARCH, "CAP_DAC_READ_SEARCH", "crustd reads the kubelet's directories, whoever owns them"},
	{unix.CAP_SYS_PTRACE, "CAP_SYS_PTRACE", "crustd looks at the open files of all processes before it takes a device back"},
}

// checkPrivileges looks at this process: crustd needs the same, and this command cannot see what crustd has.
func checkPrivileges(_ context.Context, n *Node) []Finding {
	raw, err := n.read("/proc/self/status")
	if err != nil {
		return one(Warning, fmt.Sprintf("the privileges are not known: %v", err), "doctor reads them from /proc", "run doctor where /proc is mounted")
	}
	uid, caps := processStatus(string(raw))
	if uid != 0 {
		return one(Error, fmt.Sprintf("doctor runs as user %d", uid), "crustd's socket, and much of what doctor looks at, belongs to root", "run it again as root")
	}
	var findings []Finding
	for _, c := range capabilities {
		if caps&(1<<c.bit) == 0 {
			findings = append(findings, one(Warning, "doctor runs without "+c.name, c.why, "if crustd runs in the same container or unit, give it "+c.name)...)
		}
	}
	return unless(findings, "root, with all capabilities that crustd uses")
}

// processStatus reads the effective user and capabilities from /proc/PID/status.
func processStatus(text string) (uid int, caps uint64) {
	uid = -1
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		switch {
		case len(f) > 2 && f[0] == "Uid:":
			if id, err := strconv.Atoi(f[2]); err == nil {
				uid = id
			}
		case len(f) == 2 && f[0] == "CapEff:":
			if set, err := strconv.ParseUint(f[1], 16, 64); err == nil {
				caps = set
			}
		}
	}
	return uid, caps
}

// The oldest kernel that has the mount API (fsopen, fsmount, open_tree, move_mount), with which target paths are sealed.
const oldestMajor, oldestMinor = 5, 2

func checkKernel(_ context.Context, n *Node) []Finding {
	raw, err := n.read("/proc/sys/kernel/osrelease")
	if err != nil {
		return one(Warning, fmt.Sprintf("the kernel's version is not known: %v", err), "doctor reads it from /proc", "run doctor where /proc is mounted")
	}
	release := strings.TrimSpace(string(raw))
	var findings []Finding
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major < oldestMajor || major == oldestMajor && minor < oldestMinor {
		findings = append(findings, one(Error, "the kernel is "+release, "crustd seals target paths with the mount API, which Linux has since 5.2", "run Linux 5.2 or newer on this node")...)
	}
	filesystems, err := n.read("/proc/filesystems")
	if err == nil && !slices.Contains(strings.Fields(string(filesystems)), "bpf") {
		findings = append(findings, one(Error, "the kernel has no bpf filesystem", "crustd covers target paths with one, so that a container cannot write to the node's disk", "use a kernel with CONFIG_BPF_SYSCALL=y")...)
	}
	return unless(findings, "Linux "+release+", with the mount API and the bpf filesystem")
}

func checkKVM(_ context.Context, n *Node) []Finding {
	const why = "without KVM most runtimes cannot start a microVM; QEMU can, by emulating, and is slow"
	info, err := n.stat("/dev/kvm")
	switch {
	case os.IsNotExist(err):
		return one(Warning, "there is no /dev/kvm", why, "load kvm_intel or kvm_amd; on a virtual machine, turn nested virtualisation on; in a pod, mount the node's /dev")
	case err != nil:
		return one(Warning, fmt.Sprintf("KVM: %v", err), why, "make /dev/kvm readable for root")
	case info.Mode()&os.ModeCharDevice == 0:
		return one(Warning, "/dev/kvm is not a device", why, "remove what is there and load kvm_intel or kvm_amd")
	}
	return ok("/dev/kvm is there; crust-sandbox probe says whether it really runs a guest")
}
