package proxy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"

	"crust.dev/crust/crust/internal/deferrals"
	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/policy"
	"crust.dev/crust/crust/internal/sp"
	"crust.dev/crust/protocol/csi/deferred"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler"
)

// NodePublishVolume is that of CSI: it records a deferral and mounts nothing, or goes through.
func (n *node) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	decision, err := n.decide(ctx, req)
	if err != nil {
		return nil, err
	}
	driver, err := n.provider.Name(ctx)
	if err != nil {
		return nil, err
	}
	if !decision.Defer {
		return n.publishOnHost(ctx, driver, req)
	}
	if err := validPublish(req); err != nil {
		return nil, err
	}
	abilities, err := n.provider.RequireDeferral(ctx)
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", req.GetVolumeId(), err)
	}
	deferral, err := deferralRequest(driver, req, decision, abilities)
	if err != nil {
		return nil, err
	}
	if err := n.deferrals.Publish(ctx, deferral, n.provider.NewVolume(driver, req)); err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// deferralRequest says what is to be deferred, and how.
func deferralRequest(driver string, req *csi.NodePublishVolumeRequest, decision policy.Decision, abilities sp.Abilities) (deferrals.Request, error) {
	d := deferrals.Request{
		Driver:     driver,
		VolumeID:   req.GetVolumeId(),
		TargetPath: req.GetTargetPath(),
		ReadOnly:   req.GetReadonly(),
		Handler:    decision.Handler,
		SubPaths:   decision.SubPaths,
	}
	var err error
	if d.Digest, err = digest(req); err != nil {
		return d, err
	}
	if d.Group, err = runtimehandler.ParseGroup(req.GetVolumeCapability().GetMount().GetVolumeMountGroup()); err != nil {
		return d, err
	}
	if pod := decision.Pod; pod != nil {
		d.Pod = journal.Pod{UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name}
		// Without VOLUME_MOUNT_GROUP the kubelet applies the group itself, to the empty target path.
		if d.Group == nil && !abilities.MountGroup && pod.FSGroup != nil {
			if d.Group, err = runtimehandler.ParseGroup(strconv.FormatInt(*pod.FSGroup, 10)); err != nil {
				return d, err
			}
		}
	}
	switch decision.GroupChangePolicy {
	case "", deferred.GroupChangeAlways:
	case deferred.GroupChangeOnRootMismatch:
		d.GroupChangePolicy = runtimehandler.GroupChangeOnRootMismatch
	default:
		return d, invalid("%s %q: want %s or %s", policy.ParameterGroupChangePolicy, decision.GroupChangePolicy, deferred.GroupChangeAlways, deferred.GroupChangeOnRootMismatch)
	}
	return d, nil
}

// publishOnHost hands a request on, and notes that the volume is used on the host. A request that the driver will refuse
// anyway is not noted.
func (n *node) publishOnHost(ctx context.Context, driver string, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	if req.GetVolumeId() == "" || validPath("target_path", req.GetTargetPath()) != nil {
		resp, err := n.provider.Node().NodePublishVolume(ctx, req)
		return resp, rpc.Relay(err)
	}
	var resp *csi.NodePublishVolumeResponse
	err := n.deferrals.PublishOnHost(ctx, deferrals.Request{
		Driver:     driver,
		VolumeID:   req.GetVolumeId(),
		TargetPath: req.GetTargetPath(),
		ReadOnly:   req.GetReadonly(),
	}, func(ctx context.Context) (err error) {
		resp, err = n.provider.Node().NodePublishVolume(ctx, req)
		return rpc.Relay(err)
	}, func(ctx context.Context) error {
		_, err := n.provider.Node().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: req.GetVolumeId(), TargetPath: req.GetTargetPath()})
		return rpc.Relay(err)
	})
	return resp, err
}

// decide says whether a volume is deferred. A CO that asks for it by the extension itself would get back what it cannot
// be known to understand.
func (n *node) decide(ctx context.Context, req *csi.NodePublishVolumeRequest) (policy.Decision, error) {
	var ext deferred.NodePublishVolumeRequestExtension
	if err := deferred.Get(req, &ext); err != nil {
		return policy.Decision{}, err
	}
	if ext.GetDeferFsOps() {
		return policy.Decision{}, fmt.Errorf("defer_fs_ops is for crustd to set; ask for deferral with the volume parameter %s: %w",
			deferred.ParameterDefer, errdefs.ErrInvalidArgument)
	}
	decision, err := n.policy.Decide(ctx, policy.Request{
		VolumeID:      req.GetVolumeId(),
		TargetPath:    req.GetTargetPath(),
		VolumeContext: req.GetVolumeContext(),
		Capability:    req.GetVolumeCapability(),
	})
	if err != nil {
		return decision, fmt.Errorf("volume %s: %w", req.GetVolumeId(), err)
	}
	return decision, nil
}

