package convert

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/csiplugin/command"
)

// Config is how to convert. The zero value of a field is its default.
type Config struct {
	// Dir is an existing directory. Within the child something else is mounted over it. It has no default.
	Dir string
	// UID is the user id, and the group id, of the child. Default 65534, nobody.
	UID int
	// MaxTime is how long one conversion may take. Default 6 hours.
	MaxTime time.Duration
	// Memory is how many bytes of address space the child may have. QEMU has up to 64 threads, and an image with large tables
	// takes more; it dies of what is missing. Default 4 GiB.
	Memory int64
}

// Converter converts images. Its methods may be called from any goroutine.
type Converter struct{ cfg Config }

// New returns a converter. It does no I/O.
func New(cfg Config) *Converter {
	if cfg.UID == 0 {
		cfg.UID = 65534
	}
	if cfg.MaxTime == 0 {
		cfg.MaxTime = 6 * time.Hour
	}
	if cfg.Memory == 0 {
		cfg.Memory = 4 << 30
	}
	return &Converter{cfg}
}

// Ready is ErrFailedPrecondition if there is no qemu-img.
func (c *Converter) Ready() error {
	_, err := tool()
	return err
}

func tool() (string, error) {
	path, err := exec.LookPath("qemu-img")
	if err != nil {
		return "", fmt.Errorf("qemu-img is not installed where this plugin runs; install it (Debian: qemu-utils, Fedora: qemu-img): %w", errdefs.ErrFailedPrecondition)
	}
	return path, nil
}

// Image is a file and its format.
type Image struct {
	Path   string
	Format backing.Format
}

// Job is one conversion.
type Job struct {
	// From is read. It becomes the child's own for as long as the job lasts, and is made read-only.
	From Image
	// To is made, and must not be there. It is whole and durable when Convert has succeeded, and gone when it has not.
	To Image
	// VirtualSize in bytes is what the guest sees of both.
	VirtualSize int64
	// Space returns how many more bytes may be written. It is asked now and then; nil if there is no limit.
	Space func(context.Context) (int64, error)
	// Progress is told how many bytes of the guest's have been converted. It must not block.
	Progress func(done int64)
}

// watchEvery is how often the space that is left is looked at.
const watchEvery = time.Second

// overhead is how much larger a qcow2 image can be than what is in it: its tables, and a constant.
func overhead(size int64) int64 { return size/512 + 64<<20 }

// Convert does a job. Errors: ErrFailedPrecondition if there is no qemu-img or if it fails, with its words, or takes too long;
// ErrResourceExhausted if there is no space.
func (c *Converter) Convert(ctx context.Context, j Job) (err error) {
	in, out, err := c.open(j)
	if err != nil {
		return fmt.Errorf("convert %s: %w", j.From.Path, err)
	}
	defer func() {
		err = errors.Join(err, in.Close(), out.Close())
		if err != nil {
			err = fmt.Errorf("convert %s from %s to %s: %w", j.From.Path, j.From.Format, j.To.Format, errors.Join(err, os.Remove(j.To.Path)))
		}
	}()
	argv := []string{"qemu-img", "convert", "-p", "-f", string(j.From.Format), "-O", string(j.To.Format)}
	limit := j.VirtualSize
	if j.To.Format == backing.Raw {
		// The file is there with its size, and has no data: what is zero stays a hole.
		argv = append(argv, "-n", "--target-is-zero")
	} else {
		limit += overhead(j.VirtualSize)
	}
	argv = append(argv, inPath, outPath)
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.MaxTime, fmt.Errorf("it took longer than %v: %w", c.cfg.MaxTime, errdefs.ErrFailedPrecondition))
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go watch(ctx, j.Space, stop)
	if err := c.run(ctx, order{Argv: argv, FileSize: limit, Binds: []bind{{j.From.Path, inPath, false}, {j.To.Path, outPath, true}}}, j.report); err != nil {
		return j.blame(err)
	}
	return errors.Join(out.Chown(0, 0), out.Sync())
}

// open opens both files and gives them to the child.
func (c *Converter) open(j Job) (in, out *os.File, err error) {
	if in, err = os.OpenFile(j.From.Path, os.O_RDONLY|unix.O_NOFOLLOW, 0); err != nil {
		return nil, nil, err
	}
	if err := errors.Join(in.Chmod(0o400), in.Chown(c.cfg.UID, c.cfg.UID)); err != nil {
		return nil, nil, errors.Join(err, in.Close())
	}
	if out, err = os.OpenFile(j.To.Path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600); err != nil {
		return nil, nil, errors.Join(err, in.Close())
	}
	if j.To.Format == backing.Raw {
		err = out.Truncate(j.VirtualSize)
	}
	if err := errors.Join(err, out.Chown(c.cfg.UID, c.cfg.UID)); err != nil {
		return nil, nil, errors.Join(err, in.Close(), out.Close(), os.Remove(j.To.Path))
	}
	return in, out, nil
}

