package process

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// Identity names one process for as long as the machine exists. The zero value names none.
type Identity struct {
	PID int `json:"pid"`
	// Start is when the process started, in clock ticks since boot (field 22 of /proc/pid/stat, proc(5)).
	Start uint64 `json:"start"`
	// Boot is the boot id (/proc/sys/kernel/random/boot_id) under which it ran.
	Boot string `json:"boot"`
}

// BootID returns the id of the running boot.
func BootID() (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("boot id: %w", err)
	}
	return strings.TrimSpace(string(raw)), nil
}

// Of returns the identity of a living process. The error wraps [os.ErrNotExist] if there is none with this pid.
func Of(pid int) (Identity, error) {
	boot, err := BootID()
	if err != nil {
		return Identity{}, err
	}
	start, _, err := stat(pid)
	if err != nil {
		return Identity{}, fmt.Errorf("process %d: %w", pid, err)
	}
	return Identity{PID: pid, Start: start, Boot: boot}, nil
}

// Alive says whether the process still runs. A zombie does not: it has let go of its files. When in doubt (the process
// table cannot be read) it returns an error, and the caller must take the process to be alive.
func (id Identity) Alive() (bool, error) {
	if id.PID == 0 {
		return false, nil
	}
	boot, err := BootID()
	if err != nil {
		return false, err
	}
	if boot != id.Boot {
		return false, nil
	}
	start, state, err := stat(id.PID)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ESRCH):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("process %d: %w", id.PID, err)
	}
	return start == id.Start && state != 'Z' && state != 'X', nil
}

// String is for logs and error texts.
func (id Identity) String() string { return strconv.Itoa(id.PID) }

func stat(pid int) (start uint64, state byte, err error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, 0, err
	}
	// The second field is the command in parentheses; it may itself contain spaces and parentheses.
	end := bytes.LastIndexByte(raw, ')')
	fields := bytes.Fields(raw[end+1:])
	const stateField, startField = 0, 19 // fields 3 and 22 of proc(5), counted from the third
	if end < 0 || len(fields) <= startField || len(fields[stateField]) != 1 {
		return 0, 0, fmt.Errorf("unexpected content of /proc/%d/stat", pid)
	}
	start, err = strconv.ParseUint(string(fields[startField]), 10, 64)
	return start, fields[stateField][0], err
}
