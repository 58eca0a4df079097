package kata

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"crust.dev/crust/runtimehandler/kata/config"
)

// Options are the habits of a sandbox. The zero value is one of the Go runtime as Kata 4.1 has it, with block devices.
type Options struct {
	Runtime config.Runtime // Go if empty
	Pod     string         // the pod's uid

	DisableBlockDevices bool // disable_block_device_use of the Go runtime
	Rootless            bool // runtime-rs looks for records elsewhere
	OldAgent            bool // before 3.32: no filesystems in the metrics; before 4.0: no resize
	Policy              bool // a confidential guest's policy denies statistics and metrics
	CanResize           bool // as a later Kata may
	NoBundle            bool // the container runtime's bundles are not to be seen
	AttachFails         bool // the runtime reads the record and does not attach the device
	Guest               Guest
	// Hold has a process hold each device open, as a VMM does.
	Hold bool
}

// Sandbox is one sandbox with its shim.
type Sandbox struct {
	Options
	ID   string
	node *Node
	stop func() // its management socket

	mu         sync.Mutex
	up, hung   bool
	containers []container
	volumes    []attached
	holders    []*exec.Cmd
}

// attached is a volume in the guest.
type attached struct {
	Volume
	id     string // of the block device
	source string // of the mount
}

// Start starts a sandbox. The socket of runtime-rs is there before its guest is up, and nothing is said of the guest until
// [Sandbox.Boot]; the Go runtime's is there after.
func (n *Node) Start(id string, o Options) *Sandbox {
	n.t.Helper()
	if o.Runtime == "" {
		o.Runtime = config.Go
	}
	if o.Guest == nil {
		o.Guest = &Memory{}
	}
	s := &Sandbox{Options: o, ID: id, node: n}
	n.mu.Lock()
	n.sandboxes[id] = s
	n.mu.Unlock()
	if err := os.MkdirAll(s.dir(), 0o700); err != nil {
		n.t.Fatal(err)
	}
	if o.Runtime == config.Rust {
		s.listen()
	}
	return s
}

// Boot brings the guest up.
func (s *Sandbox) Boot() *Sandbox {
	s.node.t.Helper()
	s.mu.Lock()
	s.up = true
	s.mu.Unlock()
	if s.Runtime == config.Go {
		s.listen()
	}
	return s
}

func (s *Sandbox) dir() string {
	if s.Runtime == config.Rust {
		return s.node.Path("run/kata", s.ID)
	}
	return s.node.Path("run/vc/sbs", s.ID)
}

// Socket is its management socket.
func (s *Sandbox) Socket() string { return filepath.Join(s.dir(), "shim-monitor.sock") }

func (s *Sandbox) listen() {
	s.node.t.Helper()
	l, err := net.Listen("unix", s.Socket())
	if err != nil {
		s.node.t.Fatal(err)
	}
	// A shim that is killed leaves its socket.
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	serve := s.serveGo
	if s.Runtime == config.Rust {
		serve = s.serveRust
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		serve(l)
	}()
	s.stop = sync.OnceFunc(func() {
		s.Hang(false)
		_ = l.Close()
		<-done
	})
}

// Hang has the shim accept connections and not answer.
func (s *Sandbox) Hang(hung bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hung = hung
}

// wait holds an answer back while the shim hangs.
func (s *Sandbox) wait() {
	for {
		s.mu.Lock()
		hung := s.hung
		s.mu.Unlock()
		if !hung {
			return
		}
		time.Sleep(time.Millisecond)
	}
}

// Kill ends the shim and its VMM without any order: all files stay.
func (s *Sandbox) Kill() {
	if s.stop != nil {
		s.stop()
	}
	s.mu.Lock()
	holders := s.holders
	s.holders = nil
	s.mu.Unlock()
	for _, h := range holders {
		_ = h.Process.Kill()
		_ = h.Wait()
	}
	s.Guest.Stop()
	s.node.mu.Lock()
	delete(s.node.sandboxes, s.ID)
	s.node.mu.Unlock()
}

// Stop ends the sandbox in good order. The mark beside a record stays, as it does with the Go runtime.
func (s *Sandbox) Stop() {
	s.Kill()
	s.unshare()
	for _, dir := range []string{s.dir(), s.node.Path("run/kata-containers/shared/sandboxes", s.ID)} {
		if err := os.RemoveAll(dir); err != nil {
			s.node.t.Error(err)
		}
	}
	for _, c := range s.containers {
		if err := os.RemoveAll(filepath.Dir(c.bundle)); err != nil {
			s.node.t.Error(err)
		}
	}
}

// hold has a process keep a device open.
func (s *Sandbox) hold(device string) error {
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	cmd := exec.Command("sleep", "infinity")
	cmd.ExtraFiles = []*os.File{f}
	if err := cmd.Start(); err != nil {
		return err
	}
	s.holders = append(s.holders, cmd)
	return nil
}
