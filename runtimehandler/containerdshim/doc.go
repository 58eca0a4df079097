// Package containerdshim is containerd-shim-crust-v2: a containerd shim that runs the containers of a pod in one QEMU
// microVM (package sandbox), with deferred volumes mounted inside. It is for tests, for people without Kata Containers, and
// for authors of runtimes to read.
//
// One process serves one pod. The pod's sandbox container is the microVM itself; of every other container the root
// filesystem is copied into a disk image, which is plugged in, mounted in the guest, and deleted while it is in use, so that
// nothing of it outlives the machine. What a container has mounted is either a deferred volume, which crustd says, or
// something small of the kubelet's, which is copied, or an emptyDir, which is a directory in the guest's memory. Anything
// else is refused: the host's directories are not shared with the guest, and no container starts with less than it has
// asked for.
//
// It never mounts a volume on the host. It has no network, terminals, or limits within the guest; docs/containerd-shim.md
// has the list.
package containerdshim
