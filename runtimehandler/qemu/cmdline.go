package qemu

import (
	"fmt"
	"strconv"
	"strings"

	"crust.dev/crust/runtimehandler/qemu/image"
)

// device is a part of the machine: a value that says its share of QEMU's command line.
type device interface{ args() []string }

// descriptors are the files that QEMU inherits, by their numbers in QEMU.
type descriptors struct {
	console, qmp, agent int
	vsock               int // 0: none
	vsockCID            uint32
}

// agentPort is the name of the virtio-serial port on which the agent serves.
const agentPort = "crust.agent.0"

// AgentVsockPort is the vsock port on which the agent serves where there is vsock.
const AgentVsockPort = 52601

// commandLine returns QEMU's arguments, without its name. It is a pure function of its arguments.
func commandLine(c Config, fds descriptors) []string {
	args := []string{"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"}
	if !c.NoSeccomp {
		args = append(args, "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
	}
	devices := []device{
		machine{accel: c.Accel, cpus: c.CPUs, memoryMiB: c.MemoryMiB},
		boot{image: c.Image, kernel: kernelArgs(c), agent: agentArgs(c, fds)},
		chardev{id: "console", fd: fds.console},
		console{chardev: "console"},
		chardev{id: "qmp", fd: fds.qmp},
		monitor{chardev: "qmp"},
		chardev{id: "agent", fd: fds.agent},
		serialPort{chardev: "agent", name: agentPort},
		random{},
		diskThread{},
		ports{n: MaxDisks},
	}
	if fds.vsock != 0 {
		devices = append(devices, vsockDevice{cid: fds.vsockCID, fd: fds.vsock})
	}
	for _, d := range devices {
		args = append(args, d.args()...)
	}
	return args
}

// emulated are the kernel's arguments where every instruction is translated, and where a guest is for trying things out: without
// what protects from hardware's faults and from attackers, and without a check of the timer that fails on a busy host. They
// save about one of the six seconds that a boot takes. The kernel's Documentation/admin-guide/kernel-parameters.txt has them all.
var emulated = []string{"mitigations=off", "cryptomgr.notests", "init_on_alloc=0", "no_timer_check"}

func kernelArgs(c Config) []string {
	// A guest that panics ends: with -no-reboot, a reboot is the end of QEMU.
	args := []string{"console=ttyS0", "panic=-1", "quiet"}
	if c.Accel == TCG {
		args = append(args, emulated...)
	}
	return append(args, c.KernelArgs...)
}

func agentArgs(c Config, fds descriptors) []string {
	args := []string{"--modules=" + image.ModuleDir, "--port=" + agentPort}
	if fds.vsock != 0 {
		args = append(args, "--vsock-port="+strconv.Itoa(AgentVsockPort))
	}
	return append(args, c.AgentArgs...)
}

// machine is the board with processors and memory, without anything that a microVM has no use for.
type machine struct {
	accel           Accel
	cpus, memoryMiB int
}

func (m machine) args() []string {
	cpu, accel := "host", "kvm"
	if m.accel == TCG {
		// The translated code is kept in a cache, by default of up to 1 GiB.
		cpu, accel = "max", "tcg,thread=multi,tb-size=128"
	}
	return []string{
		"-machine", "q35,usb=off,vmport=off,smm=off,sata=off,smbus=off,i8042=off,graphics=off,dump-guest-core=off",
		"-accel", accel, "-cpu", cpu,
		"-smp", strconv.Itoa(m.cpus), "-m", strconv.Itoa(m.memoryMiB) + "M",
	}
}

// boot is the kernel with its command line; what follows "--" is for the agent.
type boot struct {
	image         image.Image
	kernel, agent []string
}

func (b boot) args() []string {
	words := append(append(b.kernel[:len(b.kernel):len(b.kernel)], "--"), b.agent...)
	return []string{"-kernel", b.image.Kernel, "-initrd", b.image.Initrd, "-append", strings.Join(words, " ")}
}

// chardev is one end of a socket pair that QEMU inherits.
type chardev struct {
	id string
	fd int
}

func (c chardev) args() []string {
	return []string{"-chardev", fmt.Sprintf("socket,id=%s,fd=%d", c.id, c.fd)}
}

// console is the first serial port.
type console struct{ chardev string }

func (c console) args() []string { return []string{"-serial", "chardev:" + c.chardev} }

// monitor takes QMP commands.
type monitor struct{ chardev string }

func (m monitor) args() []string { return []string{"-mon", "mode=control,chardev=" + m.chardev} }

// serialPort is a named virtio-serial port.
type serialPort struct{ chardev, name string }

func (s serialPort) args() []string {
	return []string{
		"-device", "virtio-serial-pci,id=serial,max_ports=2,disable-legacy=on",
		"-device", fmt.Sprintf("virtserialport,bus=serial.0,chardev=%s,name=%s", s.chardev, s.name),
	}
}

// random keeps the guest from waiting for entropy.
type random struct{}

func (random) args() []string {
	return []string{
		"-object", "rng-random,id=random,filename=/dev/urandom",
		"-device", "virtio-rng-pci,rng=random,disable-legacy=on",
	}
}

// diskThread is the thread that does the disks' work, so that a slow disk does not hold up QMP.
type diskThread struct{}

const diskThreadID = "disks"

func (diskThread) args() []string { return []string{"-object", "iothread,id=" + diskThreadID} }

// ports are the PCIe ports for disks. Eight share a slot, being functions of one device.
type ports struct{ n int }

const (
	portsPerSlot  = 8
	firstPortSlot = 0x10
)

func portID(n int) string { return fmt.Sprintf("port%d", n) }

func (p ports) args() []string {
	var args []string
	for i := range p.n {
		arg := fmt.Sprintf("pcie-root-port,id=%s,chassis=%d,addr=0x%x.%d", portID(i), i+1, firstPortSlot+i/portsPerSlot, i%portsPerSlot)
		if i%portsPerSlot == 0 {
			arg += ",multifunction=on"
		}
		args = append(args, "-device", arg)
	}
	return args
}

// vsockDevice is the device for vsock(7), on a descriptor of /dev/vhost-vsock.
type vsockDevice struct {
	cid uint32
	fd  int
}

func (v vsockDevice) args() []string {
	return []string{"-device", fmt.Sprintf("vhost-vsock-pci,guest-cid=%d,vhostfd=%d,disable-legacy=on", v.cid, v.fd)}
}
