package process_test

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/guest/process"
)

// begin starts a shell script.
func begin(t *testing.T, table *process.Table, stdin bool, script string) *process.Process {
	t.Helper()
	p, err := table.Start(t.Context(), process.Spec{Argv: []string{"sh", "-c", script}, Stdin: stdin})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// newTable returns a table that is empty at the end of the test.
func newTable(t *testing.T) *process.Table {
	t.Helper()
	table := &process.Table{}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
		defer cancel()
		if err := table.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return table
}

// drain reads to the end.
func drain(t *testing.T, p *process.Process) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs strings.Builder
	for {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		o, e, exited, code := p.Read(ctx)
		failed := ctx.Err() != nil
		cancel()
		out.Write(o)
		errs.Write(e)
		if exited {
			return out.String(), errs.String(), code
		}
		if failed {
			t.Fatal("the command does not end")
		}
	}
}

func TestExitCodes(t *testing.T) {
	table := newTable(t)
	for script, want := range map[string]int{"exit 0": 0, "exit 7": 7, "kill -KILL $$": 128 + 9, "kill -TERM $$": 128 + 15} {
		if _, _, code := drain(t, begin(t, table, false, script)); code != want {
			t.Errorf("%s: %d, want %d", script, code, want)
		}
	}
}

func TestOutputIsBounded(t *testing.T) {
	table := newTable(t)
	p := begin(t, table, false, "yes & echo $!; wait")
	// Nobody reads until the flood has come to a stop: it waits in write(2).
	waitFor(t, func() bool {
		children, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID) + "/task/" + strconv.Itoa(p.PID) + "/children")
		fields := strings.Fields(string(children))
		if err != nil || len(fields) == 0 {
			return false
		}
		wchan, err := os.ReadFile("/proc/" + fields[0] + "/wchan")
		return err == nil && strings.Contains(string(wchan), "pipe_w")
	})
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	out, _, _ := drain(t, p)
	if len(out) < 128<<10 || len(out) > 512<<10 {
		t.Errorf("%d bytes were kept", len(out))
	}
}

func waitFor(t *testing.T, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !done(); {
		if time.Now().After(deadline) {
			t.Fatal("it does not happen")
		}
		time.Sleep(time.Millisecond) // another process does it, and says nothing
	}
}

func TestInput(t *testing.T) {
	table := newTable(t)
	p := begin(t, table, true, "cat; echo end")
	for _, word := range []string{"a", "b"} {
		if err := p.Write(t.Context(), []byte(word), word == "b"); err != nil {
			t.Fatal(err)
		}
	}
	if err := p.Write(t.Context(), []byte("c"), false); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("input after its end: %v", err)
	}
	if err := p.Write(t.Context(), nil, true); err != nil {
		t.Errorf("the end, once more: %v", err)
	}
	if out, _, code := drain(t, p); out != "abend\n" || code != 0 {
		t.Errorf("%q, %d", out, code)
	}
	if err := p.Write(t.Context(), nil, true); err != nil {
		t.Errorf("the end, to a command that has ended: %v", err)
	}
	if err := begin(t, table, false, "cat").Write(t.Context(), []byte("x"), false); !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("input for a command without: %v", err)
	}
}

func TestInputThatNobodyReads(t *testing.T) {
	table := newTable(t)
	p := begin(t, table, true, "sleep 1000")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	var err error
	for err == nil {
		err = p.Write(ctx, make([]byte, process.MaxChunk), false)
	}
	if !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("error %v", err)
	}
	p = begin(t, table, true, "exec 0<&-; echo closed; sleep 1000")
	if out, _, _, _ := p.Read(t.Context()); string(out) != "closed\n" {
		t.Fatalf("%q", out)
	}
	for err = nil; err == nil; {
		err = p.Write(t.Context(), make([]byte, process.MaxChunk), false)
	}
	if !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Errorf("input for a command that has closed it: %v", err)
	}
}

func TestRemoveKillsTheGroup(t *testing.T) {
	table := newTable(t)
	p := begin(t, table, false, "sleep 1000 & echo $!; wait")
	out, _, _, _ := p.Read(t.Context())
	child, err := strconv.Atoi(strings.TrimSpace(string(out)))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := table.Remove(t.Context(), p.ID); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, func() bool {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(child) + "/stat")
		return err != nil || strings.Contains(string(stat), ") Z ")
	})
	if err := unix.Kill(p.PID, 0); !errors.Is(err, unix.ESRCH) {
		t.Errorf("the command was not collected: %v", err)
	}
	if _, err := table.Get(p.ID); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("it is still open: %v", err)
	}
	if err := p.Signal(unix.SIGTERM); err != nil {
		t.Errorf("a signal for nobody: %v", err)
	}
}

func TestTwoReaders(t *testing.T) {
	table := newTable(t)
	p := begin(t, table, false, "seq 20000")
	got := make(chan int, 2)
	for range 2 {
		go func() {
			n := 0
			for {
				out, _, exited, _ := p.Read(t.Context())
				n += len(out)
				if exited {
					got <- n
					return
				}
			}
		}()
	}
	if n := <-got + <-got; n != 108894 {
		t.Errorf("both got %d bytes together", n)
	}
}

func TestLimits(t *testing.T) {
	table := newTable(t)
	for range process.MaxOpen {
		begin(t, table, false, "exit 0")
	}
	if _, err := table.Start(t.Context(), process.Spec{Argv: []string{"true"}}); !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("one more: %v", err)
	}
	if err := table.Remove(t.Context(), "1"); err != nil {
		t.Fatal(err)
	}
	begin(t, table, false, "exit 0")
	if err := table.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := table.Start(t.Context(), process.Spec{Argv: []string{"true"}}); !errors.Is(err, errdefs.ErrUnavailable) {
		t.Errorf("after the end: %v", err)
	}
	table.Reopen()
	begin(t, table, false, "exit 0")
}

func TestNotFound(t *testing.T) {
	table := newTable(t)
	for _, s := range []process.Spec{
		{Argv: []string{"no-such-program"}},
		{Argv: []string{"/no/such/program"}},
		{Argv: []string{"./true"}, Dir: "/etc"},
		{Argv: []string{"true"}, Env: []string{"PATH=/etc"}},
		{Argv: []string{"true"}, Dir: "/no/such/dir"},
		{Argv: []string{"/etc"}},
	} {
		if _, err := table.Start(t.Context(), s); !errors.Is(err, errdefs.ErrNotFound) {
			t.Errorf("%+v: %v", s, err)
		}
	}
	script := t.TempDir() + "/script"
	if err := os.WriteFile(script, []byte("#!/no/such/interpreter\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := table.Start(t.Context(), process.Spec{Argv: []string{script}}); !errors.Is(err, errdefs.ErrNotFound) {
		t.Errorf("a script without its interpreter: %v", err)
	}
	// What could not be started takes no place.
	for range process.MaxOpen {
		begin(t, table, false, "exit 0")
	}
}
