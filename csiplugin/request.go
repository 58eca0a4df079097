package csiplugin

import (
	"fmt"
	"maps"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"crust.dev/crust/csiplugin/catalog"
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
	// fsType is empty if the volume is not to be mounted.
	fsType     string
	block      bool
	parameters map[string]string
	capacity   *csi.CapacityRange
	topology   *csi.TopologyRequirement
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
	switch {
	case req.GetVolumeContentSource() != nil:
		return r, invalid("volume_content_source: this driver cannot make a volume from another one or from a snapshot")
	case len(req.GetMutableParameters()) > 0:
		return r, invalid("mutable_parameters: this driver has none")
	case r.topology != nil && len(r.topology.GetRequisite())+len(r.topology.GetPreferred()) == 0:
		return r, invalid("accessibility_requirements has neither requisite nor preferred topologies")
	}
	asked, err := r.parseParameters(req.GetParameters())
	if err != nil {
		return r, err
	}
	return r, r.parseCapabilities(req.GetVolumeCapabilities(), asked)
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
		switch {
		case key == fsTypeParameter:
			fsType = value
		case strings.HasPrefix(key, coPrefix):
		case key == deferred.ParameterDefer:
			if err := checkDefer(value); err != nil {
				return "", err
			}
			r.parameters = map[string]string{key: value}
		default:
			return "", invalid("parameter %.64q is not one of this driver's; it has %s", key, deferred.ParameterDefer)
		}
	}
	return fsType, nil
}

// The values of deferred.ParameterDefer.
const (
	deferAlways = "always"
	deferNever  = "never"
	deferAuto   = "auto"
)

func checkDefer(value string) error {
	if value != deferAlways && value != deferNever && value != deferAuto {
		return invalid("parameter %s is %.64q; want %s, %s or %s", deferred.ParameterDefer, value, deferAlways, deferNever, deferAuto)
	}
	return nil
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
		fsType = defaultFSType
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
	got, given := context[deferred.ParameterDefer]
	if want := v.Parameters[deferred.ParameterDefer]; given && got != want {
		return invalid("volume_context: %s is %.64q, the volume has %q", deferred.ParameterDefer, got, want)
	}
	return nil
}
