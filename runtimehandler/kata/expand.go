package kata

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/runtimehandler/kata/config"
)

// resizeRequest is the body of POST /direct-volume/resize in the words of both runtimes: the Go runtime knows a volume by
// its device on the host, runtime-rs by its path in the guest.
type resizeRequest struct {
	VolumePath string `json:"VolumePath"`
	SizeGo     int64  `json:"Size"`
	GuestPath  string `json:"volume_guest_path"`
	SizeRust   int64  `json:"size"`
}

// Expand asks the sandbox to grow the volume, which no Kata up to 4.1 can do. It is then ErrFailedPrecondition with the plan:
// the device has grown already, and the filesystem is grown on the host when the volume is published next. If a later Kata
// does it, its answer is believed only when the filesystem has become larger.
func (h *Handler) Expand(ctx context.Context, targetPath string, sandbox runtimehandler.Sandbox, requiredBytes int64) (int64, error) {
	_, info, err := h.record(targetPath)
	if err != nil {
		return 0, err
	}
	device, err := assist.Size(info.Device)
	if err != nil {
		return 0, fmt.Errorf("expand: %w", err)
	}
	if device < requiredBytes {
		return 0, fmt.Errorf("device %s has %d bytes, %d are required: grow the device first: %w", info.Device, device, requiredBytes, errdefs.ErrFailedPrecondition)
	}
	// It was grown before it was handed over, and this is the repetition of a request that has been met.
	if found, err := assist.Look(info.Device); err == nil && found.Bytes > 0 && !found.Smaller(device) {
		return device, nil
	}
	body, err := json.Marshal(resizeRequest{VolumePath: info.Device, SizeGo: device, GuestPath: h.guestPath(ctx, targetPath, sandbox), SizeRust: device})
	if err != nil {
		return 0, fmt.Errorf("expand: %w", err)
	}
	a, err := h.ask(ctx, sandbox, http.MethodPost, "/direct-volume/resize", body)
	var silent *unansweredError
	switch {
	case errors.As(err, &silent):
		return 0, h.later(info.Device, device, silent.Error())
	case err != nil:
		return 0, fmt.Errorf("expand: %w", err)
	case a.code != http.StatusOK:
		return 0, h.later(info.Device, device, a.text())
	}
	stats, err := h.Stats(ctx, targetPath, sandbox)
	if err != nil {
		return 0, fmt.Errorf("expand: the sandbox says that it is done, and it cannot be seen whether it is: %w", err)
	}
	if !spans(stats.Bytes.Total, device) {
		return 0, h.later(info.Device, device, fmt.Sprintf("the sandbox says that it is done, and its filesystem has %d bytes", stats.Bytes.Total))
	}
	return device, nil
}

// later is the refusal of an expansion that is finished when the volume is published next.
func (h *Handler) later(device string, size int64, cause string) error {
	plan := "it is grown when the volume is published next: delete the pod and let it be made again"
	if !h.may(assist.Grow) {
		plan = fmt.Sprintf("crustd may grow it when the volume is published next if you add %q to hostAssist of handler %s in its configuration; then delete the pod and let it be made again", assist.Grow, h.config.Name)
	}
	return fmt.Errorf("the sandbox cannot grow a mounted filesystem (%s); device %s has %d bytes by now, its filesystem has not; %s: %w", cause, device, size, plan, errdefs.ErrFailedPrecondition)
}

// spans says whether a filesystem of total bytes, as statfs(2) has it, may fill a device: its own structures take a part,
// of ext4 up to about a tenth.
func spans(total, device int64) bool { return total >= device-device/8 }

// guestPath is where runtime-rs has mounted a volume in the guest, as far as that can be told; empty otherwise, and for the
// Go runtime, which finds it by itself.
func (h *Handler) guestPath(ctx context.Context, targetPath string, sandbox runtimehandler.Sandbox) string {
	if runtimeOf(sandbox) == config.Go {
		return ""
	}
	found, err := h.locate(ctx, targetPath)
	if err != nil {
		return ""
	}
	for _, c := range found {
		for _, base := range c.bases() {
			traces, err := h.passthrough(c.sandbox.ID, base)
			if err == nil && len(traces) > 0 && c.sandbox == sandbox && len(h.directSources(c, base)) == 1 {
				return filepath.Join(rustStorage, traces[0].name)
			}
		}
	}
	return ""
}
