package qmp_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/qemu/qmp"
)

const greeting = `{"QMP":{"version":{"qemu":{"major":7}},"capabilities":["oob"]}}`

// server is QEMU's end of a connection.
type server struct {
	t    *testing.T
	conn *net.UnixConn
	in   *bufio.Reader
}

// command is what the server gets to see of a command.
type command struct {
	Execute   string
	Arguments map[string]any
	ID        int
}

// connect returns both ends.
func connect(t *testing.T, onEvent func(qmp.Event)) (*qmp.Client, *server) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conns := make([]*net.UnixConn, 2)
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		conn, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		conns[i] = conn.(*net.UnixConn)
	}
	c := qmp.New(conns[0], onEvent)
	t.Cleanup(func() {
		_ = c.Close()
		_ = conns[1].Close()
	})
	return c, &server{t: t, conn: conns[1], in: bufio.NewReader(conns[1])}
}

func (s *server) say(format string, args ...any) {
	if _, err := fmt.Fprintf(s.conn, format+"\r\n", args...); err != nil {
		s.t.Errorf("server: %v", err)
	}
}

func (s *server) hear() command {
	line, err := s.in.ReadBytes('\n')
	if err != nil {
		s.t.Errorf("server: %v", err)
		return command{}
	}
	var c command
	if err := json.Unmarshal(line, &c); err != nil {
		s.t.Errorf("server: %q: %v", line, err)
	}
	return c
}

// welcome does the server's part of the beginning.
func (s *server) welcome() {
	s.say(greeting)
	c := s.hear()
	if c.Execute != "qmp_capabilities" {
		s.t.Errorf("the first command is %q", c.Execute)
	}
	s.say(`{"return":{},"id":%d}`, c.ID)
}

func soon(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func ready(t *testing.T) (*qmp.Client, *server) {
	t.Helper()
	c, s := connect(t, nil)
	go s.welcome()
	if err := c.Negotiate(soon(t)); err != nil {
		t.Fatal(err)
	}
	return c, s
}

func TestExecute(t *testing.T) {
	c, s := ready(t)
	go func() {
		got := s.hear()
		if got.Execute != "query" || got.Arguments["a"] != "b" {
			t.Errorf("server got %+v", got)
		}
		s.say(`{"return":{"x":7},"id":%d}`, got.ID)
		s.say(`{"error":{"class":"DeviceNotFound","desc":"no such thing"},"id":%d}`, s.hear().ID)
	}()
	var result struct{ X int }
	if err := c.Execute(soon(t), "query", map[string]string{"a": "b"}, &result); err != nil || result.X != 7 {
		t.Errorf("%+v, %v", result, err)
	}
	var refused *qmp.Error
	if err := c.Execute(soon(t), "del", nil, nil); !errors.As(err, &refused) || refused.Class != "DeviceNotFound" || !strings.Contains(err.Error(), "del: no such thing") {
		t.Errorf("error %v", err)
	}
	if err := c.Execute(t.Context(), "x", nil, nil); !errors.Is(err, errdefs.ErrInternal) {
		t.Errorf("without a deadline: %v", err)
	}
}

func TestAnswersOutOfOrder(t *testing.T) {
	c, s := ready(t)
	const n = 10
	go func() {
		var got []command
		for range n {
			got = append(got, s.hear())
		}
		for i := range got {
			g := got[n-1-i]
			s.say(`{"return":%q,"id":%d}`, g.Arguments["n"], g.ID)
		}
	}()
	failed := make(chan error, n)
	for i := range n {
		go func() {
			want := fmt.Sprint(i)
			var result string
			err := c.Execute(soon(t), "echo", map[string]string{"n": want}, &result)
			if err == nil && result != want {
				err = fmt.Errorf("%q is the answer to %q", result, want)
			}
			failed <- err
		}()
	}
	for range n {
		if err := <-failed; err != nil {
			t.Error(err)
		}
	}
}

func TestLateAnswer(t *testing.T) {
	c, s := ready(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := c.Execute(ctx, "slow", nil, nil); !errors.Is(err, errdefs.ErrUnavailable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	if err := c.Execute(ctx, "later", nil, nil); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("with a context that has ended: %v", err)
	}
	go func() {
		slow := s.hear()
		s.say(`{"return":"slow","id":%d}`, slow.ID)
		s.say(`{"return":"next","id":%d}`, s.hear().ID)
	}()
	var result string
	if err := c.Execute(soon(t), "next", nil, &result); err != nil || result != "next" {
		t.Errorf("%q, %v", result, err)
	}
}

func TestEvents(t *testing.T) {
	seen := make(chan string, 8)
	c, s := connect(t, func(e qmp.Event) { seen <- e.Name })
	go s.welcome()
	if err := c.Negotiate(soon(t)); err != nil {
		t.Fatal(err)
	}
	wait, cancel := c.Expect(func(e qmp.Event) bool { return e.Name == "DEVICE_DELETED" && e.Field("device") == "d1" })
	defer cancel()
	other, cancelOther := c.Expect(func(e qmp.Event) bool { return e.Name == "NEVER" })
	defer cancelOther()
	s.say(`{"event":"DEVICE_DELETED","data":{"device":"d0"},"timestamp":{"seconds":1,"microseconds":2}}`)
	s.say(`{"event":"DEVICE_DELETED","data":{"device":"d1","path":"/x"}}`)
	s.say(`{"event":"DEVICE_DELETED","data":{"device":"d1"}}`)
	e, err := wait(soon(t))
	if err != nil || e.Field("path") != "/x" || e.Field("missing") != "" {
		t.Errorf("%+v, %v", e, err)
	}
	for range 3 {
		if name := <-seen; name != "DEVICE_DELETED" {
			t.Errorf("event %s", name)
		}
	}
	ctx, cancelCtx := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancelCtx()
	if _, err := other(ctx); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("an event that does not come: %v", err)
	}
}

func TestBrokenConnection(t *testing.T) {
	for name, breaks := range map[string]func(s *server){
		"closed":             func(s *server) { _ = s.conn.Close() },
		"no JSON":            func(s *server) { s.say("hello") },
		"a line without end": func(s *server) { _, _ = s.conn.Write(make([]byte, 5<<20)) },
	} {
		t.Run(name, func(t *testing.T) {
			c, s := ready(t)
			wait, cancel := c.Expect(func(qmp.Event) bool { return true })
			defer cancel()
			go func() {
				s.hear()
				breaks(s)
			}()
			if err := c.Execute(soon(t), "pending", nil, nil); !errors.Is(err, errdefs.ErrUnavailable) {
				t.Errorf("a pending command: %v", err)
			}
			if _, err := wait(soon(t)); !errors.Is(err, errdefs.ErrUnavailable) {
				t.Errorf("a wait for an event: %v", err)
			}
			if err := c.Execute(soon(t), "next", nil, nil); !errors.Is(err, errdefs.ErrUnavailable) {
				t.Errorf("the next command: %v", err)
			}
		})
	}
}

func TestNoGreeting(t *testing.T) {
	c, s := connect(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := c.Negotiate(ctx); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("a QEMU that says nothing: %v", err)
	}
	_ = s.conn.Close()
	if err := c.Negotiate(soon(t)); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("a QEMU that has gone: %v", err)
	}
}

