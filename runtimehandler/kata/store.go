package kata

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/containerd/errdefs"
)

// owner says whose a record is.
type owner int

const (
	nobody   owner = iota // there is no record
	ours                  // of this handler
	broken                // a directory without mountInfo.json: nobody's record, and runtime-rs stumbles over it
	stranger              // of another driver, of Kata itself, or of another handler of ours
)

// look returns what is at a name in the directory of records.
func (h *Handler) look(name string) (owner, []byte, error) {
	dir := filepath.Join(h.paths.records, name)
	raw, err := os.ReadFile(filepath.Join(dir, infoName))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Lstat(dir); err != nil {
			return nobody, nil, ignoreNotExist(err)
		}
		return broken, nil, nil
	case errors.Is(err, syscall.ENOTDIR):
		return stranger, nil, nil
	case errors.Is(err, syscall.ENAMETOOLONG):
		return nobody, nil, nil // such a record cannot have been put out
	case err != nil:
		return nobody, nil, fmt.Errorf("record: %w", err)
	}
	var info mountInfo
	if json.Unmarshal(raw, &info) != nil || info.Metadata[ownerKey] != h.config.Name {
		return stranger, raw, nil
	}
	return ours, raw, nil
}

// record returns our record of a mount source. ErrNotFound if there is none, or somebody else's.
func (h *Handler) record(targetPath string) (name string, info mountInfo, err error) {
	if name, err = nameFor(targetPath); err != nil {
		return "", info, err
	}
	who, raw, err := h.look(name)
	if err == nil && who != ours {
		err = errdefs.ErrNotFound
	}
	if err == nil {
		err = json.Unmarshal(raw, &info)
	}
	if err != nil {
		return "", info, fmt.Errorf("handler %s: no volume is staged at %s: %w", h.config.Name, targetPath, err)
	}
	return name, info, nil
}

// put makes a record visible in one step, or replaces one in one step. The caller holds mu.
func (h *Handler) put(name string, raw []byte) error {
	who, have, err := h.look(name)
	if err != nil {
		return err
	}
	target := filepath.Join(h.paths.records, name)
	switch {
	case who == ours && bytes.Equal(have, raw):
		return nil
	case who == stranger:
		return h.taken(name)
	case who == ours:
		// What sandboxes have left in it is about another volume.
		if err := h.withdraw(name); err != nil {
			return err
		}
	}
	dir, err := h.prepare(name, raw)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(h.paths.records, 0o700); err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	// Over nothing, or over an empty directory (rename(2)).
	err = os.Rename(dir, target)
	if errors.Is(err, fs.ErrExist) || errors.Is(err, syscall.ENOTEMPTY) {
		// The record was lost, and the marks of sandboxes beside it are still good.
		err = errors.Join(os.Rename(filepath.Join(dir, infoName), filepath.Join(target, infoName)), os.RemoveAll(dir))
	}
	if errors.Is(err, syscall.EXDEV) {
		err = fmt.Errorf("%w: %s and %s must be on one filesystem: give crustd the node's /run, not parts of it: %w", err, h.paths.scratch, h.paths.records, errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(dir))
	}
	return syncDir(h.paths.records)
}

// taken is the refusal of a record in the place of somebody else's.
func (h *Handler) taken(name string) error {
	return fmt.Errorf("record %s is there already and belongs to somebody else; remove it if no pod uses it: %w",
		filepath.Join(h.paths.records, name, infoName), errdefs.ErrFailedPrecondition)
}

// prepare makes a record in the scratch directory.
func (h *Handler) prepare(name string, raw []byte) (dir string, err error) {
	dir = filepath.Join(h.paths.scratch, name)
	if err := os.RemoveAll(dir); err != nil {
		return "", err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	f, err := os.OpenFile(filepath.Join(dir, infoName), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	_, err = f.Write(raw)
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	return dir, nil
}

// withdraw makes a record invisible in one step, with all that sandboxes have left beside it, and then removes it. Nothing
// there is success. The caller holds mu.
func (h *Handler) withdraw(name string) error {
	if err := os.MkdirAll(h.paths.scratch, 0o700); err != nil {
		return err
	}
	gone := filepath.Join(h.paths.scratch, name)
	if err := os.RemoveAll(gone); err != nil {
		return err
	}
	if err := os.Rename(filepath.Join(h.paths.records, name), gone); err != nil {
		return ignoreNotExist(err)
	}
	return errors.Join(syncDir(h.paths.records), os.RemoveAll(gone))
}

func ignoreNotExist(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
