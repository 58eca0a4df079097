package cli

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler"
)

const (
	infoName    = "mountInfo.json"
	commandName = "runtime-cli"
	// ownerKey marks a record as one of ours.
	ownerKey = "crust.dev/target-path"
	// formatKey is there if the volume may be formatted: "never-written".
	formatKey = "crust.dev/format"
	// temporary begins the names of what is not finished.
	temporary = ".crust-"
)

// mountInfo is a record, in KEP-2857's form.
type mountInfo struct {
	VolumeType string            `json:"volume-type"`
	Device     string            `json:"device"`
	FSType     string            `json:"fstype"`
	Options    []string          `json:"options"`
	Metadata   map[string]string `json:"metadata"`
}

// recordName is the name of a deferral's directory.
func recordName(targetPath string) string {
	sum := sha256.Sum256([]byte(targetPath))
	return hex.EncodeToString(sum[:])
}

func encode(d runtimehandler.Deferral) ([]byte, error) {
	info := mountInfo{
		VolumeType: "block",
		Device:     d.Device,
		FSType:     d.FSType,
		Options:    append([]string{}, d.MountFlags...),
		Metadata:   map[string]string{ownerKey: d.TargetPath},
	}
	if d.ReadOnly && !slices.Contains(info.Options, "ro") {
		info.Options = append(info.Options, "ro")
	}
	if d.Group != nil {
		info.Metadata["fsGroup"] = strconv.FormatUint(uint64(*d.Group), 10)
		info.Metadata["fsGroupChangePolicy"] = "Always"
		if d.GroupChangePolicy == runtimehandler.GroupChangeOnRootMismatch {
			info.Metadata["fsGroupChangePolicy"] = "OnRootMismatch"
		}
	}
	if d.Format && d.Blankness == runtimehandler.BlanknessNeverWritten {
		info.Metadata[formatKey] = "never-written"
	}
	raw, err := json.Marshal(info)
	if err != nil {
		return nil, fmt.Errorf("record of %s: %w", d.TargetPath, err)
	}
	return append(raw, '\n'), nil
}

// open makes the root directory if need be and confines everything to it.
func (h *Handler) open() (*os.Root, error) {
	if err := os.MkdirAll(h.config.Root, 0o700); err != nil {
		return nil, fmt.Errorf("directory of records: %w", err)
	}
	root, err := os.OpenRoot(h.config.Root)
	if err != nil {
		return nil, fmt.Errorf("directory of records: %w", err)
	}
	return root, nil
}

// Stage puts the record out, in one step.
func (h *Handler) Stage(_ context.Context, d runtimehandler.Deferral) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err := h.stage(d); err != nil {
		return err
	}
	h.own[recordName(d.TargetPath)] = true
	return nil
}

// stage is Stage for a caller that holds mu.
func (h *Handler) stage(d runtimehandler.Deferral) error {
	raw, err := encode(d)
	if err != nil {
		return err
	}
	root, err := h.open()
	if err != nil {
		return err
	}
	defer root.Close()
	name := recordName(d.TargetPath)
	if have, err := readRecord(root, name); err == nil && bytes.Equal(have, raw) {
		return nil
	}
	if err := put(root, name, raw); err != nil {
		return fmt.Errorf("record of %s: %w", d.TargetPath, err)
	}
	return nil
}

// put writes a file outside of the record's directory and renames it, or a new directory with it, into place.
func put(root *os.Root, name string, raw []byte) error {
	dir := temporary + name
	if err := root.RemoveAll(dir); err != nil {
		return err
	}
	if err := root.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := writeSynced(root, path.Join(dir, infoName), raw); err != nil {
		return errors.Join(err, root.RemoveAll(dir))
	}
	err := root.Rename(dir, name)
	if errors.Is(err, fs.ErrExist) || errors.Is(err, syscall.ENOTEMPTY) {
		err = errors.Join(root.Rename(path.Join(dir, infoName), path.Join(name, infoName)), root.RemoveAll(dir))
	}
	if err != nil {
		return err
	}
	return syncDir(root)
}

