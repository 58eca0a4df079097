// Package registration introduces drivers to the kubelet, as the sidecar node-driver-registrar does otherwise: it serves
// the kubelet's plugin registration API on a socket in the kubelet's directory, under which the kubelet finds the CSI
// socket of the daemon.
//
// The socket is made when the driver answers, made again when the kubelet's directory was made anew, and removed at the
// end. A registration that the kubelet refuses is reported and tried again.
package registration

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"crust.dev/crust/crust/internal/watch"
	"crust.dev/crust/protocol/rpc"
)

// DefaultDir is where the kubelet looks for registration sockets.
const DefaultDir = "/var/lib/kubelet/plugins_registry"

// version is what the kubelet wants to hear from a CSI 1.x driver.
const version = "1.0.0"

const (
	// retryDelay is between two questions for the driver's name.
	retryDelay = time.Second
	// refusedDelay is between a refusal and the next attempt; it doubles each time, to maxRefusedDelay.
	refusedDelay    = 2 * time.Second
	maxRefusedDelay = 2 * time.Minute
)

// Config is one registration.
type Config struct {
	// Dir is the kubelet's directory.
	Dir string
	// Endpoint is the path of the CSI socket that the kubelet is to use.
	Endpoint string
	// Name asks the driver for its name.
	Name func(ctx context.Context) (string, error)
	// Answered is told what the kubelet has answered; it may be nil.
	Answered func(accepted bool)
	Log      *slog.Logger
}

// Registration is a driver's registration.
type Registration struct {
	config Config

	mu       sync.Mutex
	accepted bool
	reason   string
}

// New checks a configuration. It does no I/O.
func New(c Config) (*Registration, error) {
	if !filepath.IsAbs(c.Dir) || !filepath.IsAbs(c.Endpoint) || c.Name == nil || c.Log == nil {
		return nil, fmt.Errorf("registration with the kubelet: directory %q and endpoint %q must be absolute: %w", c.Dir, c.Endpoint, errdefs.ErrInvalidArgument)
	}
	return &Registration{config: c, reason: "the kubelet has not asked yet"}, nil
}

// Ready is nil if the kubelet has accepted the driver.
func (r *Registration) Ready() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.accepted {
		return nil
	}
	return fmt.Errorf("registration with the kubelet: %s: %w", r.reason, errdefs.ErrUnavailable)
}

func (r *Registration) set(accepted bool, reason string) {
	r.mu.Lock()
	r.accepted, r.reason = accepted, reason
	r.mu.Unlock()
}

// Run keeps the driver registered until ctx ends.
func (r *Registration) Run(ctx context.Context) error {
	name, err := r.driverName(ctx)
	if err != nil {
		return nil // ctx has ended
	}
	socket := filepath.Join(r.config.Dir, name+"-reg.sock")
	delay := refusedDelay
	for ctx.Err() == nil {
		err := r.serve(ctx, name, socket)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			r.set(false, err.Error())
			r.config.Log.WarnContext(ctx, "not registered with the kubelet", rpc.LogDriver, name, rpc.LogError, err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
		if delay = min(2*delay, maxRefusedDelay); errors.Is(err, errGone) {
			delay = refusedDelay
		}
	}
	return nil
}

// driverName waits until the driver answers.
func (r *Registration) driverName(ctx context.Context) (string, error) {
	for {
		name, err := r.config.Name(ctx)
		if err == nil {
			return name, nil
		}
		r.set(false, fmt.Sprintf("the driver does not answer (%v)", err))
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(retryDelay):
		}
	}
}

var (
	errGone    = errors.New("the registration socket is gone")
	errRefused = errors.New("the kubelet refuses the driver")
)

// serve makes the socket and answers the kubelet until the socket is gone, the kubelet refuses, or ctx ends.
func (r *Registration) serve(ctx context.Context, name, socket string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	l, err := rpc.Listen(ctx, socket)
	if err != nil {
		return err
	}
	server := rpc.NewServer(ctx, r.config.Log)
	registerapi.RegisterRegistrationServer(server, &service{registration: r, name: name, refused: func(reason string) {
		cancel(fmt.Errorf("%w: %s", errRefused, reason))
	}})
	var work sync.WaitGroup
	defer work.Wait()
	work.Go(func() {
		err := watch.Run(ctx, []string{r.config.Dir}, func(string) {
			if _, err := os.Lstat(socket); errors.Is(err, os.ErrNotExist) {
				cancel(errGone)
			}
		})
		if err != nil {
			cancel(err)
		}
	})
	if err := rpc.ServeGRPC(ctx, server, l, time.Second); err != nil {
		return err
	}
	return context.Cause(ctx)
}

// service answers the kubelet.
type service struct {
	registerapi.UnsafeRegistrationServer
	registration *Registration
	name         string
	refused      func(reason string)
}

// GetInfo is what the kubelet asks first.
func (s *service) GetInfo(context.Context, *registerapi.InfoRequest) (*registerapi.PluginInfo, error) {
	return &registerapi.PluginInfo{
		Type:              registerapi.CSIPlugin,
		Name:              s.name,
		Endpoint:          s.registration.config.Endpoint,
		SupportedVersions: []string{version},
	}, nil
}

// NotifyRegistrationStatus is what the kubelet has made of it.
func (s *service) NotifyRegistrationStatus(ctx context.Context, status *registerapi.RegistrationStatus) (*registerapi.RegistrationStatusResponse, error) {
	if answered := s.registration.config.Answered; answered != nil {
		answered(status.GetPluginRegistered())
	}
	if status.GetPluginRegistered() {
		s.registration.set(true, "")
		rpc.Logger(ctx).InfoContext(ctx, "registered with the kubelet", rpc.LogDriver, s.name)
	} else {
		s.registration.set(false, "refused: "+status.GetError())
		s.refused(status.GetError())
	}
	return &registerapi.RegistrationStatusResponse{}, nil
}
