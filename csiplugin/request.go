package csiplugin

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/catalog"
	"crust.dev/crust/csiplugin/handle"
	"crust.dev/crust/protocol/csi/deferred"
)

const (
	// coPrefix is what keys of parameters and of volume_context begin with that the CO adds for its own purposes.
	coPrefix = "csi.storage.k8s.io/"
	// fsTypeParameter is where Kubernetes' provisioner passes the filesystem, besides the capability.
	fsTypeParameter = coPrefix + "fstype"
)

// createRequest is a CreateVolumeRequest that says something sensible.
type createRequest struct {
	name string
	caps []capability
	// fsType is empty if the volume is not to be mounted. defaulted says that nobody asked for this one: a volume that is
	// made from something has that one's.
	fsType     string
	defaulted  bool
	block      bool
	parameters map[string]string
	mutable    map[string]string
	// source is what the volume is made from, or the zero handle; image is that if it is a backing image, or nil.
	source   handle.Handle
	image    *backing.Handle
	capacity *csi.CapacityRange
	topology *csi.TopologyRequirement
}

// parseCreate reads a CreateVolumeRequest. Errors are ErrInvalidArgument and show no secrets.
func parseCreate(req *csi.CreateVolumeRequest) (createRequest, error) {
	r := createRequest{name: req.GetName(), capacity: req.GetCapacityRange(), topology: req.GetAccessibilityRequirements()}
	if err := checkName(r.name); err != nil {
		return r, err
	}
	if _, _, err := parseRange(r.capacity); err != nil {
		return r, err
	}
	if err := checkTopology(r.topology); err != nil {
		return r, err
	}
	var err error
	if r.image, err = parseImage(req.GetVolumeContentSource().GetSnapshot().GetSnapshotId()); err != nil {
		return r, err
	}
	if r.image == nil {
		if r.source, err = parseSource(req.GetVolumeContentSource()); err != nil {
			return r, err
		}
	}
	if err := checkMutable(req.GetMutableParameters()); err != nil {
		return r, err
	}
	r.mutable = req.GetMutableParameters()
	asked, err := r.parseParameters(req.GetParameters())
	if err != nil {
		return r, err
	}
	return r, r.parseCapabilities(req.GetVolumeCapabilities(), asked)
}

// checkTopology checks accessibility_requirements, which may be nil.
func checkTopology(r *csi.TopologyRequirement) error {
	if r != nil && len(r.GetRequisite())+len(r.GetPreferred()) == 0 {
		return invalid("accessibility_requirements has neither requisite nor preferred topologies")
	}
	return nil
}

// parseSource reads a volume_content_source, which may be nil. An id that this driver never gives is ErrNotFound.
func parseSource(source *csi.VolumeContentSource) (handle.Handle, error) {
	switch {
	case source == nil:
		return handle.Handle{}, nil
	case source.GetSnapshot() != nil:
		id, err := handle.ParseSnapshot(source.GetSnapshot().GetSnapshotId())
		return id.Handle, err
	case source.GetVolume() != nil:
		id, err := handle.ParseVolume(source.GetVolume().GetVolumeId())
		return id.Handle, err
	}
	return handle.Handle{}, invalid("volume_content_source has neither a snapshot nor a volume")
}

// contentSource is [parseSource] the other way round.
func contentSource(text string) *csi.VolumeContentSource {
	h, err := handle.Parse(text)
	switch {
	case backing.IsHandle(text):
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: text}}}
	case err != nil:
		return nil
	case h.Kind() == handle.KindSnapshot:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: text}}}
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: text}}}
}

// maxName is the general limit of a string field in bytes (CSI, Size Limits).
const maxName = 128

// checkName checks a suggested name (CSI, CreateVolumeRequest.name).
func checkName(name string) error {
	switch {
	case name == "":
		return invalid("name is missing")
	case len(name) > maxName:
		return invalid("name has %d bytes, %d are allowed", len(name), maxName)
	case strings.ContainsFunc(name, bannedInNames):
		return invalid("name %q has a control character in it", name)
	}
	return nil
}

