package assist

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/guest/command"
	"crust.dev/crust/runtimehandler/guest/filesystem"
	"crust.dev/crust/runtimehandler/guest/ownership"
)

// Main does the work of the child process and ends it, if this process was started as one by [Run]. Otherwise it returns at
// once. It is the first thing that a main function does, before flags are read or goroutines started.
func Main() {
	if len(os.Args) < 2 || os.Args[len(os.Args)-1] != commandName {
		return
	}
	os.Exit(child(context.Background(), os.Stdin, os.Stdout))
}

// child reads the work from in and writes the result to out.
func child(ctx context.Context, in io.Reader, out io.Writer) int {
	var w Work
	err := json.NewDecoder(in).Decode(&w)
	if err == nil {
		err = w.do(ctx)
	}
	r := result{}
	if err != nil {
		r.Error = err.Error()
		for name, kind := range kinds {
			if errors.Is(err, kind) {
				r.Kind = name
			}
		}
	}
	if err := json.NewEncoder(out).Encode(r); err != nil {
		return 1
	}
	return 0
}

func (w Work) wants(s Step) bool { return slices.Contains(w.Steps, s) }

// do does the steps, in their order, on a device that it has locked.
func (w Work) do(ctx context.Context) error {
	unlock, err := lock(w.Device)
	if err != nil {
		return err
	}
	defer unlock()
	formatted := false
	if w.wants(Format) {
		if formatted, err = w.format(ctx); err != nil {
			return err
		}
	}
	if w.wants(Check) && !formatted {
		if _, _, err := filesystem.Check(ctx, w.Device, w.FSType); err != nil {
			return err
		}
	}
	if w.wants(Grow) && w.FSType == "ext4" && !formatted {
		if err := w.growExt4(ctx); err != nil {
			return err
		}
	}
	growMounted := w.wants(Grow) && w.FSType != "ext4" && !formatted
	if !growMounted && !w.wants(Chown) {
		return nil
	}
	return w.mounted(ctx, func(device, dir string) error {
		if growMounted {
			if _, err := filesystem.Grow(dir, device, w.FSType, w.SizeBytes); err != nil {
				return err
			}
		}
		if w.wants(Chown) && w.Group != nil {
			return w.chown(ctx, dir)
		}
		return nil
	})
}

// lock takes the locks that QEMU and Cloud Hypervisor take on a disk, for as long as the work lasts, and on a block device
// also the one that mounts take. ErrFailedPrecondition if somebody has the device.
func lock(device string) (unlock func(), err error) {
	f, err := open(device, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	inUse := func(err error) error {
		return errors.Join(fmt.Errorf("device %s is in use (%v): %w", device, err, errdefs.ErrFailedPrecondition), f.Close())
	}
	whole := unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &whole); err != nil {
		return nil, inUse(err)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if info.Mode().IsRegular() {
		return func() { _ = f.Close() }, nil
	}
	// Only to see whether it can be had: the tools want to have it themselves.
	exclusive, err := unix.Open(device, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, inUse(err)
	}
	return func() { _ = f.Close() }, unix.Close(exclusive)
}

// format makes a filesystem by the rules of our guest, and says whether it did. Where there is a whole one of the wanted
// type already, an earlier child has made it.
func (w Work) format(ctx context.Context) (bool, error) {
	size, err := Size(w.Device)
	if err != nil {
		return false, err
	}
	found, err := filesystem.Read(ctx, w.Device, size)
	if err != nil {
		return false, err
	}
	wish := filesystem.Wish{Type: w.FSType, Grounds: filesystem.NothingKnown}
	switch {
	case w.Unfinished:
		wish.Grounds = filesystem.UnfinishedFormat
	case w.NeverWritten:
		wish.Grounds = filesystem.NeverWritten
	}
	decision, err := filesystem.Decide(found, wish)
	if err != nil {
		return false, err
	}
	if decision.Make == filesystem.MakeUnlessSound {
		sound, err := filesystem.Sound(ctx, w.Device, w.FSType)
		if err != nil || sound {
			return false, err
		}
	}
	if decision.Make == filesystem.MakeNone {
		return false, nil
	}
	return true, filesystem.Make(ctx, w.Device, w.FSType, decision.Make != filesystem.MakeFresh)
}

// growExt4 grows an ext4 filesystem without mounting it. resize2fs wants a full check before.
func (w Work) growExt4(ctx context.Context) error {
	sound, err := filesystem.Sound(ctx, w.Device, w.FSType)
	if err != nil {
		return err
	}
	if !sound {
		return fmt.Errorf("the filesystem is damaged beyond what is repaired without asking, and is not grown; take a copy of the device and run e2fsck -fy on it: %w", errdefs.ErrDataLoss)
	}
	r, err := command.Run(ctx, "resize2fs", w.Device)
	if err != nil {
		return err
	}
	if r.Code != 0 {
		return r.Failed()
	}
	return nil
}

func (w Work) chown(ctx context.Context, dir string) error {
	if w.OnRootMismatch {
		if fits, err := ownership.Fits(dir, *w.Group); err != nil || fits {
			return err
		}
	}
	return ownership.Apply(ctx, dir, *w.Group)
}

// mounted runs fn on the filesystem, mounted where only this process sees it.
func (w Work) mounted(ctx context.Context, fn func(device, dir string) error) (err error) {
	options, err := filesystem.ParseOptions(append(w.MountFlags[:len(w.MountFlags):len(w.MountFlags)], "nosuid", "nodev", "noexec"))
	if err != nil {
		return err
	}
	device, release, err := blockDevice(w.Device)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, release()) }()
	dir, err := os.MkdirTemp("", "crust-assist-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(dir)) }()
	if err := filesystem.Mount(ctx, device, w.FSType, dir, options); err != nil {
		return err
	}
	return errors.Join(fn(device, dir), filesystem.Unmount(dir))
}

// blockDevice returns a block device for a device or image file. The kernel takes a loop device back when its last user has
// gone, however that ends.
func blockDevice(path string) (device string, release func() error, err error) {
	f, err := open(path, os.O_RDWR)
	if err != nil {
		return "", nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return path, func() error { return nil }, err
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return "", nil, fmt.Errorf("loop device: %w", err)
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(f.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
	const attempts = 32 // somebody else may be faster with a free number
	for range attempts {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return "", nil, fmt.Errorf("loop device: %w", err)
		}
		device = fmt.Sprintf("/dev/loop%d", number)
		loop, err := os.OpenFile(device, os.O_RDWR, 0)
		if err != nil {
			return "", nil, fmt.Errorf("loop device: %w", err)
		}
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &config)
		if err == nil {
			return device, loop.Close, nil
		}
		_ = loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			return "", nil, fmt.Errorf("loop device over %s: %w", path, err)
		}
	}
	return "", nil, fmt.Errorf("loop device over %s: none was free in %d attempts: %w", path, attempts, errdefs.ErrUnavailable)
}
