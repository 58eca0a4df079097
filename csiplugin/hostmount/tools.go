package hostmount

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"strings"
	"sync"

	"k8s.io/klog/v2"
	mount "k8s.io/mount-utils"
	utilexec "k8s.io/utils/exec"

	"crust.dev/crust/csiplugin/command"
)

// silence keeps mount-utils from logging by itself: it would do so past this program's log, and all that it has to say is
// in its errors. klog is the process's.
var silence = sync.OnceFunc(func() { klog.SetSlogLogger(slog.New(slog.DiscardHandler)) })

// formatter is mount-utils' SafeFormatAndMount for one call. Unless format is set it has no mkfs.
func formatter(ctx context.Context, format bool) *mount.SafeFormatAndMount {
	silence()
	return mount.NewSafeFormatAndMount(mounter{ctx: ctx}, tools{ctx: ctx, format: format})
}

// mounter is the part of mount.Interface that SafeFormatAndMount uses.
type mounter struct {
	mount.Interface
	ctx context.Context //nolint:containedctx // mount-utils has no contexts; the value lives for one call
}

// MountSensitive runs mount(8) with the call's context. No error shows the sensitive options.
func (m mounter) MountSensitive(source, target, fstype string, options, sensitive []string) error {
	line := func(options []string) []string {
		return []string{"mount", "-t", fstype, "-o", strings.Join(options, ","), source, target}
	}
	shown := options
	if len(sensitive) > 0 {
		shown = append(options[:len(options):len(options)], "...")
	}
	_, err := command.Masked(m.ctx, line(shown), line(append(options[:len(options):len(options)], sensitive...))...)
	return err
}

// tools runs commands for mount-utils as package command does.
type tools struct {
	utilexec.Interface
	ctx    context.Context //nolint:containedctx // mount-utils has no contexts; the value lives for one call
	format bool
}

func (t tools) Command(name string, args ...string) utilexec.Cmd {
	return tool{tools: t, argv: append([]string{name}, args...)}
}

type tool struct {
	utilexec.Cmd
	tools
	argv []string
}

// CombinedOutput is the one method of Cmd that mount-utils uses.
func (t tool) CombinedOutput() ([]byte, error) {
	if strings.HasPrefix(t.argv[0], "mkfs") && !t.format {
		return nil, fmt.Errorf("%s was about to run on a device that is not to be formatted", t.argv[0])
	}
	out, err := command.Run(t.ctx, t.argv...)
	var failed *command.Error
	switch {
	case err == nil:
		return out, nil
	case errors.Is(err, exec.ErrNotFound):
		return out, utilexec.ErrExecutableNotFound
	case errors.As(err, &failed) && failed.ExitCode >= 0:
		return append(out, failed.Stderr...), utilexec.CodeExitError{Err: err, Code: failed.ExitCode}
	}
	return out, err
}
