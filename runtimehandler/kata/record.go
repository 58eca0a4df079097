package kata

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata/config"
)

const (
	infoName = "mountInfo.json"
	// volumeType is the only one with which both runtimes take a block device or an image file.
	volumeType = "directvol"
	// maxSource is the longest mount source in bytes whose encoding fits into a file name of 255 bytes.
	maxSource = 189

	// Kata's own keys of the metadata. Its createFilesystem is not among them: it formats without looking.
	groupKey       = "fsGroup"
	groupPolicyKey = "fsGroupChangePolicy"
	// ownerKey marks a record as one of ours, and says of which handler. Kata ignores keys that it does not know.
	ownerKey = "crust.dev/handler"
	// assistKey says what was done on the host before hand-over.
	assistKey = "crust.dev/host-assist"
)

// mountInfo is a record in the form that both runtimes read: the Go runtime takes any spelling of the keys and needs
// none, runtime-rs needs the first three as they are here.
type mountInfo struct {
	VolumeType string            `json:"volume-type"`
	Device     string            `json:"device"`
	FSType     string            `json:"fstype"`
	Metadata   map[string]string `json:"metadata"`
	Options    []string          `json:"options"`
}

// recordName is the name of the directory for a mount source, which must be as the container runtime writes it into the
// OCI configuration: with its symbolic links resolved.
func recordName(source string) string { return base64.URLEncoding.EncodeToString([]byte(source)) }

// resolve returns a target path as the container runtime will name it. What does not exist (any more) is taken as it is;
// the directories above are resolved all the same.
func resolve(targetPath string) (string, error) {
	rest := ""
	for dir := filepath.Clean(targetPath); ; dir = filepath.Dir(dir) {
		resolved, err := filepath.EvalSymlinks(dir)
		if err == nil {
			return filepath.Join(resolved, rest), nil
		}
		if !errors.Is(err, fs.ErrNotExist) || dir == "/" {
			return "", fmt.Errorf("target path %s: %w", targetPath, err)
		}
		rest = filepath.Join(filepath.Base(dir), rest)
	}
}

// nameFor returns the name of a target path's record.
func nameFor(targetPath string) (string, error) {
	source, err := resolve(targetPath)
	if err != nil {
		return "", err
	}
	return recordName(source), nil
}

// encode makes the record of a deferral. ErrInvalidArgument for what no Kata sandbox can ever mount.
func (h *Handler) encode(d runtimehandler.Deferral, assisted string) (name string, raw []byte, err error) {
	source, err := resolve(d.TargetPath)
	if err != nil {
		return "", nil, err
	}
	if len(source) > maxSource {
		return "", nil, fmt.Errorf("volume %s: its target path %s has %d bytes, and Kata's record of it takes %d at most (NAME_MAX, base64): choose a name for the PersistentVolume that is %d bytes shorter: %w",
			d.VolumeID, source, len(source), maxSource, len(source)-maxSource, errdefs.ErrInvalidArgument)
	}
	if !slices.Contains(h.config.FSTypes, d.FSType) {
		return "", nil, fmt.Errorf("volume %s: the kernel of Kata's guests has no %s, only %s: choose one of them as csi.storage.k8s.io/fstype: %w",
			d.VolumeID, d.FSType, strings.Join(h.config.FSTypes, " and "), errdefs.ErrInvalidArgument)
	}
	info := mountInfo{VolumeType: volumeType, Device: d.Device, FSType: d.FSType, Metadata: map[string]string{ownerKey: h.config.Name}}
	if info.Options, err = options(d); err != nil {
		return "", nil, fmt.Errorf("volume %s: %w", d.VolumeID, err)
	}
	if h.groupInGuest(d) {
		info.Metadata[groupKey] = strconv.FormatUint(uint64(*d.Group), 10)
		info.Metadata[groupPolicyKey] = "Always"
		if d.GroupChangePolicy == runtimehandler.GroupChangeOnRootMismatch {
			info.Metadata[groupPolicyKey] = "OnRootMismatch"
		}
	}
	if assisted != "" {
		info.Metadata[assistKey] = assisted
	}
	raw, err = json.Marshal(info)
	if err != nil {
		return "", nil, fmt.Errorf("record of %s: %w", d.TargetPath, err)
	}
	return recordName(source), append(raw, '\n'), nil
}

// groupInGuest says whether fsGroup is left to the agent: runtime-rs loses it, and for the Go runtime group 0 is an error.
func (h *Handler) groupInGuest(d runtimehandler.Deferral) bool {
	return d.Group != nil && *d.Group != 0 && !d.ReadOnly && h.config.Runtime == config.Go
}

var (
	// idleOptions say when and by whom an entry of fstab is mounted (mount(8)); the guest's kernel does not know them.
	idleOptions = []string{"defaults", "auto", "noauto", "nofail", "_netdev", "rw"}
	// foreignOptions are commands to mount(8). Kata passes bind on as MS_BIND (kata-containers#11296), and its agent
	// refuses loop.
	foreignOptions = []string{"bind", "rbind", "loop", "move", "remount", "user", "users", "owner", "group", "shared", "rshared", "private", "rprivate", "slave", "rslave", "unbindable", "runbindable"}
)

// options returns the mount options of a record. "ro" is among them for a read-only volume: the Go runtime attaches the
// device read-only for it, and runtime-rs mounts it so.
func options(d runtimehandler.Deferral) ([]string, error) {
	list := []string{}
	for _, flag := range d.MountFlags {
		for _, option := range splitOptions(flag) {
			key, _, _ := strings.Cut(option, "=")
			switch {
			case slices.Contains(idleOptions, key), strings.HasPrefix(key, "x-"), strings.HasPrefix(key, "X-"), key == "comment", key == "ro":
			case slices.Contains(foreignOptions, key):
				return nil, fmt.Errorf("mount option %q has no meaning in a sandbox, and breaks Kata; remove it from the StorageClass or PersistentVolume: %w", option, errdefs.ErrInvalidArgument)
			default:
				list = append(list, option)
			}
		}
	}
	if d.FSType == "xfs" && !slices.Contains(list, "nouuid") {
		list = append(list, "nouuid") // a clone mounts beside its source
	}
	if d.ReadOnly || slices.ContainsFunc(d.MountFlags, func(f string) bool { return slices.Contains(splitOptions(f), "ro") }) {
		list = append(list, "ro")
	}
	return list, nil
}

// splitOptions splits a list at its commas, but for those between double quotes (mount(8), for SELinux contexts). Kata's
// agent does not split.
func splitOptions(list string) []string {
	quoted := false
	return strings.FieldsFunc(list, func(r rune) bool {
		if r == '"' {
			quoted = !quoted
		}
		return r == ',' && !quoted
	})
}
