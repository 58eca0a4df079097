package containerdshim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"

	events "github.com/containerd/containerd/api/events"
	taskv3 "github.com/containerd/containerd/api/runtime/task/v3"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/containerd/v2/core/runtime"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"github.com/containerd/containerd/v2/pkg/shutdown"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/containerd/typeurl/v2"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"crust.dev/crust/protocol/rpc"
)

// service is containerd's task API for one pod. Calls that change the pod's make-up wait for each other; questions and
// signals do not, so that a container whose start hangs can be killed.
type service struct {
	publisher shim.Publisher
	shutdown  shutdown.Service
	log       *slog.Logger
	namespace string

	change sync.Mutex // held by Create and Delete

	mu         sync.Mutex
	pod        *pod // nil: not booted
	containers map[string]*container
}

// newService returns the service of a process that containerd has started.
func newService(ctx context.Context, publisher shim.Publisher, sd shutdown.Service, log *slog.Logger) (*service, error) {
	ns, err := namespaces.NamespaceRequired(ctx)
	if err != nil {
		return nil, err
	}
	s := &service{publisher: publisher, shutdown: sd, log: log, namespace: ns, containers: map[string]*container{}}
	sd.RegisterCallback(func(context.Context) error {
		if p := s.current(); p != nil {
			return p.stop()
		}
		return nil
	})
	return s, nil
}

// RegisterTTRPC serves the API on a server of the shim framework.
func (s *service) RegisterTTRPC(server *ttrpc.Server) error {
	taskv3.RegisterTTRPCTaskService(server, s)
	return nil
}

func (s *service) current() *pod {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pod
}

func (s *service) container(id string) (*container, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	if c == nil {
		return nil, fmt.Errorf("container %s is not in this sandbox: %w", id, errdefs.ErrNotFound)
	}
	return c, nil
}

// publish tells containerd, which may be away; the framework tries again.
func (s *service) publish(topic string, event any) {
	ctx, cancel := context.WithTimeout(namespaces.WithNamespace(context.Background(), s.namespace), guestTimeout)
	defer cancel()
	if err := s.publisher.Publish(ctx, topic, event); err != nil {
		s.log.Warn("containerd does not take an event", "topic", topic, rpc.LogError, err)
	}
}

// Create boots the machine for the first container of a pod, and gives every other one its root filesystem in it.
func (s *service) Create(ctx context.Context, r *taskv3.CreateTaskRequest) (*taskv3.CreateTaskResponse, error) {
	s.change.Lock()
	defer s.change.Unlock()
	c, err := s.create(ctx, r)
	if err != nil {
		s.log.Warn("container was not created", "container", r.GetID(), rpc.LogError, err)
		return nil, errgrpc.ToGRPC(err)
	}
	s.publish(runtime.TaskCreateEventTopic, &events.TaskCreate{
		ContainerID: c.id, Bundle: c.bundle, Rootfs: r.GetRootfs(), Pid: s.pid(),
		IO: &events.TaskIO{Stdin: r.GetStdin(), Stdout: r.GetStdout(), Stderr: r.GetStderr()},
	})
	return &taskv3.CreateTaskResponse{Pid: s.pid()}, nil
}

func (s *service) create(ctx context.Context, r *taskv3.CreateTaskRequest) (*container, error) {
	if _, err := s.container(r.GetID()); err == nil {
		return nil, fmt.Errorf("container %s exists: %w", r.GetID(), errdefs.ErrAlreadyExists)
	}
	if r.GetCheckpoint() != "" {
		return nil, fmt.Errorf("a microVM cannot be restored from a checkpoint: %w", errdefs.ErrNotImplemented)
	}
	spec, err := readSpec(r.GetBundle())
	if err != nil {
		return nil, err
	}
	if s.current() == nil {
		if err := s.boot(ctx, r, cmp.Or(spec.Annotations[annotationSandbox], r.GetID()), spec.Linux.CgroupsPath); err != nil {
			return nil, err
		}
	}
	c := &container{id: r.GetID(), bundle: r.GetBundle(), spec: spec, pod: s.current(), serial: fmt.Sprintf("root-%.15s", r.GetID()), execs: map[string]*process{}}
	c.sandbox = spec.Annotations[annotationType] == typeSandbox
	var first *process
	if c.sandbox {
		first = newProcess("", stdio{}, nil)
	} else {
		if err := c.create(ctx, r.GetRootfs()); err != nil {
			return nil, err
		}
		first = newProcess("", stdio{r.GetStdin(), r.GetStdout(), r.GetStderr()}, c.request(spec.Process, r.GetStdin() != "", ""))
	}
	c.init = first
	s.mu.Lock()
	s.containers[c.id] = c
	s.mu.Unlock()
	return c, nil
}

// boot boots the machine, and has every container end with it.
func (s *service) boot(ctx context.Context, r *taskv3.CreateTaskRequest, id, cgroup string) error {
	config, err := configOf(r.GetOptions())
	if err != nil {
		return err
	}
	p, err := bootPod(ctx, config, id, cgroup, s.log)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.pod = p
	s.mu.Unlock()
	go func() {
		<-p.ended
		if p.err != nil {
			s.log.Warn("the machine did not end in order", rpc.LogError, p.err)
		}
		s.mu.Lock()
		all := slices.Collect(maps.Values(s.containers))
		s.mu.Unlock()
		for _, c := range all {
			for _, process := range append(c.allExecs(), c.init) {
				process.end(exitLost, func() { s.exited(c, process) })
			}
		}
	}()
	return nil
}