func TestPassesFiles(t *testing.T) {
	c, s := ready(t)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("content"), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	got := make(chan string, 1)
	go func() { got <- s.hearWithFile() }()
	if err := c.ExecuteWithFile(soon(t), "add-fd", map[string]int{"fdset-id": 1}, nil, file); err != nil {
		t.Error(err)
	}
	if content := <-got; content != "content" {
		t.Errorf("the other end has read %q", content)
	}
}

// hearWithFile answers a command that comes with a file, and returns what is in that.
func (s *server) hearWithFile() string {
	buf, rights := make([]byte, 4096), make([]byte, unix.CmsgSpace(4))
	n, rn, _, _, err := s.conn.ReadMsgUnix(buf, rights)
	if err != nil {
		s.t.Errorf("server: %v", err)
		return ""
	}
	var c command
	if err := json.Unmarshal(buf[:n], &c); err != nil {
		s.t.Errorf("server: %v", err)
	}
	messages, err := unix.ParseSocketControlMessage(rights[:rn])
	if err != nil || len(messages) != 1 {
		s.t.Errorf("server: %d messages, %v", len(messages), err)
		return ""
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		s.t.Errorf("server: %d files, %v", len(fds), err)
		return ""
	}
	f := os.NewFile(uintptr(fds[0]), "passed")
	defer f.Close()
	content := make([]byte, 64)
	k, _ := f.Read(content)
	s.say(`{"return":{},"id":%d}`, c.ID)
	return string(content[:k])
}

// TestStalledPeer: a QEMU that reads nothing holds a command up only as long as that has time.
func TestStalledPeer(t *testing.T) {
	c, _ := ready(t)
	big := strings.Repeat("x", 1<<20)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := c.Execute(ctx, "big", map[string]string{"x": big}, nil); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("error %v", err)
	}
	// Part of a command was sent: whatever comes next would be taken for the rest.
	if err := c.Execute(soon(t), "next", nil, nil); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("the next command: %v", err)
	}
}

// FuzzRead: whatever QEMU sends, the client neither panics nor hangs, and its one command ends.
func FuzzRead(f *testing.F) {
	f.Add([]byte(greeting + "\n" + `{"return":{},"id":1}` + "\n"))
	f.Add([]byte(`{"event":"X","data":[]}` + "\n"))
	f.Add([]byte(`{"error":{},"id":1}` + "\n" + `{"return":1,"id":99}` + "\n{}\nnull\n[]\n"))
	f.Fuzz(func(t *testing.T, said []byte) {
		c, s := connect(t, func(e qmp.Event) { e.Field("x") })
		go func() {
			_, _ = s.conn.Write(said)
			_ = s.conn.Close()
		}()
		err := c.Negotiate(soon(t))
		if err == nil && !strings.Contains(string(said), "QMP") {
			t.Errorf("%q is a greeting", said)
		}
	})
}
