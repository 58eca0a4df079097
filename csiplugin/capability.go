package csiplugin

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/hostmount"
	"crust.dev/crust/protocol/csi/deferred"
)

// defaultFSType is the filesystem of a volume that is to be mounted and that nobody asked another one for.
const defaultFSType = "ext4"

// minimum is how many bytes a volume needs for a filesystem, by type. These are the filesystems that there are.
var minimum = map[string]int64{
	"ext4": 16 << 20,  // below 8 MiB, mkfs.ext4 makes no journal; some room is for its growth
	"xfs":  300 << 20, // mkfs.xfs makes no smaller one since xfsprogs 5.19
}

func fsTypes() string {
	var names []string
	for name := range minimum {
		names = append(names, name)
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// capability is a volume_capability that says something sensible. Whether a volume has it is for [capability.of].
type capability struct {
	// use has an empty FSType if none was asked for.
	use catalog.Use
	// flags are the mount flags, and may be confidential.
	flags []string
	// readOnly says that nothing is to be written, by access mode or by mount flag.
	readOnly bool
	// group is the group id that is to have access and policy when; both may be empty. sandboxed says that they were given
	// in the way that only a sandbox is asked for.
	group, policy string
	sandboxed     bool
}

// parseCapability reads a required volume_capability. Errors are ErrInvalidArgument, and show no mount flags.
func parseCapability(c *csi.VolumeCapability) (capability, error) {
	mode := c.GetAccessMode().GetMode()
	_, known := csi.VolumeCapability_AccessMode_Mode_name[int32(mode)]
	switch {
	case c == nil:
		return capability{}, invalid("volume_capability is missing")
	case c.GetAccessMode() == nil || mode == csi.VolumeCapability_AccessMode_UNKNOWN:
		return capability{}, invalid("volume_capability.access_mode is missing")
	case !known:
		return capability{}, invalid("volume_capability.access_mode %d is not known", mode)
	case c.GetMount() == nil && c.GetBlock() == nil:
		return capability{}, invalid("volume_capability.access_type is missing: want block or mount")
	}
	parsed := capability{
		use:      catalog.Use{Block: c.GetBlock() != nil, Mode: int32(mode)},
		readOnly: mode == csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
	}
	if c.GetMount() == nil {
		return parsed, nil
	}
	return parsed, parsed.parseMount(c.GetMount())
}

func (c *capability) parseMount(m *csi.VolumeCapability_MountVolume) error {
	var ext deferred.MountVolumeExtension
	if err := deferred.Get(m, &ext); err != nil {
		return err
	}
	if err := hostmount.CheckFlags(m.GetMountFlags()); err != nil {
		return err
	}
	c.use.FSType = m.GetFsType()
	c.flags = m.GetMountFlags()
	c.use.Flags = digest(c.flags)
	c.readOnly = c.readOnly || hostmount.AsksReadOnly(c.flags)
	c.group, c.policy = m.GetVolumeMountGroup(), ext.GetVolumeSupplementalGroupChangePolicy()
	if g := ext.GetVolumeSupplementalGroup(); g != "" {
		if c.group != "" && c.group != g {
			return invalid("volume_mount_group %q contradicts volume_supplemental_group %q", c.group, g)
		}
		c.group, c.sandboxed = g, true
	}
	c.sandboxed = c.sandboxed || c.policy != ""
	return deferred.ValidateGroup(c.group, c.policy)
}

// digest stands for mount flags where they must not be stored.
func digest(flags []string) string {
	if len(flags) == 0 {
		return ""
	}
	h := sha256.Sum256([]byte(strings.Join(flags, "\x00")))
	return hex.EncodeToString(h[:])
}

// supported returns nil if a volume of this driver can have the capability, and otherwise an error without a kind: it
// depends on the RPC.
func (c capability) supported() error {
	if strings.HasPrefix(c.mode().String(), "MULTI_NODE_") {
		return fmt.Errorf("access mode %s: a volume is on one node only", c.mode())
	}
	if !c.use.Block && c.use.FSType != "" && minimum[c.use.FSType] == 0 {
		return fmt.Errorf("filesystem %.32q: want one of %s", c.use.FSType, fsTypes())
	}
	return nil
}

// of is the capability as one of a volume: with the volume's filesystem where none was asked for. The error, if the volume
// does not have it, is without a kind: it depends on the RPC.
func (c capability) of(v catalog.Volume) (capability, error) {
	if err := c.supported(); err != nil {
		return c, err
	}
	switch {
	case c.use.Block && !v.Block:
		return c, fmt.Errorf("volume %s was created for mounts, not as a block device", v.ID)
	case c.use.Block:
		return c, nil
	case v.FSType == "":
		return c, fmt.Errorf("volume %s was created as a block device, not for mounts", v.ID)
	case c.use.FSType == "":
		c.use.FSType = v.FSType
	case c.use.FSType != v.FSType:
		return c, fmt.Errorf("volume %s was created for %s, not for %s", v.ID, v.FSType, c.use.FSType)
	}
	return c, nil
}

func (c capability) mode() csi.VolumeCapability_AccessMode_Mode {
	return csi.VolumeCapability_AccessMode_Mode(c.use.Mode)
}
