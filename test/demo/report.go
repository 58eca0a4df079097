package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"
)

// report prints the steps as they happen and counts them.
type report struct {
	out      io.Writer
	asJSON   bool
	steps    int
	failures int
	// interrupted is set when a step was broken off by the user; it has then neither passed nor failed.
	interrupted bool
}

func newReport(out io.Writer, asJSON bool) *report { return &report{out: out, asJSON: asJSON} }

// line is one step in JSON.
type line struct {
	Step       int    `json:"step"`
	Filesystem string `json:"filesystem,omitempty"`
	Name       string `json:"name"`
	OK         bool   `json:"ok"`
	Millis     int64  `json:"millis"`
	Detail     string `json:"detail,omitempty"`
	Error      string `json:"error,omitempty"`
}

// step runs one step and prints it with its time. fn returns what there is to see.
func (r *report) step(ctx context.Context, filesystem, name string, fn func(ctx context.Context) (string, error)) error {
	r.steps++
	if !r.asJSON {
		fmt.Fprintf(r.out, "%3d  %-5s %-66s", r.steps, filesystem, name)
	}
	start := time.Now()
	detail, err := fn(ctx)
	if err == nil {
		err = ctx.Err()
	}
	took := time.Since(start)
	switch {
	case ctx.Err() != nil:
		r.interrupted = true
		r.steps--
		detail, err = "interrupted", ctx.Err()
	case err != nil:
		r.failures++
	}
	if r.asJSON {
		l := line{Step: r.steps, Filesystem: filesystem, Name: name, OK: err == nil, Millis: took.Milliseconds(), Detail: detail}
		if err != nil {
			l.Error = err.Error()
		}
		r.json(l)
		return err
	}
	if err != nil && !r.interrupted {
		detail = fmt.Sprintf("FAILED: %v", err)
	}
	fmt.Fprintf(r.out, "%9s  %s\n", round(took), detail)
	return err
}

// failed reports something that is no step of the demo.
func (r *report) failed(what string, err error) {
	r.failures++
	if r.asJSON {
		r.json(line{Step: r.steps, Name: what, Error: err.Error()})
		return
	}
	fmt.Fprintf(r.out, "     %s FAILED: %v\n", what, err)
}

func (r *report) end() {
	passed := r.steps - r.failures
	if r.asJSON {
		r.json(map[string]any{"passed": passed, "failed": r.failures, "interrupted": r.interrupted})
		return
	}
	if r.interrupted && r.failures == 0 {
		fmt.Fprintln(r.out, "demo: interrupted; everything was stopped and removed")
	}
	fmt.Fprintf(r.out, "demo: %d steps passed, %d failed\n", passed, r.failures)
}

func (r *report) json(v any) {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err) // the types are above
	}
	fmt.Fprintf(r.out, "%s\n", raw)
}

func round(d time.Duration) string {
	if d < time.Second {
		return d.Round(time.Millisecond).String()
	}
	return d.Round(10 * time.Millisecond).String()
}