// blame makes an error of a child that cannot say so itself ErrResourceExhausted, if there is no space.
func (j Job) blame(err error) error {
	if j.Space == nil || errors.Is(err, errdefs.ErrResourceExhausted) {
		return err
	}
	if n, spaceErr := j.Space(context.Background()); spaceErr == nil && n <= 0 {
		return fmt.Errorf("there is no space left for it: %v: %w", err, errdefs.ErrResourceExhausted)
	}
	return err
}

func watch(ctx context.Context, space func(context.Context) (int64, error), stop context.CancelCauseFunc) {
	if space == nil {
		return
	}
	for tick := time.NewTicker(watchEvery); ; {
		n, err := space(ctx)
		if err == nil && n <= 0 {
			err = fmt.Errorf("there is no space left for it: %w", errdefs.ErrResourceExhausted)
		}
		if err != nil {
			stop(err)
			return
		}
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
	}
}

// report reads "    (12.34/100%)" and carriage returns.
func (j Job) report(stdout io.Reader) {
	lines := bufio.NewScanner(stdout)
	lines.Split(func(data []byte, atEOF bool) (int, []byte, error) {
		if i := bytes.IndexByte(data, '%'); i >= 0 {
			return i + 1, data[:i], nil
		}
		return 0, nil, nil
	})
	for lines.Scan() {
		text := strings.TrimSuffix(strings.TrimLeft(lines.Text(), "\r\n ()"), "/100")
		if percent, err := strconv.ParseFloat(text, 64); err == nil && j.Progress != nil {
			j.Progress(int64(percent / 100 * float64(j.VirtualSize)))
		}
	}
	_, _ = io.Copy(io.Discard, stdout)
}

// waitDelay is how long a killed child may keep its pipes open.
const waitDelay = 5 * time.Second

// run runs a command in the child. report reads what it prints.
func (c *Converter) run(ctx context.Context, o order, report func(io.Reader)) error {
	path, err := tool()
	if err != nil {
		return err
	}
	return c.start(ctx, o, path, report)
}

func (c *Converter) start(ctx context.Context, o order, path string, report func(io.Reader)) error {
	prlimit, err := exec.LookPath("prlimit")
	if err != nil {
		return fmt.Errorf("prlimit is not installed where this plugin runs; install util-linux: %w", errdefs.ErrFailedPrecondition)
	}
	o.Tools, o.Dir, o.UID, o.Memory, o.CPU = [2]string{prlimit, path}, c.cfg.Dir, c.cfg.UID, c.cfg.Memory, int64(c.cfg.MaxTime/time.Second)+1
	text, err := json.Marshal(o)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", commandName)
	cmd.Args[0] = "crust-convert"
	cmd.Env = []string{"LC_ALL=C", "PATH=/usr/bin", orderVariable + "=" + string(text)}
	cmd.Dir = "/"
	var stderr bytes.Buffer
	cmd.Stderr = &limited{w: &stderr, left: 4096}
	stdout, write, err := os.Pipe()
	if err != nil {
		return err
	}
	defer stdout.Close()
	cmd.Stdout = write
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS,
		Setsid:     true, Pdeathsig: syscall.SIGKILL,
	}
	cmd.WaitDelay = waitDelay
	if err := errors.Join(cmd.Start(), write.Close()); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("start the child that converts: %w", err)
	}
	reported := make(chan struct{})
	go func() { defer close(reported); report(stdout) }()
	err = cmd.Wait()
	<-reported
	if err == nil {
		return nil
	}
	failed := &command.Error{Argv: o.Argv, ExitCode: cmd.ProcessState.ExitCode(), Stderr: strings.ToValidUTF8(strings.TrimSpace(stderr.String()), "?")}
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %v", context.Cause(ctx), failed)
	}
	return fmt.Errorf("%v: %v: %w", failed, err, errdefs.ErrFailedPrecondition)
}

// limited passes on as much as is left, and takes the rest.
type limited struct {
	w    io.Writer
	left int
}

func (l *limited) Write(p []byte) (int, error) {
	keep := min(len(p), l.left)
	l.left -= keep
	_, err := l.w.Write(p[:keep])
	return len(p), err
}