func bannedInNames(r rune) bool {
	switch {
	case r == '\t', r == '\n', r == '\r':
		return false
	case r < 0x20, r >= 0x7F && r <= 0x9F:
		return true
	}
	return false
}

// parseParameters keeps the parameters that are this driver's own and returns the filesystem that they ask for, or "".
func (r *createRequest) parseParameters(parameters map[string]string) (fsType string, err error) {
	for key, value := range parameters {
		check, ours := ownParameters[key]
		switch {
		case key == fsTypeParameter:
			fsType = value
		case strings.HasPrefix(key, coPrefix):
		case !ours:
			return "", invalid("parameter %.64q is not one of this driver's; it has %s", key, strings.Join(slices.Sorted(maps.Keys(ownParameters)), ", "))
		case !check(value):
			return "", invalid("parameter %s is %.64q, which is none of its values; see docs/csi-driver.md", key, value)
		default:
			if r.parameters == nil {
				r.parameters = map[string]string{}
			}
			r.parameters[key] = value
		}
	}
	return fsType, nil
}

// ParameterGroupChangePolicy is the volume parameter that says when the files of a volume are given to the pod's group:
// "Always" or "OnRootMismatch". It is for the node daemon, which finds it in volume_context.
const ParameterGroupChangePolicy = "crust.dev/fs-group-change-policy"

// The values of deferred.ParameterDefer.
const (
	deferAlways = "always"
	deferNever  = "never"
	deferAuto   = "auto"
)

var handlerName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)

// ownParameters are this driver's parameters, and what tells their values. All are passed on in volume_context.
var ownParameters = map[string]func(value string) bool{
	deferred.ParameterDefer:    func(v string) bool { return v == deferAlways || v == deferNever || v == deferAuto },
	deferred.ParameterHandler:  handlerName.MatchString,
	ParameterGroupChangePolicy: func(v string) bool { return deferred.ValidateGroup("0", v) == nil && v != "" },
}

// parseCapabilities reads what the volume has to be capable of, and settles on its filesystem.
func (r *createRequest) parseCapabilities(caps []*csi.VolumeCapability, fsType string) error {
	if len(caps) == 0 {
		return invalid("volume_capabilities is missing")
	}
	mounted := false
	for i, c := range caps {
		parsed, err := parseCapability(c)
		if err == nil {
			if unsupported := parsed.supported(); unsupported != nil {
				err = invalid("%v", unsupported)
			}
		}
		if err != nil {
			return fmt.Errorf("volume_capabilities[%d]: %w", i, err)
		}
		r.caps = append(r.caps, parsed)
		r.block = r.block || parsed.use.Block
		mounted = mounted || !parsed.use.Block
		if fs := parsed.use.FSType; fs != "" {
			if fsType != "" && fsType != fs {
				return invalid("volume_capabilities[%d]: filesystem %.32q contradicts %.32q", i, fs, fsType)
			}
			fsType = fs
		}
	}
	if !mounted {
		return nil
	}
	if fsType == "" {
		fsType, r.defaulted = defaultFSType, true
	}
	if minimum[fsType] == 0 {
		return invalid("filesystem %.32q: want one of %s", fsType, fsTypes())
	}
	r.fsType = fsType
	return nil
}

// volumeContext is what a volume's publishes are told about it.
func volumeContext(v catalog.Volume) map[string]string { return maps.Clone(v.Parameters) }

// checkContext holds a volume_context, which is optional, against the volume. Only the keys that this driver puts there
// count; the CO adds its own.
func checkContext(v catalog.Volume, context map[string]string) error {
	for key := range ownParameters {
		if got, given := context[key]; given && got != v.Parameters[key] {
			return invalid("volume_context: %s is %.64q, the volume has %q", key, got, v.Parameters[key])
		}
	}
	return nil
}
