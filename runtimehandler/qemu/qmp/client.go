package qmp

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/containerd/errdefs"
)

// maxMessage is the longest message that is read, in bytes. The longest regular ones are lists of block nodes.
const maxMessage = 4 << 20

// writeTimeout is how long a command may take to leave this process if the caller has more time than that.
const writeTimeout = 10 * time.Second

// Error is a command's refusal by QEMU.
type Error struct {
	Command string
	Class   string // such as GenericError or DeviceNotFound
	Desc    string
}

func (e *Error) Error() string { return fmt.Sprintf("qmp %s: %s (%s)", e.Command, e.Desc, e.Class) }

// Event is something that QEMU says unasked.
type Event struct {
	Name string          `json:"event"`
	Data json.RawMessage `json:"data"`
}

// Field returns a member of the event's data that is a string, or nothing.
func (e Event) Field(name string) string {
	var data map[string]any
	if json.Unmarshal(e.Data, &data) != nil {
		return ""
	}
	s, _ := data[name].(string)
	return s
}

// message is anything that QEMU sends.
type message struct {
	Event
	Greeting json.RawMessage `json:"QMP"`
	Return   json.RawMessage `json:"return"`
	Error    *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	ID uint64 `json:"id"`
}

// Client is the client's end of a connection.
type Client struct {
	conn    *net.UnixConn
	onEvent func(Event)
	done    chan struct{} // closed when the connection has broken
	greeted chan struct{} // closed when QEMU has said that it is there

	writing sync.Mutex // held while a command is sent

	mu      sync.Mutex
	last    uint64
	pending map[uint64]chan message
	waiters map[*waiter]bool
	err     error // why the connection has broken; set before done is closed
}

// waiter waits for one event.
type waiter struct {
	match func(Event) bool
	got   chan Event
}

// New returns a client over a connection, which it owns, and starts to read. onEvent may be nil; it gets every event and
// must not block.
func New(conn *net.UnixConn, onEvent func(Event)) *Client {
	c := &Client{
		conn:    conn,
		onEvent: onEvent,
		done:    make(chan struct{}),
		greeted: make(chan struct{}),
		pending: map[uint64]chan message{},
		waiters: map[*waiter]bool{},
	}
	go c.read()
	return c
}

// Close breaks the connection and waits until nothing reads from it any more.
func (c *Client) Close() error {
	err := c.conn.Close()
	<-c.done
	return err
}

// Negotiate waits for QEMU and makes it take commands. It must succeed once before the first Execute.
func (c *Client) Negotiate(ctx context.Context) error {
	select {
	case <-c.greeted:
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return fmt.Errorf("qmp: QEMU does not greet: %w: %w", context.Cause(ctx), errdefs.ErrUnavailable)
	}
	return c.Execute(ctx, "qmp_capabilities", nil, nil)
}

// read hands out messages until the connection breaks.
func (c *Client) read() {
	lines := bufio.NewScanner(c.conn)
	lines.Buffer(make([]byte, 0, 16<<10), maxMessage)
	var err error
	greeted := false
	for err == nil && lines.Scan() {
		var m message
		if err = json.Unmarshal(lines.Bytes(), &m); err != nil {
			break
		}
		switch {
		case m.Greeting != nil && !greeted:
			greeted = true
			close(c.greeted)
		case m.Name != "":
			c.dispatch(m.Event)
		default:
			c.answer(m)
		}
	}
	if err == nil {
		err = lines.Err()
	}
	if err == nil {
		err = errors.New("QEMU has closed it")
	}
	c.mu.Lock()
	c.err = fmt.Errorf("qmp connection: %w: %w", err, errdefs.ErrUnavailable)
	c.mu.Unlock()
	_ = c.conn.Close()
	close(c.done)
}

func (c *Client) dispatch(e Event) {
	if c.onEvent != nil {
		c.onEvent(e)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for w := range c.waiters {
		if w.match(e) {
			w.got <- e // it has room for one, and is removed here
			delete(c.waiters, w)
		}
	}
}

func (c *Client) answer(m message) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ch, ok := c.pending[m.ID]; ok {
		ch <- m // it has room for one, and is removed here
		delete(c.pending, m.ID)
	}
}

// Expect begins to wait for an event, before the command is sent that causes it. wait returns the first event that
// matches, ErrUnavailable if ctx ends before, or the error of a connection that breaks; cancel must be called when nobody
// waits any more.
func (c *Client) Expect(match func(Event) bool) (wait func(context.Context) (Event, error), cancel func()) {
	w := &waiter{match: match, got: make(chan Event, 1)}
	c.mu.Lock()
	c.waiters[w] = true
	c.mu.Unlock()
	wait = func(ctx context.Context) (Event, error) {
		select {
		case e := <-w.got:
			return e, nil
		default:
		}
		select {
		case e := <-w.got:
			return e, nil
		case <-c.done:
			return Event{}, c.err
		case <-ctx.Done():
			return Event{}, fmt.Errorf("qmp: the event has not come: %w: %w", context.Cause(ctx), errdefs.ErrUnavailable)
		}
	}
	cancel = func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.waiters, w)
	}
	return wait, cancel
}
