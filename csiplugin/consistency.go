package csiplugin

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"crust.dev/crust/csiplugin/catalog"
	runtimev1 "crust.dev/crust/protocol/crust/runtime/v1"
	"crust.dev/crust/protocol/rpc"
)

// ParameterConsistency is the snapshot parameter that says what a snapshot of a volume in use is worth: "crash", what would
// be left after a power failure, or "filesystem", where the sandbox has written back and frozen its filesystem while the
// snapshot was cut. Without it a snapshot is "crash". What cannot be had is refused and never replaced by less.
const ParameterConsistency = "crust.dev/snapshot-consistency"

// The values of ParameterConsistency.
const (
	consistencyCrash      = "crash"
	consistencyFilesystem = "filesystem"
)

const (
	// freezeLimit is after how long a frozen filesystem thaws by itself, whoever has died. It is the longest that crustd
	// allows: cutting waits for nobody, but a fragmented volume takes its time.
	freezeLimit = 60 * time.Second
	// freezeTimeout is how long freezing, and thawing, may take.
	freezeTimeout = 30 * time.Second
)

// consistency asks the node daemon to freeze filesystems in sandboxes.
type consistency struct {
	driver string
	// conn and client are nil without a daemon.
	conn   *grpc.ClientConn
	client runtimev1.ConsistencyClient
}

// newConsistency does no I/O. An empty endpoint is no daemon.
func newConsistency(endpoint, driver string) (*consistency, error) {
	c := &consistency{driver: driver}
	if endpoint == "" {
		return c, nil
	}
	socket, err := rpc.ParseEndpoint(endpoint)
	if err != nil {
		return nil, fmt.Errorf("crustd: %w", err)
	}
	if c.conn, err = rpc.Dial(socket); err != nil {
		return nil, fmt.Errorf("crustd: %w", err)
	}
	c.client = runtimev1.NewConsistencyClient(c.conn)
	return c, nil
}

func (c *consistency) close() error {
	if c.conn == nil {
		return nil
	}
	return c.conn.Close()
}

// freeze freezes the filesystems of volumes that are published to sandboxes, all or none. Each thaws by itself after
// freezeLimit. thaw must be called; if it is an error, what was cut meanwhile is not what was wanted.
func (c *consistency) freeze(ctx context.Context, ids []string) (thaw func(context.Context) error, err error) {
	if len(ids) == 0 {
		return func(context.Context) error { return nil }, nil
	}
	if c.client == nil {
		return nil, precondition("the filesystems of volumes %v are in sandboxes, and this plugin was started without --crustd-endpoint: nobody can freeze them", ids)
	}
	ctx, cancel := context.WithTimeout(ctx, freezeTimeout)
	defer cancel()
	resp, err := c.client.FreezeVolumes(ctx, &runtimev1.FreezeVolumesRequest{Driver: c.driver, VolumeIds: ids, TimeLimit: durationpb.New(freezeLimit)})
	if err != nil {
		return nil, fmt.Errorf("freeze the filesystems of volumes %v: %w", ids, rpc.FromWire(err))
	}
	return func(ctx context.Context) error { return c.thaw(ctx, resp.GetFrozen()) }, nil
}

func (c *consistency) thaw(ctx context.Context, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), freezeTimeout)
	defer cancel()
	_, err := c.client.ThawVolumes(ctx, &runtimev1.ThawVolumesRequest{Driver: c.driver, VolumeIds: ids})
	err = rpc.FromWire(err)
	if errors.Is(err, errdefs.ErrFailedPrecondition) {
		return fmt.Errorf("a filesystem thawed before the snapshot was cut (%v), so it is not consistent; try again: %w", err, errdefs.ErrUnavailable)
	}
	if err != nil {
		return fmt.Errorf("thaw the filesystems of volumes %v: %w", ids, err)
	}
	return nil
}

// release thaws what a process that died may have left frozen, if anything. It would thaw by itself, too, but later.
func (c *consistency) release(ctx context.Context, ids []string) {
	if c.client == nil {
		return
	}
	if err := c.thaw(ctx, ids); err != nil {
		rpc.Logger(ctx).DebugContext(ctx, "nothing was left frozen", rpc.LogError, err)
	}
}

// writers are, of volumes that are held, the ids of those that a sandbox may be writing to. Others that somebody may be
// writing to cannot be brought to rest; restless says, for each, why.
func (s *store) writers(ctx context.Context, held []catalog.Volume) (sandboxed, restless []string, err error) {
	for _, v := range held {
		n, err := s.catalog.Node(v.ID)
		if err != nil {
			return nil, nil, err
		}
		kind, writing := s.writer(n)
		switch {
		case writing && kind == catalog.Deferred:
			sandboxed = append(sandboxed, v.ID.String())
		case writing:
			restless = append(restless, fmt.Sprintf("volume %s is published on the host, where nobody freezes it; publish it to a sandbox, or unpublish it", v.ID))
		case len(s.liveTargets(n)) == 0:
			err := s.engine.Idle(ctx, object(v.ID))
			if errors.Is(err, errdefs.ErrFailedPrecondition) {
				restless = append(restless, fmt.Sprintf("volume %s is not published, and yet %v", v.ID, err))
			} else if err != nil {
				return nil, nil, err
			}
		}
	}
	return sandboxed, restless, nil
}

// writer returns how a volume is published for writing, if it is. All publishes of a volume for writing are of one kind.
func (s *store) writer(n catalog.Node) (catalog.Kind, bool) {
	for _, p := range n.Publishes {
		if p.Boot == s.boot && !p.ReadOnly {
			return p.Kind, true
		}
	}
	return "", false
}
