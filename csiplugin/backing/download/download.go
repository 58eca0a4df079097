package download

import (
	"context"
	"crypto/sha512"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/backing"
	"crust.dev/crust/protocol/rpc"
)

// Config is how to fetch. The zero value of a field is its default.
type Config struct {
	// AllowCIDRs are addresses that may be connected to although they are not public.
	AllowCIDRs []netip.Prefix
	// AllowHosts are names of hosts, as they stand in URLs, that may have any address.
	AllowHosts []string
	// MaxBytes is how long a file may be. Default 256 GiB.
	MaxBytes int64
	// MaxTime is how long a file may take, with all attempts. Default 6 hours.
	MaxTime time.Duration
	// Idle is how long a server may say nothing. Default 30 seconds.
	Idle time.Duration
	// Pause is how long to wait before another attempt; it doubles each time. Default 2 seconds.
	Pause time.Duration
	// Roots are the certificates that servers are trusted by; nil for the system's.
	Roots *tls.Config
}

const (
	// connectTimeout bounds one connection attempt to one address.
	connectTimeout = 15 * time.Second
	// maxRedirects is how many redirects are followed for one file.
	maxRedirects = 5
	// attempts is how often in a row a transfer may fail without a byte of progress.
	attempts = 5
	// maxRestarts is how often a file may be begun again because it changed or cannot be carried on.
	maxRestarts = 5
)

func (c Config) withDefaults() Config {
	set := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	set(&c.MaxTime, 6*time.Hour)
	set(&c.Idle, 30*time.Second)
	set(&c.Pause, 2*time.Second)
	if c.MaxBytes == 0 {
		c.MaxBytes = 256 << 30
	}
	return c
}

// Downloader fetches files. Its methods may be called from any goroutine.
type Downloader struct {
	cfg    Config
	client *http.Client
}

// New returns a downloader. It does no I/O.
func New(cfg Config) *Downloader {
	cfg = cfg.withDefaults()
	p := policy{cidrs: cfg.AllowCIDRs}
	for _, host := range cfg.AllowHosts {
		p.hosts = append(p.hosts, strings.ToLower(strings.TrimSuffix(host, ".")))
	}
	return &Downloader{cfg: cfg, client: &http.Client{
		CheckRedirect: checkRedirect,
		Transport: &http.Transport{
			DialContext:            p.dial,
			Proxy:                  nil,  // see doc.go
			DisableCompression:     true, // the file is wanted as it is
			DisableKeepAlives:      true,
			TLSClientConfig:        cfg.Roots,
			TLSHandshakeTimeout:    connectTimeout,
			ResponseHeaderTimeout:  cfg.Idle,
			MaxResponseHeaderBytes: 64 << 10,
		},
	}}
}

// checkRedirect looks at where a redirect leads. The address is the dialer's to check.
func checkRedirect(req *http.Request, via []*http.Request) error {
	req.Header.Del("Referer") // it would tell the next server the query of this one's URL
	switch {
	case len(via) > maxRedirects:
		return fmt.Errorf("more than %d redirects: %w", maxRedirects, errdefs.ErrFailedPrecondition)
	case req.URL.Scheme != "https" && req.URL.Scheme != "http":
		return fmt.Errorf("redirect to the scheme %.16q: %w", req.URL.Scheme, errdefs.ErrPermissionDenied)
	case req.URL.Scheme == "http" && via[len(via)-1].URL.Scheme == "https":
		return fmt.Errorf("redirect from https to http at %.128q: %w", req.URL.Host, errdefs.ErrPermissionDenied)
	case req.URL.User != nil:
		return fmt.Errorf("redirect to a URL with userinfo at %.128q: %w", req.URL.Host, errdefs.ErrPermissionDenied)
	}
	return nil
}

// Target is where a file goes to.
type Target struct {
	// File is empty, and has the file's bytes when Get has succeeded. Blocks of zeros become holes. It is not synced.
	File *os.File
	// Checksum is the file's SHA-512 in lower-case hexadecimal digits, or empty if anything will do.
	Checksum string
	// Space returns how many more bytes may be written. It is asked now and then; nil if there is no limit.
	Space func(context.Context) (int64, error)
	// Progress is told how many bytes are there, of how many; total is 0 if that is not known. It must not block.
	Progress func(done, total int64)
}

// Result is what was fetched.
type Result struct {
	Bytes int64
	// Checksum is the SHA-512 in lower-case hexadecimal digits.
	Checksum string
}

// Get fetches a URL, http or https. Errors: ErrPermissionDenied if the address or a redirect is not allowed, ErrOutOfRange if
// the file is too long, ErrResourceExhausted if there is no space, ErrInvalidArgument if the checksum is another,
// ErrFailedPrecondition if the server refuses, ErrUnavailable if it cannot be reached or does not deliver; another attempt
// may help then. After an error File may hold anything.
func (d *Downloader) Get(ctx context.Context, from string, to Target) (Result, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, d.cfg.MaxTime, fmt.Errorf("it took longer than %v: %w", d.cfg.MaxTime, errdefs.ErrUnavailable))
	defer cancel()
	t := &transfer{Downloader: d, Target: to, url: from, hash: sha512.New()}
	err := t.run(ctx)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return Result{}, fmt.Errorf("download %s: %w", backing.PublicURL(from), withoutURL(err))
	}
	return Result{Bytes: t.done, Checksum: t.sum()}, nil
}

// withoutURL takes the URL, which net/http puts there, off an error.
func withoutURL(err error) error {
	var e *url.Error
	if errors.As(err, &e) {
		return e.Err
	}
	return err
}

// transfer is one file on its way.
type transfer struct {
	*Downloader
	Target
	url  string
	hash hash.Hash
	// done is how many bytes are there, total how many there will be, 0 if that is not known.
	done, total int64
	// same is what tells that the file is still the same one (If-Range); empty if nothing does.
	same string
	// restarts is how often it was begun again.
	restarts int
	nextLook int64
}

func (t *transfer) sum() string { return hex.EncodeToString(t.hash.Sum(nil)) }

// run makes attempts until the file is there.
func (t *transfer) run(ctx context.Context) error {
	pause := t.cfg.Pause
	for failed := 0; ; {
		before := t.done
		err := t.attempt(ctx)
		if err == nil {
			return t.finish()
		}
		if ctx.Err() != nil || !errors.Is(err, errdefs.ErrUnavailable) {
			return err
		}
		if failed++; t.done > before {
			failed, pause = 0, t.cfg.Pause
		}
		if failed >= attempts {
			return fmt.Errorf("%d attempts in a row: %w", failed, err)
		}
		rpc.Logger(ctx).DebugContext(ctx, "a download broke off", "bytes", t.done, rpc.LogError, withoutURL(err))
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
			pause *= 2
		}
	}
}

func (t *transfer) finish() error {
	if got := t.sum(); t.Checksum != "" && got != t.Checksum {
		return fmt.Errorf("it has the SHA-512 %s, wanted is %s: %w", got, t.Checksum, errdefs.ErrInvalidArgument)
	}
	return t.File.Truncate(t.done) // the end may be a hole
}

// restart forgets what is there.
func (t *transfer) restart() error {
	if t.done > 0 {
		if t.restarts++; t.restarts > maxRestarts {
			return fmt.Errorf("it had to be begun again %d times, because the server cannot carry on or the file changes: %w", maxRestarts, errdefs.ErrFailedPrecondition)
		}
	}
	t.done, t.nextLook = 0, 0
	t.hash.Reset()
	return t.File.Truncate(0)
}
