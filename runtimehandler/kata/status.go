package kata

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata/config"
)

// Status looks for the sandbox that has the volume, and for the proof that it does. Which sandbox the daemon has in mind
// does not matter: a pod's sandbox may have been made again, and then the new one counts.
//
// A sandbox of the pod that has not made a container with the volume yet is said to have it, unmounted. Once it has made
// one, the runtime has ProofTimeout for the proof. After that Breach is set; it goes away if the proof comes later.
func (h *Handler) Status(ctx context.Context, targetPath string, _ *runtimehandler.Sandbox) (runtimehandler.Status, error) {
	_, info, err := h.record(targetPath)
	if errdefs.IsNotFound(err) {
		return runtimehandler.Status{}, nil
	}
	if err != nil {
		return runtimehandler.Status{}, err
	}
	found, err := h.locate(ctx, targetPath)
	if err != nil || len(found) == 0 {
		return runtimehandler.Status{}, err
	}
	for _, c := range found {
		ok, err := h.proven(c, info.Device)
		if err != nil {
			return runtimehandler.Status{}, err
		}
		if ok {
			return runtimehandler.Status{Sandbox: &c.sandbox, Mounted: true}, nil
		}
	}
	c := found[0]
	return runtimehandler.Status{Sandbox: &c.sandbox, Breach: h.breach(c, time.Now())}, nil
}

// breach says what is wrong with a sandbox that has not proven in time that it has the volume; nothing if it still has
// time.
func (h *Handler) breach(c candidate, now time.Time) string {
	var since time.Time
	if len(c.mounts) == 0 {
		since = c.marked // its containers are not to be seen; otherwise none may have the volume any more
	}
	for _, u := range c.uses {
		if since.IsZero() || u.Since.Before(since) {
			since = u.Since
		}
	}
	if since.IsZero() || now.Sub(since) < h.config.ProofTimeout {
		return ""
	}
	cause := "see docs/kata.md"
	switch {
	case len(c.uses) > 0 && isSubPathOnly(c.uses):
		cause = "its container mounts a subPath, which Kata does not find: mount the whole volume"
	case c.runtime == config.Go && c.marked.IsZero():
		cause = "the Go runtime has not read the record: set disable_block_device_use=false in its configuration"
	case c.runtime == config.Go:
		cause = "the Go runtime has read the record and not attached the device: see the shim's log"
	case c.runtime == config.Rust:
		cause = "runtime-rs has not attached the device: is rootless=true in its configuration? See the shim's log"
	}
	return fmt.Sprintf("sandbox %s (%s) runs a container with the volume and has not shown within %v that it has the device; "+
		"the container sees a sealed directory of the node and cannot write; %s, and then delete the pod",
		c.sandbox.ID, c.sandbox.Runtime, h.config.ProofTimeout, cause)
}

func isSubPathOnly(uses []use) bool {
	for _, u := range uses {
		if !u.subPath() {
			return false
		}
	}
	return true
}