// configOf reads the configuration that the runtime's options in containerd's configuration name.
func configOf(options *anypb.Any) (Config, error) {
	if options.GetTypeUrl() == "" {
		return ReadConfig("")
	}
	v, err := typeurl.UnmarshalAny(options)
	if err != nil {
		return Config{}, fmt.Errorf("options of the runtime: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	o, ok := v.(*runtimeoptions.Options)
	if !ok {
		return Config{}, fmt.Errorf("options of the runtime are a %T; set TypeUrl to runtimeoptions.v1.Options: %w", v, errdefs.ErrInvalidArgument)
	}
	return ReadConfig(o.GetConfigPath())
}

func (s *service) pid() uint32 {
	if p := s.current(); p != nil {
		return uint32(p.VM().PID())
	}
	return 0
}

// exited tells containerd that a process has ended.
func (s *service) exited(c *container, p *process) {
	_, exit, at := p.state()
	s.publish(runtime.TaskExitEventTopic, &events.TaskExit{
		ContainerID: c.id, ID: cmp.Or(p.execID, c.id), Pid: s.pid(), ExitStatus: exit, ExitedAt: timestamppb.New(at),
	})
}

// Start starts a container's first process, or one that Exec has announced.
func (s *service) Start(ctx context.Context, r *taskv3.StartRequest) (*taskv3.StartResponse, error) {
	c, p, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	if p.request == nil {
		p.mu.Lock()
		p.status = task.Status_RUNNING // the machine, which runs
		p.mu.Unlock()
	} else {
		if p.execID != "" {
			p.request.Container.Join = c.init.guest()
		}
		if err := p.start(ctx, c.agent(), func() { s.exited(c, p) }); err != nil {
			return nil, errgrpc.ToGRPC(err)
		}
	}
	if p.execID == "" {
		s.publish(runtime.TaskStartEventTopic, &events.TaskStart{ContainerID: c.id, Pid: s.pid()})
	} else {
		s.publish(runtime.TaskExecStartedEventTopic, &events.TaskExecStarted{ContainerID: c.id, ExecID: p.execID, Pid: s.pid()})
	}
	return &taskv3.StartResponse{Pid: s.pid()}, nil
}

func (s *service) find(id, execID string) (*container, *process, error) {
	c, err := s.container(id)
	if err != nil {
		return nil, nil, err
	}
	p, err := c.process(execID)
	return c, p, err
}

// Kill signals a process. The sandbox container's is the machine, which any signal stops.
func (s *service) Kill(ctx context.Context, r *taskv3.KillRequest) (*emptypb.Empty, error) {
	c, p, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	if c.sandbox {
		c.pod.cancel() // Wait returns when it has ended
		return &emptypb.Empty{}, nil
	}
	if status, _, _ := p.state(); status == task.Status_CREATED && p.execID == "" {
		p.end(128+r.GetSignal(), func() { s.exited(c, p) }) // it was never started
		return &emptypb.Empty{}, nil
	}
	if err := p.signal(ctx, c.agent(), r.GetSignal(), r.GetAll() || r.GetSignal() == uint32(unix.SIGKILL)); err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	return &emptypb.Empty{}, nil
}

// Delete removes a process that has ended, and with a container's first one the container.
func (s *service) Delete(ctx context.Context, r *taskv3.DeleteRequest) (*taskv3.DeleteResponse, error) {
	s.change.Lock()
	defer s.change.Unlock()
	c, p, err := s.find(r.GetID(), r.GetExecID())
	if err != nil {
		return nil, errgrpc.ToGRPC(err)
	}
	status, exit, at := p.state()
	if status == task.Status_RUNNING {
		return nil, errgrpc.ToGRPC(fmt.Errorf("it is running: %w", errdefs.ErrFailedPrecondition))
	}
	if p.execID != "" {
		err = p.forget(ctx, c.agent())
		c.mu.Lock()
		delete(c.execs, p.execID)
		c.mu.Unlock()
	} else {
		err = s.remove(ctx, c)
	}
	if err != nil && !errors.Is(err, errdefs.ErrUnavailable) { // the machine has ended meanwhile
		return nil, errgrpc.ToGRPC(err)
	}
	if p.execID == "" {
		s.publish(runtime.TaskDeleteEventTopic, &events.TaskDelete{ContainerID: c.id, Pid: s.pid(), ExitStatus: exit, ExitedAt: timestamppb.New(at)})
	}
	return &taskv3.DeleteResponse{Pid: s.pid(), ExitStatus: exit, ExitedAt: timestamppb.New(at)}, nil
}

// remove removes a container; the machine ends with the last one, or with the sandbox container.
func (s *service) remove(ctx context.Context, c *container) error {
	if err := c.remove(ctx); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.containers, c.id)
	last := len(s.containers) == 0
	s.mu.Unlock()
	if c.sandbox || last {
		if err := c.pod.stop(); err != nil {
			s.log.Warn("the machine did not end in order", rpc.LogError, err) // it has ended, and crustd has its volumes back
		}
	}
	return nil
}