// validPublish checks what the driver cannot be left to check, because a record is made before it is asked.
func validPublish(req *csi.NodePublishVolumeRequest) error {
	if req.GetVolumeId() == "" {
		return invalid("volume_id is missing")
	}
	if err := validPath("target_path", req.GetTargetPath()); err != nil {
		return err
	}
	if staging := req.GetStagingTargetPath(); staging != "" {
		if err := validPath("staging_target_path", staging); err != nil {
			return err
		}
		if staging == req.GetTargetPath() {
			return invalid("target_path and staging_target_path are both %s", staging)
		}
	}
	capability := req.GetVolumeCapability()
	if err := validMode(req, capability.GetAccessMode().GetMode()); err != nil {
		return err
	}
	return deferred.ValidateGroup(capability.GetMount().GetVolumeMountGroup(), "")
}

// validMode refuses what would let two kernels write to one filesystem.
func validMode(req *csi.NodePublishVolumeRequest, mode csi.VolumeCapability_AccessMode_Mode) error {
	switch mode {
	case csi.VolumeCapability_AccessMode_UNKNOWN:
		return invalid("volume_capability.access_mode is missing")
	case csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:
		return nil
	case csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:
		if req.GetReadonly() {
			return nil
		}
	}
	return fmt.Errorf("volume %s has access mode %s: a filesystem that a sandbox mounts can have one writer only, use ReadWriteOncePod: %w",
		req.GetVolumeId(), mode, errdefs.ErrFailedPrecondition)
}

// validPath checks a path of a request. The CSI specification wants absolute ones.
func validPath(field, path string) error {
	switch {
	case path == "":
		return invalid("%s is missing", field)
	case !filepath.IsAbs(path):
		return invalid("%s %q is not absolute", field, path)
	case filepath.Clean(path) != strings.TrimSuffix(path, "/"), path == "/":
		return invalid("%s %q is not a clean path", field, path)
	}
	return nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf(format+": %w", append(args, errdefs.ErrInvalidArgument)...)
}

// rotatingKeys are entries of volume_context that the kubelet changes while a pod runs: they do not make a repeated
// request another one. (podInfoOnMount and tokenRequests of the CSIDriver object.)
const rotatingKeys = "csi.storage.k8s.io/serviceAccount.tokens"

// digest stands for a publish request, its secrets and rotating parts left out.
func digest(req *csi.NodePublishVolumeRequest) (string, error) {
	req = proto.CloneOf(req)
	req.Secrets = nil
	delete(req.GetVolumeContext(), rotatingKeys)
	raw, err := proto.MarshalOptions{Deterministic: true}.Marshal(req)
	if err != nil {
		return "", fmt.Errorf("digest of the request: %w", err)
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:]), nil
}

// NodeUnpublishVolume is that of CSI. A target path without a record belongs to a host mount, or to nobody, and the
// driver knows which.
func (n *node) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	if !n.deferrals.Has(req.GetTargetPath()) {
		var resp *csi.NodeUnpublishVolumeResponse
		err := n.deferrals.UnpublishOnHost(ctx, req.GetTargetPath(), func(ctx context.Context) (err error) {
			resp, err = n.provider.Node().NodeUnpublishVolume(ctx, req)
			return rpc.Relay(err)
		})
		return resp, err
	}
	driver, err := n.owner(ctx, req.GetTargetPath(), req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	err = n.deferrals.Unpublish(ctx, req.GetTargetPath(), n.provider.PublishedVolume(driver, req.GetVolumeId(), req.GetTargetPath()))
	if err != nil && !errors.Is(err, errdefs.ErrNotFound) {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}

// owner checks that the deferral at a path is that of the volume that a request names, and returns its driver.
func (n *node) owner(ctx context.Context, path, volumeID string) (string, error) {
	if volumeID == "" {
		return "", invalid("volume_id is missing")
	}
	driver, err := n.provider.Name(ctx)
	if err != nil {
		return "", err
	}
	for _, rec := range n.deferrals.OfVolume(driver, volumeID) {
		if rec.Deferral.TargetPath == path {
			return driver, nil
		}
	}
	return "", fmt.Errorf("volume %s of %s is not published at %s, another volume is: %w", volumeID, driver, path, errdefs.ErrNotFound)
}
