package vm_test

import (
	"errors"
	"strconv"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/test/vm"
)

// BenchmarkBoot is from the start of QEMU to the agent's first answer.
func BenchmarkBoot(b *testing.B) {
	vm.Need(b)
	for b.Loop() {
		m := vm.Start(b)
		b.StopTimer()
		if err := m.Stop(vm.Context(b)); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// BenchmarkStop is from the wish to stop to the end of QEMU.
func BenchmarkStop(b *testing.B) {
	vm.Need(b)
	for b.Loop() {
		b.StopTimer()
		m := vm.Start(b)
		b.StartTimer()
		if err := m.Stop(vm.Context(b)); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkAttach is from the wish to attach to a device that the agent has found and opened.
func BenchmarkAttach(b *testing.B) {
	vm.Need(b)
	m := vm.Start(b)
	path := newImage(b, usual)
	for b.Loop() {
		m.Attach(b, qemu.Disk{Serial: "bench", Path: path})
		req := request("bench", "ext4", never)
		req.ReadOnly = true // it is writable, and the agent says so as soon as it sees it
		if _, err := m.TryMount(b, req); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			b.Fatal(err)
		}
		b.StopTimer()
		m.Detach(b, "bench")
		b.StartTimer()
	}
}

// BenchmarkDetach is from the wish to detach to a file that QEMU has closed.
func BenchmarkDetach(b *testing.B) {
	vm.Need(b)
	m := vm.Start(b)
	path := newImage(b, usual)
	for b.Loop() {
		b.StopTimer()
		m.Attach(b, qemu.Disk{Serial: "bench", Path: path})
		req := request("bench", "ext4", never)
		req.ReadOnly = true
		if _, err := m.TryMount(b, req); !errors.Is(err, errdefs.ErrFailedPrecondition) {
			b.Fatal(err)
		}
		b.StartTimer()
		m.Detach(b, "bench")
	}
}

// BenchmarkMount is MountVolume on a device that is attached.
func BenchmarkMount(b *testing.B) {
	vm.Need(b)
	m := vm.Start(b)
	for _, fs := range filesystems {
		b.Run(fs+"/blank", func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				m.Attach(b, qemu.Disk{Serial: "bench", Path: newImage(b, 1<<30)})
				b.StartTimer()
				m.Mount(b, request("bench", fs, neverWritten))
				b.StopTimer()
				m.Unmount(b, mountPath("bench"))
				m.Detach(b, "bench")
				b.StartTimer()
			}
		})
		b.Run(fs+"/used", func(b *testing.B) {
			m.Attach(b, qemu.Disk{Serial: "bench", Path: newImage(b, 1<<30)})
			m.Mount(b, request("bench", fs, neverWritten))
			for b.Loop() {
				b.StopTimer()
				m.Unmount(b, mountPath("bench"))
				b.StartTimer()
				m.Mount(b, request("bench", fs, never))
			}
			m.Unmount(b, mountPath("bench"))
			m.Detach(b, "bench")
		})
	}
}

// BenchmarkRead reads a file of 256 MiB past the guest's cache, on XFS on a hot-plugged disk and, where virtiofsd is
// installed, on a directory of the host that is shared by virtio-fs. Both files are in the host's page cache.
func BenchmarkRead(b *testing.B) {
	vm.Need(b)
	m := startWithShare(b)
	m.Attach(b, qemu.Disk{Serial: "bench", Path: newImage(b, 1<<30)})
	m.Mount(b, request("bench", "xfs", neverWritten))
	m.Run(b, "dd", "if=/dev/urandom", "of="+mountPath("bench")+"/file", "bs=1M", "count=256", "conv=fsync", "status=none")
	for _, access := range []string{"randread", "seqread"} {
		for name, dir := range map[string]string{"virtio-blk": mountPath("bench"), "virtio-fs": sharePath} {
			b.Run(access+"/"+name, func(b *testing.B) {
				if name == "virtio-fs" && !m.shared {
					b.Skip("no virtiofsd (Debian's package qemu-system-common has it)")
				}
				bytes := 0.0
				for b.Loop() {
					n, err := strconv.ParseFloat(m.Run(b, vm.ToolPath, access, dir+"/file", "3"), 64)
					if err != nil {
						b.Fatal(err)
					}
					bytes += n
				}
				b.ReportMetric(bytes/float64(b.N)/mib, "MiB/s")
				b.ReportMetric(bytes/float64(b.N)/4096, "4KiB/s")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
