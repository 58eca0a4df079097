// Package seal keeps pods from writing where a deferred volume is not.
//
// The kubelet hands a deferral's target path to the runtime as a mount source. A runtime that ignores deferrals would show
// that directory to the container, and the application would write to the node's own disk (Kata's Go runtime does so by
// default since 3.26). So the directory is covered by a mount of ours in which no file can be created, by nobody, with
// whatever capabilities: an instance of the kernel's bpf filesystem, which has no regular files. The application's
// first write fails instead of going astray.
//
// It does have directories, and owners and modes, and that is why it is not just a read-only mount: the kubelet makes
// the directory of a subPath beneath the target path, and sets the group of the target path for fsGroup.
// docs/adr/0002-seal.md has the alternatives.
package seal
