package runtimehandler

import (
	"fmt"
	"strconv"

	"github.com/containerd/errdefs"

	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
)

// The conversions between the values of this package and their wire form. What a peer sent is checked here, so that
// no value of this package is half valid.

var blanknessToWire = map[Blankness]runtimev1.Blankness{
	BlanknessUnknown:          runtimev1.Blankness_BLANKNESS_UNSPECIFIED,
	BlanknessNeverWritten:     runtimev1.Blankness_BLANKNESS_NEVER_WRITTEN,
	BlanknessUnfinishedFormat: runtimev1.Blankness_BLANKNESS_UNFINISHED_FORMAT,
}

// DeferralToProto is the wire form of a deferral.
func DeferralToProto(d Deferral) *runtimev1.Deferral {
	w := &runtimev1.Deferral{
		TargetPath: d.TargetPath,
		Driver:     d.Driver,
		VolumeId:   d.VolumeID,
		Device:     d.Device,
		Serial:     d.Serial,
		SizeBytes:  d.SizeBytes,
		FsType:     d.FSType,
		MountFlags: d.MountFlags,
		ReadOnly:   d.ReadOnly,
		Format:     d.Format,
		Blankness:  blanknessToWire[d.Blankness],
	}
	if d.Group != nil {
		w.SupplementalGroup = strconv.FormatUint(uint64(*d.Group), 10)
		w.SupplementalGroupChangePolicy = runtimev1.GroupChangePolicy_GROUP_CHANGE_POLICY_ALWAYS
		if d.GroupChangePolicy == GroupChangeOnRootMismatch {
			w.SupplementalGroupChangePolicy = runtimev1.GroupChangePolicy_GROUP_CHANGE_POLICY_ON_ROOT_MISMATCH
		}
	}
	return w
}

// DeferralFromProto reads the wire form of a deferral. ErrInvalidArgument if a peer sent something that is none.
func DeferralFromProto(w *runtimev1.Deferral) (Deferral, error) {
	d := Deferral{
		TargetPath: w.GetTargetPath(),
		Driver:     w.GetDriver(),
		VolumeID:   w.GetVolumeId(),
		Device:     w.GetDevice(),
		Serial:     w.GetSerial(),
		SizeBytes:  w.GetSizeBytes(),
		FSType:     w.GetFsType(),
		MountFlags: w.GetMountFlags(),
		ReadOnly:   w.GetReadOnly(),
		Format:     w.GetFormat(),
	}
	for blankness, wire := range blanknessToWire {
		if wire == w.GetBlankness() {
			d.Blankness = blankness
		}
	}
	if d.TargetPath == "" || d.Device == "" || d.Serial == "" || len(d.Serial) > serialBytes || d.FSType == "" {
		return Deferral{}, fmt.Errorf("deferral %q without device, serial or filesystem type: %w", d.TargetPath, errdefs.ErrInvalidArgument)
	}
	var err error
	if d.Group, err = ParseGroup(w.GetSupplementalGroup()); err != nil {
		return Deferral{}, err
	}
	if w.GetSupplementalGroupChangePolicy() == runtimev1.GroupChangePolicy_GROUP_CHANGE_POLICY_ON_ROOT_MISMATCH {
		d.GroupChangePolicy = GroupChangeOnRootMismatch
	}
	return d, nil
}

// ParseGroup reads a group id; empty is none. ErrInvalidArgument for anything that chown(2) would not take as one.
func ParseGroup(group string) (*uint32, error) {
	if group == "" {
		return nil, nil
	}
	id, err := strconv.ParseUint(group, 10, 32)
	if err != nil || id == 1<<32-1 {
		return nil, fmt.Errorf("supplemental group %q is not a group id: %w", group, errdefs.ErrInvalidArgument)
	}
	gid := uint32(id)
	return &gid, nil
}

// CapabilitiesToProto is the wire form of capabilities.
func CapabilitiesToProto(c Capabilities) []runtimev1.Capability {
	var list []runtimev1.Capability
	for capability, field := range capabilityFields(&c) {
		if *field {
			list = append(list, capability)
		}
	}
	return list
}

// CapabilitiesFromProto reads the wire form of capabilities; those that it does not know are left out.
func CapabilitiesFromProto(list []runtimev1.Capability) Capabilities {
	var c Capabilities
	fields := capabilityFields(&c)
	for _, capability := range list {
		if field, ok := fields[capability]; ok {
			*field = true
		}
	}
	c.OnlineExpand = c.Grow
	return c
}

func capabilityFields(c *Capabilities) map[runtimev1.Capability]*bool {
	return map[runtimev1.Capability]*bool{
		runtimev1.Capability_CAPABILITY_FORMAT:  &c.Format,
		runtimev1.Capability_CAPABILITY_CHECK:   &c.Check,
		runtimev1.Capability_CAPABILITY_GROW:    &c.Grow,
		runtimev1.Capability_CAPABILITY_GROUP:   &c.Group,
		runtimev1.Capability_CAPABILITY_SUBPATH: &c.SubPath,
		runtimev1.Capability_CAPABILITY_FREEZE:  &c.Freeze,
	}
}

// StatsToProto is the wire form of statistics.
func StatsToProto(s Stats) ([]*runtimev1.VolumeUsage, *runtimev1.VolumeCondition) {
	usage := func(u Usage, unit runtimev1.VolumeUsage_Unit) *runtimev1.VolumeUsage {
		return &runtimev1.VolumeUsage{Total: u.Total, Available: u.Available, Used: u.Used, Unit: unit}
	}
	return []*runtimev1.VolumeUsage{
			usage(s.Bytes, runtimev1.VolumeUsage_UNIT_BYTES),
			usage(s.Inodes, runtimev1.VolumeUsage_UNIT_INODES),
		}, &runtimev1.VolumeCondition{
			Abnormal: s.Abnormal,
			Message:  s.Message,
		}
}

// StatsFromProto reads the wire form of statistics. ErrInvalidArgument if there is no usage in bytes, or a number is
// negative or larger than the total that it is part of: a guest may lie, but not in a way that breaks arithmetic.
func StatsFromProto(usage []*runtimev1.VolumeUsage, condition *runtimev1.VolumeCondition) (Stats, error) {
	s := Stats{Abnormal: condition.GetAbnormal(), Message: condition.GetMessage()}
	bytes := false
	for _, w := range usage {
		u := Usage{Total: w.GetTotal(), Available: w.GetAvailable(), Used: w.GetUsed()}
		if u.Total < 0 || u.Available < 0 || u.Used < 0 || u.Available > u.Total || u.Used > u.Total {
			return Stats{}, fmt.Errorf("impossible usage %+v: %w", u, errdefs.ErrInvalidArgument)
		}
		switch w.GetUnit() {
		case runtimev1.VolumeUsage_UNIT_BYTES:
			s.Bytes, bytes = u, true
		case runtimev1.VolumeUsage_UNIT_INODES:
			s.Inodes = u
		}
	}
	if !bytes {
		return Stats{}, fmt.Errorf("statistics without bytes: %w", errdefs.ErrInvalidArgument)
	}
	return s, nil
}
