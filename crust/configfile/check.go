package configfile

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"

	"crust.dev/crust/protocol/rpc"
)

// check looks at the values one by one. What one value means for another is checked where all are known, after flags.
func (f *File) check(d *decoder) {
	fail := func(path, format string, args ...any) { d.errs = append(d.errs, f.Errorf(path, format, args...)) }
	oneOf := func(path, value string, want ...string) {
		if f.Has(path) && !slices.Contains(want, value) {
			fail(path, "%s: %q: want %s", path, value, list(want))
		}
	}
	endpoint := func(path, value string) {
		if !f.Has(path) {
			return
		}
		if _, err := rpc.ParseEndpoint(value); err != nil {
			fail(path, "%s: %v", path, err)
		}
	}
	absolute := func(path, value string) {
		if f.Has(path) && (!filepath.IsAbs(value) || filepath.Clean(value) != value) {
			fail(path, "%s: %q: want an absolute path", path, value)
		}
	}
	oneOf("apiVersion", f.APIVersion, APIVersion)
	oneOf("kind", f.Kind, Kind)
	for i, driver := range f.Drivers {
		path := fmt.Sprintf("drivers[%d]", i)
		for _, e := range []struct{ key, value string }{{".endpoint", driver.Endpoint}, {".upstream", driver.Upstream}} {
			if !f.Has(path + e.key) {
				fail(path, "%s has no %s", path, e.key[1:])
			}
			endpoint(path+e.key, e.value)
		}
	}
	endpoint("runtimeEndpoint", f.RuntimeEndpoint)
	endpoint("kepEndpoint", f.KEPEndpoint)
	if f.AdminEndpoint != nil && *f.AdminEndpoint != "" {
		endpoint("adminEndpoint", *f.AdminEndpoint)
	}
	if _, _, err := net.SplitHostPort(f.HTTP.Address); f.HTTP.Address != "" && err != nil {
		fail("http.address", "http.address: %v; want HOST:PORT", err)
	}
	absolute("registrationDir", f.RegistrationDir)
	absolute("stateDir", f.StateDir)
	for i, root := range f.DeviceRoots {
		absolute(fmt.Sprintf("deviceRoots[%d]", i), root)
	}
	oneOf("policy.default", f.Policy.Default, "never", "auto")
	if f.Kubernetes != nil {
		absolute("kubernetes.kubeconfig", f.Kubernetes.Kubeconfig)
	}
	oneOf("log.level", f.Log.Level, "debug", "info", "warn", "error")
	oneOf("log.format", f.Log.Format, "text", "json")
}

func list(words []string) string {
	text := words[0]
	for i, w := range words[1:] {
		if i == len(words)-2 {
			text += " or " + w
		} else {
			text += ", " + w
		}
	}
	return text
}
