package guest

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/guest/filesystem"
)

// GetInfo is that of the API.
func (a *Agent) GetInfo(context.Context, *guestv1.GetInfoRequest) (*guestv1.GetInfoResponse, error) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return nil, fmt.Errorf("uname: %w", err)
	}
	bootID, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return nil, fmt.Errorf("boot id: %w", err)
	}
	types, err := a.usableTypes()
	if err != nil {
		return nil, err
	}
	return &guestv1.GetInfoResponse{
		Version: a.config.Version,
		Kernel:  unix.ByteSliceToString(name.Release[:]),
		BootId:  strings.TrimSpace(string(bootID)),
		FsTypes: types,
	}, nil
}

// usableTypes are the filesystem types that the kernel has and for which the tools are there.
func (a *Agent) usableTypes() ([]string, error) {
	f, err := os.Open("/proc/filesystems")
	if err != nil {
		return nil, fmt.Errorf("filesystems of the kernel: %w", err)
	}
	defer f.Close()
	kernel := map[string]bool{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if fields := strings.Fields(lines.Text()); len(fields) == 1 { // "nodev" types have two
			kernel[fields[0]] = true
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("filesystems of the kernel: %w", err)
	}
	var types []string
	for _, t := range filesystem.Types() {
		if (kernel[t] || a.config.Modules.HasFilesystem(t)) && filesystem.HasTools(t) {
			types = append(types, t)
		}
	}
	return types, nil
}