func writeSynced(root *os.Root, name string, raw []byte) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(raw)
	return errors.Join(err, f.Sync(), f.Close())
}

func syncDir(root *os.Root) error {
	dir, err := root.Open(".")
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// Unstage removes the record. What else the runtime has put beside it is the runtime's, and stays.
func (h *Handler) Unstage(_ context.Context, targetPath string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	root, err := h.open()
	if err != nil {
		return err
	}
	defer root.Close()
	name := recordName(targetPath)
	h.own[name] = false
	if err := remove(root, name); err != nil {
		return fmt.Errorf("record of %s: %w", targetPath, err)
	}
	return nil
}

func remove(root *os.Root, name string) error {
	for _, file := range []string{path.Join(name, infoName), path.Join(name, commandName), name} {
		err := root.Remove(file)
		if errors.Is(err, syscall.ENOTEMPTY) {
			break
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
			return err
		}
	}
	return errors.Join(root.RemoveAll(temporary+name), syncDir(root))
}

// Sweep puts back missing records, removes those of ours that are no longer staged, and reports the rest.
func (h *Handler) Sweep(_ context.Context, staged []runtimehandler.Deferral) ([]runtimehandler.Leftover, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	root, err := h.open()
	if err != nil {
		return nil, err
	}
	defer root.Close()
	known := map[string]bool{}
	var errs []error
	for _, d := range staged {
		name := recordName(d.TargetPath)
		known[name] = true
		if out, ours := h.own[name]; out || !ours {
			errs = append(errs, h.stage(d))
		}
	}
	for name, out := range h.own {
		if !out && !known[name] {
			delete(h.own, name) // no later list can have it
		}
	}
	entries, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return nil, fmt.Errorf("directory of records: %w", err)
	}
	var left []runtimehandler.Leftover
	for _, e := range entries {
		name := strings.TrimPrefix(e.Name(), temporary)
		if known[name] || h.own[name] || slices.Contains(h.config.Ignore, e.Name()) {
			continue
		}
		l, err := h.sweepEntry(root, e)
		if l != nil {
			left = append(left, *l)
		}
		errs = append(errs, err)
	}
	return left, errors.Join(errs...)
}

// maxRecord is more than a record can have in bytes.
const maxRecord = 1 << 20

// readRecord reads the record in a directory, which anybody may have put there: it is a regular file of a sensible size.
func readRecord(root *os.Root, name string) ([]byte, error) {
	f, err := root.OpenFile(path.Join(name, infoName), os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxRecord {
		return nil, fmt.Errorf("%s/%s is %s of %d bytes, want a file of at most %d: %w", name, infoName, info.Mode().Type(), info.Size(), maxRecord, errdefs.ErrInvalidArgument)
	}
	return io.ReadAll(io.LimitReader(f, maxRecord))
}

// sweepEntry deals with one name that belongs to no deferral.
func (h *Handler) sweepEntry(root *os.Root, e fs.DirEntry) (*runtimehandler.Leftover, error) {
	full := path.Join(h.config.Root, e.Name())
	if strings.HasPrefix(e.Name(), temporary) {
		return nil, root.RemoveAll(e.Name())
	}
	raw, err := readRecord(root, e.Name())
	if err != nil {
		return &runtimehandler.Leftover{Path: full, Stranger: true, Text: "is not a record of crustd; it was left alone"}, nil
	}
	var info mountInfo
	if err := json.Unmarshal(raw, &info); err != nil || info.Metadata[ownerKey] == "" {
		return &runtimehandler.Leftover{Path: full, Stranger: true, Text: "is a record of somebody else's; it was left alone"}, nil
	}
	if err := remove(root, e.Name()); err != nil {
		return nil, fmt.Errorf("remove record %s: %w", full, err)
	}
	if _, err := root.Lstat(e.Name()); err == nil {
		return &runtimehandler.Leftover{Path: full, Text: "has files of a runtime's for a volume that is no longer published; remove them when that runtime has ended"}, nil
	}
	return nil, nil
}
