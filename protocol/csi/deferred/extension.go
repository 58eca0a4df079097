package deferred

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Capabilities that an SP adds to NodeGetCapabilitiesResponse. They are the names of KEP-2857 under numbers that
// upstream does not use.
const (
	// CapabilityDeferFSOps: the SP understands defer_fs_ops.
	CapabilityDeferFSOps csi.NodeServiceCapability_RPC_Type = 52601
	// CapabilitySupplementalGroup: the SP understands volume_supplemental_group.
	CapabilitySupplementalGroup csi.NodeServiceCapability_RPC_Type = 52602
	// CapabilitySupplementalGroupChangePolicy: the SP understands volume_supplemental_group_change_policy.
	CapabilitySupplementalGroupChangePolicy csi.NodeServiceCapability_RPC_Type = 52603
)

// The values of volume_supplemental_group_change_policy, as Kubernetes' PodFSGroupChangePolicy spells them.
const (
	GroupChangeAlways         = "Always"
	GroupChangeOnRootMismatch = "OnRootMismatch"
)

// ParameterDefer is the volume parameter with which a StorageClass asks for deferral: "always", "never" or "auto". An
// SP copies it into volume_context.
const ParameterDefer = "crust.dev/defer"

// ParameterHandler is the volume parameter that names the runtime handler, of those in the daemon's configuration, whose
// sandboxes will mount the volume. An SP copies it into volume_context.
const ParameterHandler = "crust.dev/handler"

// Extended is an upstream message that this package extends.
type Extended interface {
	proto.Message
	*csi.NodePublishVolumeRequest | *csi.NodePublishVolumeResponse | *csi.NodeUnpublishVolumeRequest |
		*csi.NodeGetVolumeStatsRequest | *csi.NodeExpandVolumeRequest | *csi.VolumeCapability_MountVolume
}

// Set replaces the extension that msg carries. ext must be the extension of msg's type.
func Set[M Extended](msg M, ext proto.Message) error {
	if err := matches(msg, ext); err != nil {
		return err
	}
	added, err := proto.MarshalOptions{Deterministic: true}.Marshal(ext)
	if err != nil {
		return fmt.Errorf("extension of %s: %w", msg.ProtoReflect().Descriptor().FullName(), err)
	}
	kept := without(msg.ProtoReflect().GetUnknown(), ext)
	msg.ProtoReflect().SetUnknown(append(kept, added...))
	return nil
}

// Get reads the extension that msg carries into ext, which is empty if msg carries none. A message whose unknown fields
// are not what the extension says is ErrInvalidArgument.
func Get[M Extended](msg M, ext proto.Message) error {
	if err := matches(msg, ext); err != nil {
		return err
	}
	proto.Reset(ext)
	if !msg.ProtoReflect().IsValid() {
		return nil
	}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(msg.ProtoReflect().GetUnknown(), ext); err != nil {
		return fmt.Errorf("extension of %s: %w: %w", msg.ProtoReflect().Descriptor().FullName(), err, errdefs.ErrInvalidArgument)
	}
	return nil
}

// matches holds the name of an extension against that of the message: csi.v1.X is extended by csi.deferred.XExtension.
func matches(msg, ext proto.Message) error {
	m, e := msg.ProtoReflect().Descriptor(), ext.ProtoReflect().Descriptor()
	if e.Name() != m.Name()+"Extension" {
		return fmt.Errorf("%s does not extend %s: %w", e.FullName(), m.FullName(), errdefs.ErrInternal)
	}
	return nil
}

// without returns a copy of raw fields without those that ext declares.
func without(raw []byte, ext proto.Message) []byte {
	fields := ext.ProtoReflect().Descriptor().Fields()
	var kept []byte
	for len(raw) > 0 {
		num, _, n := protowire.ConsumeField(raw)
		if n < 0 {
			break
		}
		if fields.ByNumber(num) == nil {
			kept = append(kept, raw[:n]...)
		}
		raw = raw[n:]
	}
	return kept
}
