package kata

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
)

// maxAnswer is how much of an answer is read, in bytes. A sandbox's metrics have some 100 KiB.
const maxAnswer = 4 << 20

// answer is what a shim has said.
type answer struct {
	code int
	body []byte
}

// text is the answer's body for an error.
func (a answer) text() string {
	const enough = 300
	text := strings.TrimSpace(string(a.body))
	if len(text) > enough {
		text = text[:enough] + "..."
	}
	return fmt.Sprintf("%d %s", a.code, text)
}

// ask sends one request to a sandbox's management socket. Its request line has an absolute URL, as for a proxy: both
// runtimes take that, and runtime-rs parses nothing else. ErrNotFound if nobody listens, ErrUnavailable if no answer comes;
// runtime-rs closes the connection without one when it fails, which is an [*unansweredError] besides.
func (h *Handler) ask(ctx context.Context, s runtimehandler.Sandbox, method, target string, body []byte) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, h.config.CallTimeout)
	defer cancel()
	transport := &http.Transport{
		Proxy:             func(*http.Request) (*url.URL, error) { return &url.URL{Scheme: "http", Host: "shim"}, nil },
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", s.Address)
		},
	}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(ctx, method, "http://shim"+target, bytes.NewReader(body))
	if err != nil {
		return answer{}, fmt.Errorf("sandbox %s: %w", s.ID, err)
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return answer{}, h.failed(ctx, s, err)
	}
	defer resp.Body.Close()
	a := answer{code: resp.StatusCode}
	if a.body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer)); err != nil {
		return answer{}, h.failed(ctx, s, err)
	}
	return a, nil
}

// unansweredError says that a connection was closed before there was an answer.
type unansweredError struct{ cause error }

func (e *unansweredError) Error() string {
	return fmt.Sprintf("the connection was closed without an answer (%v)", e.cause)
}
func (e *unansweredError) Unwrap() error { return errdefs.ErrUnavailable }

func (h *Handler) failed(ctx context.Context, s runtimehandler.Sandbox, err error) error {
	switch {
	case ctx.Err() != nil:
		err = fmt.Errorf("no answer within %v: %w", h.config.CallTimeout, errdefs.ErrUnavailable)
	case refused(err):
		err = fmt.Errorf("nobody listens on %s any more: %w", s.Address, errdefs.ErrNotFound)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		err = &unansweredError{err}
	default:
		err = fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	return fmt.Errorf("sandbox %s (%s): %w", s.ID, s.Runtime, err)
}

// refused says that a socket is not there, or that nobody listens on it.
func refused(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, os.ErrNotExist)
}
