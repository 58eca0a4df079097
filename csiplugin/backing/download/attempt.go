package download

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/internal/diskfull"
)

// attempt makes one request and reads its answer to the end. Errors are ErrUnavailable if another attempt may help.
func (t *transfer) attempt(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	req, err := t.request(ctx)
	if err != nil {
		return err
	}
	resp, err := t.client.Do(req)
	if err != nil {
		return temporary(err)
	}
	defer resp.Body.Close()
	length, err := t.accept(resp)
	if err != nil {
		return err
	}
	silent := fmt.Errorf("the server has said nothing for %v: %w", t.cfg.Idle, errdefs.ErrUnavailable)
	idle := time.AfterFunc(t.cfg.Idle, func() { cancel(silent) })
	defer idle.Stop()
	err = t.read(ctx, resp.Body, length, func() { idle.Reset(t.cfg.Idle) })
	if errors.Is(context.Cause(ctx), silent) {
		return silent
	}
	return err
}

// temporary makes an error ErrUnavailable unless it has a kind of its own.
func temporary(err error) error {
	err = withoutURL(err)
	if errors.Is(err, errdefs.ErrPermissionDenied) || errors.Is(err, errdefs.ErrFailedPrecondition) {
		return err
	}
	return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
}

func (t *transfer) request(ctx context.Context) (*http.Request, error) {
	if t.done > 0 && t.same == "" {
		if err := t.restart(); err != nil {
			return nil, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, t.url, nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", withoutURL(err), errdefs.ErrInvalidArgument)
	}
	req.Header.Set("User-Agent", "crust-csi")
	req.Header.Set("Accept-Encoding", "identity")
	if t.done > 0 {
		req.Header.Set("Range", fmt.Sprintf("bytes=%d-", t.done))
		req.Header.Set("If-Range", t.same)
	}
	return req, nil
}

// accept looks at the header of an answer and returns how many bytes follow, or -1.
func (t *transfer) accept(resp *http.Response) (length int64, err error) {
	if encoding := resp.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		return 0, fmt.Errorf("the server has encoded the file (%.32q), which was not asked for: %w", encoding, errdefs.ErrFailedPrecondition)
	}
	switch {
	case resp.StatusCode == http.StatusOK:
		if err := t.restart(); err != nil {
			return 0, err
		}
		t.total, t.same = max(resp.ContentLength, 0), validator(resp.Header)
	case resp.StatusCode == http.StatusPartialContent && t.done > 0:
		if err := t.checkRange(resp); err != nil {
			t.same = "" // it cannot be carried on
			return 0, err
		}
	case resp.StatusCode == http.StatusRequestedRangeNotSatisfiable && t.done > 0:
		t.same = ""
		return 0, fmt.Errorf("the server has no byte %d any more: %w", t.done, errdefs.ErrUnavailable)
	case resp.StatusCode >= 500, resp.StatusCode == http.StatusTooManyRequests, resp.StatusCode == http.StatusRequestTimeout:
		return 0, fmt.Errorf("the server answers %d: %w", resp.StatusCode, errdefs.ErrUnavailable)
	default:
		return 0, fmt.Errorf("the server answers %d: %w", resp.StatusCode, errdefs.ErrFailedPrecondition)
	}
	chunked := len(resp.TransferEncoding) > 0 && resp.TransferEncoding[0] == "chunked"
	if resp.ContentLength < 0 && !chunked && t.Checksum == "" {
		return 0, fmt.Errorf("the server does not say how long the file is, so that one that is cut off looks whole; give its checksum in the handle (backingImageChecksum): %w", errdefs.ErrFailedPrecondition)
	}
	if t.total > t.cfg.MaxBytes {
		return 0, t.tooLong(t.total)
	}
	return resp.ContentLength, nil
}

func (t *transfer) tooLong(n int64) error {
	return fmt.Errorf("it has %d bytes or more, %d are allowed (--image-max-size): %w", n, t.cfg.MaxBytes, errdefs.ErrOutOfRange)
}

