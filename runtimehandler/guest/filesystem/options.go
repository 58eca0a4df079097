package filesystem

import (
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Options are mount options, sorted by who understands them.
type Options struct {
	attributes uint64      // of the mount (mount_setattr(2))
	atime      uint64      // the one of the attributes' values for access times
	generic    []parameter // of the superblock, common to all filesystems
	specific   []parameter // of the filesystem
	readOnly   bool
}

// parameter is a key with or without a value (fsconfig(2)).
type parameter struct {
	key, value string
	flag       bool // without a value
}

func (p parameter) String() string {
	if p.flag {
		return p.key
	}
	return p.key + "=" + p.value
}

// ReadOnly says whether the options ask for a read-only mount.
func (o Options) ReadOnly() bool { return o.readOnly }

// attributeOptions are the options of fstab that concern one mount, with what they set or, after "~", clear.
var attributeOptions = map[string]struct{ set, clear uint64 }{
	"nosuid":      {set: unix.MOUNT_ATTR_NOSUID},
	"suid":        {clear: unix.MOUNT_ATTR_NOSUID},
	"nodev":       {set: unix.MOUNT_ATTR_NODEV},
	"dev":         {clear: unix.MOUNT_ATTR_NODEV},
	"noexec":      {set: unix.MOUNT_ATTR_NOEXEC},
	"exec":        {clear: unix.MOUNT_ATTR_NOEXEC},
	"nodiratime":  {set: unix.MOUNT_ATTR_NODIRATIME},
	"diratime":    {clear: unix.MOUNT_ATTR_NODIRATIME},
	"nosymfollow": {set: unix.MOUNT_ATTR_NOSYMFOLLOW},
	"symfollow":   {clear: unix.MOUNT_ATTR_NOSYMFOLLOW},
}

// atimeOptions exclude each other.
var atimeOptions = map[string]uint64{
	"relatime":    unix.MOUNT_ATTR_RELATIME,
	"atime":       unix.MOUNT_ATTR_RELATIME,
	"noatime":     unix.MOUNT_ATTR_NOATIME,
	"strictatime": unix.MOUNT_ATTR_STRICTATIME,
}

// genericOptions are flags of the superblock that fsconfig(2) takes by these names.
var genericOptions = map[string]bool{"sync": true, "async": true, "dirsync": true, "lazytime": true, "nolazytime": true}

// idleOptions say when and by whom an entry of fstab is mounted, which is not our question (mount(8)).
var idleOptions = map[string]bool{"defaults": true, "auto": true, "noauto": true, "nofail": true, "_netdev": true}

// foreignOptions are commands to mount(8), or the device's business.
var foreignOptions = map[string]bool{
	"bind": true, "rbind": true, "move": true, "remount": true, "loop": true, "user": true, "users": true, "owner": true, "group": true,
	"shared": true, "rshared": true, "private": true, "rprivate": true, "slave": true, "rslave": true, "unbindable": true, "runbindable": true,
}

// ParseOptions reads mount options as they are in fstab; an element may have several, separated by commas. Later options
// win over earlier ones. ErrInvalidArgument for what makes no sense for a new mount; what only the filesystem can judge
// is left to it.
func ParseOptions(flags []string) (Options, error) {
	var o Options
	for _, flag := range flags {
		for _, option := range splitOptions(flag) {
			if err := o.add(option); err != nil {
				return Options{}, fmt.Errorf("mount option %q: %w", option, err)
			}
		}
	}
	o.attributes |= o.atime
	if o.readOnly {
		o.attributes |= unix.MOUNT_ATTR_RDONLY
		o.generic = append(o.generic, parameter{key: "ro", flag: true})
	}
	return o, nil
}

func (o *Options) add(option string) error {
	key, value, hasValue := strings.Cut(option, "=")
	if !hasValue {
		if a, ok := attributeOptions[key]; ok {
			o.attributes = o.attributes&^a.clear | a.set
			return nil
		}
		if atime, ok := atimeOptions[key]; ok {
			o.atime = atime
			return nil
		}
		switch {
		case key == "ro", key == "rw":
			o.readOnly = key == "ro"
			return nil
		case genericOptions[key]:
			o.generic = append(o.generic, parameter{key: key, flag: true})
			return nil
		case idleOptions[key]:
			return nil
		}
	}
	switch {
	case strings.HasPrefix(key, "x-"), strings.HasPrefix(key, "X-"), key == "comment":
		return nil // for programs that read fstab
	case key == "" || strings.ContainsAny(option, "\x00\n"):
		return fmt.Errorf("not an option: %w", errdefs.ErrInvalidArgument)
	case foreignOptions[key] || key == "source" || key == "offset" || key == "sizelimit":
		return fmt.Errorf("it has no meaning for a volume in a sandbox; remove it: %w", errdefs.ErrInvalidArgument)
	}
	o.specific = append(o.specific, parameter{key: key, value: strings.Trim(value, `"`), flag: !hasValue})
	return nil
}

// splitOptions splits a list at its commas, but for those between double quotes (mount(8) has that for SELinux contexts).
func splitOptions(list string) []string {
	quoted := false
	return strings.FieldsFunc(list, func(r rune) bool {
		if r == '"' {
			quoted = !quoted
		}
		return r == ',' && !quoted
	})
}

// withDefaults adds a filesystem's own options for which the user has not said otherwise.
func (o Options) withDefaults(defaults []string) Options {
	for _, option := range defaults {
		key, value, hasValue := strings.Cut(option, "=")
		if !o.has(key) {
			o.specific = append(o.specific[:len(o.specific):len(o.specific)], parameter{key: key, value: value, flag: !hasValue})
		}
	}
	return o
}

func (o Options) has(key string) bool {
	for _, p := range o.specific {
		if p.key == key {
			return true
		}
	}
	return false
}
