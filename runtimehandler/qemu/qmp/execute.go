package qmp

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// request is a command on its way to QEMU.
type request struct {
	Execute   string `json:"execute"`
	Arguments any    `json:"arguments,omitempty"`
	ID        uint64 `json:"id"`
}

// Execute runs a command and decodes its result, unless that is nil. A refusal is an [*Error]. When ctx ends first the
// error is ErrUnavailable, and QEMU may or may not run the command. ctx must have a deadline.
func (c *Client) Execute(ctx context.Context, command string, arguments, result any) error {
	return c.execute(ctx, command, arguments, result, nil)
}

// ExecuteWithFile is Execute for a command that takes a file descriptor. The file stays the caller's.
func (c *Client) ExecuteWithFile(ctx context.Context, command string, arguments, result any, file *os.File) error {
	return c.execute(ctx, command, arguments, result, file)
}

func (c *Client) execute(ctx context.Context, command string, arguments, result any, file *os.File) error {
	if _, ok := ctx.Deadline(); !ok {
		return fmt.Errorf("qmp %s without a deadline: %w", command, errdefs.ErrInternal)
	}
	id, answered := c.register()
	defer c.forget(id)
	if err := c.send(ctx, request{Execute: command, Arguments: arguments, ID: id}, file); err != nil {
		return fmt.Errorf("qmp %s: %w", command, err)
	}
	var m message
	select {
	case m = <-answered:
	case <-ctx.Done():
		return fmt.Errorf("qmp %s: QEMU does not answer: %w: %w", command, context.Cause(ctx), errdefs.ErrUnavailable)
	case <-c.done:
		select {
		case m = <-answered: // it was the last thing that came
		default:
			return fmt.Errorf("qmp %s: %w", command, c.err)
		}
	}
	if m.Error != nil {
		return &Error{Command: command, Class: m.Error.Class, Desc: m.Error.Desc}
	}
	if result == nil {
		return nil
	}
	if err := json.Unmarshal(m.Return, result); err != nil {
		return fmt.Errorf("qmp %s: result: %w", command, err)
	}
	return nil
}

func (c *Client) register() (uint64, <-chan message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last++
	ch := make(chan message, 1)
	c.pending[c.last] = ch
	return c.last, ch
}

func (c *Client) forget(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.pending, id)
}

// send writes a request. One that could be written in part only breaks the connection, because the next one would be
// read as its continuation.
func (c *Client) send(ctx context.Context, r request, file *os.File) error {
	raw, err := json.Marshal(r)
	if err != nil {
		return err
	}
	raw = append(raw, '\n')
	var rights []byte
	if file != nil {
		rights = unix.UnixRights(int(file.Fd()))
	}
	c.writing.Lock()
	defer c.writing.Unlock()
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", context.Cause(ctx), errdefs.ErrUnavailable)
	}
	deadline, _ := ctx.Deadline()
	if most := time.Now().Add(writeTimeout); most.Before(deadline) {
		deadline = most
	}
	if err := c.conn.SetWriteDeadline(deadline); err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	n, _, err := c.conn.WriteMsgUnix(raw, rights, nil)
	if err == nil && n < len(raw) {
		_, err = c.conn.Write(raw[n:])
	}
	if err != nil {
		if n > 0 {
			_ = c.conn.Close()
		}
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	return nil
}