// checkRange holds a partial answer against what is there (RFC 9110, 14.4 and 15.3.7).
func (t *transfer) checkRange(resp *http.Response) error {
	text, _ := strings.CutPrefix(resp.Header.Get("Content-Range"), "bytes ")
	span, whole, _ := strings.Cut(text, "/")
	first, _, _ := strings.Cut(span, "-")
	begin, err := strconv.ParseInt(first, 10, 64)
	if err != nil || begin != t.done {
		return fmt.Errorf("the server was asked for what begins at %d and sends %.64q: %w", t.done, text, errdefs.ErrUnavailable)
	}
	if n, err := strconv.ParseInt(whole, 10, 64); t.total > 0 && (err != nil || n != t.total) {
		return fmt.Errorf("the file had %d bytes, now the server sends %.64q: %w", t.total, text, errdefs.ErrUnavailable)
	}
	if now := validator(resp.Header); now != "" && now != t.same {
		return fmt.Errorf("the file has changed: %w", errdefs.ErrUnavailable)
	}
	return nil
}

// validator is what If-Range takes to tell whether a file is still the same: a strong entity tag, or a date that is old enough
// to be strong (RFC 9110, 8.8.2.2 and 13.1.5).
func validator(h http.Header) string {
	if tag := h.Get("ETag"); tag != "" {
		if strings.HasPrefix(tag, `"`) {
			return tag
		}
		return ""
	}
	modified, err := http.ParseTime(h.Get("Last-Modified"))
	if err != nil {
		return ""
	}
	if now, err := http.ParseTime(h.Get("Date")); err != nil || now.Sub(modified) < time.Minute {
		return ""
	}
	return h.Get("Last-Modified")
}

const (
	bufferSize = 256 << 10
	block      = 4096
	// lookEvery is after how many bytes the space that is left is looked at again.
	lookEvery = 32 << 20
)

// read writes what comes behind what is there. length is how much should come, or -1.
func (t *transfer) read(ctx context.Context, body io.Reader, length int64, alive func()) error {
	buffer := make([]byte, bufferSize)
	want := t.done + length
	for {
		n, err := body.Read(buffer)
		alive()
		if n > 0 {
			if err := t.write(ctx, buffer[:n]); err != nil {
				return err
			}
		}
		switch {
		case err == nil:
		case !errors.Is(err, io.EOF):
			return temporary(fmt.Errorf("it broke off after %d bytes: %w", t.done, err))
		case length >= 0 && t.done != want || t.total > 0 && t.done != t.total:
			return fmt.Errorf("the server ended after %d bytes of %d: %w", t.done, max(want, t.total), errdefs.ErrUnavailable)
		default:
			t.total = t.done
			return nil
		}
	}
}

func (t *transfer) write(ctx context.Context, p []byte) error {
	if t.done+int64(len(p)) > t.cfg.MaxBytes {
		return t.tooLong(t.done + int64(len(p)))
	}
	if err := t.lookAtSpace(ctx); err != nil {
		return err
	}
	_, _ = t.hash.Write(p) // it never returns an error
	for len(p) > 0 {
		// Up to the next multiple of a block, so that holes are aligned.
		n := min(len(p), block-int(t.done%block))
		if !zero(p[:n]) {
			for n < len(p) && !zero(p[n:min(n+block, len(p))]) {
				n = min(n+block, len(p))
			}
			if _, err := t.File.WriteAt(p[:n], t.done); err != nil {
				return diskfull.Kind(err)
			}
		}
		t.done += int64(n)
		p = p[n:]
	}
	if t.Progress != nil {
		t.Progress(t.done, t.total)
	}
	return nil
}

var zeros [block]byte

func zero(p []byte) bool { return bytes.Equal(p, zeros[:len(p)]) }

// lookAtSpace is ErrResourceExhausted if what is still to come does not fit.
func (t *transfer) lookAtSpace(ctx context.Context) error {
	if t.Space == nil || t.done < t.nextLook {
		return nil
	}
	t.nextLook = t.done + lookEvery
	space, err := t.Space(ctx)
	if err != nil {
		return err
	}
	if need := max(t.total-t.done, bufferSize); need > space {
		return fmt.Errorf("%d bytes are still to come, and there is space for %d: %w", need, max(space, 0), errdefs.ErrResourceExhausted)
	}
	return nil
}
