package kata

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// infoName is the file of a record.
const infoName = "mountInfo.json"

// Info is a record as a runtime has read it.
type Info struct {
	VolumeType string            `json:"volume-type"`
	Device     string            `json:"device"`
	FSType     string            `json:"fstype"`
	Metadata   map[string]string `json:"metadata,omitempty"`
	Options    []string          `json:"options,omitempty"`
}

// ParseGo reads a record as the Go runtime does: any spelling of the keys, none of which it needs.
func ParseGo(raw []byte) (Info, error) {
	var info Info
	err := json.Unmarshal(raw, &info)
	return info, err
}

// ParseRust reads a record as runtime-rs does: the first three keys have to be there as they are spelled, no key twice, and
// every value of its type.
func ParseRust(raw []byte) (Info, error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(raw, &keys); err != nil {
		return Info{}, err
	}
	var info Info
	for key, into := range map[string]any{"volume-type": &info.VolumeType, "device": &info.Device, "fstype": &info.FSType, "metadata": &info.Metadata, "options": &info.Options} {
		value, ok := keys[key]
		if !ok && key != "metadata" && key != "options" {
			return Info{}, fmt.Errorf("missing field `%s`", key)
		}
		if !ok {
			continue
		}
		if bytes.Equal(bytes.TrimSpace(value), []byte("null")) {
			return Info{}, fmt.Errorf("invalid type: null for `%s`", key)
		}
		if err := json.Unmarshal(value, into); err != nil {
			return Info{}, err
		}
	}
	return info, nil
}

// RecordDir is the directory of a mount source's record.
func (n *Node) RecordDir(source string) string {
	return filepath.Join(n.Records(), base64.URLEncoding.EncodeToString([]byte(source)))
}

// SandboxOf is how Kata's commands find the sandbox of a volume: the first name beside the record.
func (n *Node) SandboxOf(source string) (string, error) {
	entries, err := os.ReadDir(n.RecordDir(source))
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(entries, func(e fs.DirEntry) bool { return e.Name() != infoName })
	if i < 0 {
		return "", errors.New("no sandbox found for " + source)
	}
	return entries[i].Name(), nil
}

// Scan reads all records as azuredisk does, which fails for the first name that is none, or that has none. It returns them
// by their mount source.
func (n *Node) Scan() (map[string]Info, error) {
	entries, err := os.ReadDir(n.Records())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	all := map[string]Info{}
	for _, e := range entries {
		source, err := base64.URLEncoding.DecodeString(e.Name())
		if err != nil {
			return nil, fmt.Errorf("invalid Kata record %q: %w", e.Name(), err)
		}
		raw, err := os.ReadFile(filepath.Join(n.Records(), e.Name(), infoName))
		if err != nil {
			return nil, err
		}
		if all[string(source)], err = ParseRust(raw); err != nil {
			return nil, fmt.Errorf("invalid Kata record of %s: %w", source, err)
		}
	}
	return all, nil
}
