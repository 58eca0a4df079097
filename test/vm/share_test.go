package vm_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/runtimehandler/qemu/image"
	"crust.dev/crust/test/vm"
)

// sharePath is where the shared directory is mounted in the guest.
const sharePath = "/run/share"

// virtiofsd is the daemon that comes with QEMU 7.
const virtiofsd = "/usr/lib/qemu/virtiofsd"

// sharing is a machine that may have a directory of the host, which is what this project replaces.
type sharing struct {
	*vm.Machine
	shared bool
}

// startWithShare boots a machine that shares a directory of the host by virtio-fs, if there is a virtiofsd. Our machines
// cannot do that: a program in QEMU's place adds to its command line.
func startWithShare(b *testing.B) sharing {
	b.Helper()
	if _, err := os.Stat(virtiofsd); err != nil || os.Geteuid() != 0 {
		return sharing{Machine: vm.Start(b)}
	}
	dir := vm.Dir(b)
	at := func(name string) string { return filepath.Join(dir, name) }
	if err := os.Mkdir(at("share"), 0o700); err != nil {
		b.Fatal(err)
	}
	mustHost(b, "dd", "if=/dev/urandom", "of="+at("share")+"/file", "bs=1M", "count=256", "status=none")
	daemon := exec.Command(virtiofsd, "--socket-path="+at("s"), "-o", "source="+at("share"), "-o", "cache=auto", "-o", "allow_direct_io", "-o", "sandbox=chroot", "--rlimit-nofile=0")
	var said strings.Builder
	daemon.Stdout, daemon.Stderr = &said, &said
	if err := daemon.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		_ = daemon.Process.Kill()
		_ = daemon.Wait()
		if b.Failed() {
			b.Logf("virtiofsd: %s", &said)
		}
	})
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) { // it tells nobody
		if _, err := os.Stat(at("s")); err == nil {
			break
		}
		if time.Now().After(deadline) {
			b.Fatalf("virtiofsd does not listen: %s", &said)
		}
	}
	script := fmt.Sprintf(`#!/bin/sh
exec %s "$@" -object memory-backend-memfd,id=shared,size=1G,share=on -numa node,memdev=shared \
	-chardev socket,id=share,path=%s -device vhost-user-fs-pci,chardev=share,tag=share
`, qemu.DefaultBinary, at("s"))
	if err := os.WriteFile(at("qemu"), []byte(script), 0o700); err != nil {
		b.Fatal(err)
	}
	m := sharing{shared: true}
	m.Machine = vm.Start(b, func(c *qemu.Config) {
		c.Binary, c.MemoryMiB, c.Image = at("qemu"), 1024, imageWithVirtiofs(b)
	})
	for _, module := range virtiofsModules {
		m.Run(b, vm.ToolPath, "insmod", "/opt/"+module)
	}
	m.Shell(b, "mkdir "+sharePath+"; mount -t virtiofs share "+sharePath)
	return m
}

// virtiofsModules are what the guest needs beyond our image, in the order in which they are loaded.
var virtiofsModules = []string{"fuse.ko", "virtiofs.ko"}

func imageWithVirtiofs(b *testing.B) image.Image {
	b.Helper()
	kernel, err := image.FindKernel(vm.KernelDir())
	if err != nil {
		b.Fatal(err)
	}
	var files []image.File
	for _, module := range virtiofsModules {
		files = append(files, image.File{Path: "/opt/" + module, Source: filepath.Join(kernel.Modules, "kernel/fs/fuse", module), Mode: 0o644})
	}
	return vm.ImageWith(b, files...)
}
