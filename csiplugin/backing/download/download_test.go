package download_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/backing/backingtest"
	"crust.dev/crust/csiplugin/backing/download"
)

const mib = 1 << 20

var here = []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}

// config is for tests against a server of this machine.
func config() download.Config {
	return download.Config{AllowCIDRs: here, Pause: time.Millisecond, Idle: 10 * time.Second}
}

func content(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	if n > mib {
		clear(b[mib/2 : mib])
	}
	return b
}

func sum(b []byte) string {
	s := sha512.Sum512(b)
	return hex.EncodeToString(s[:])
}

// get downloads into a new file, and returns what is in it.
func get(t *testing.T, cfg download.Config, url string, change ...func(*download.Target)) ([]byte, download.Result, error) {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	to := download.Target{File: f}
	for _, c := range change {
		c(&to)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	result, err := download.New(cfg).Get(ctx, url, to)
	got, readErr := os.ReadFile(f.Name())
	if readErr != nil {
		t.Fatal(readErr)
	}
	return got, result, err
}

func checksum(s string) func(*download.Target) { return func(t *download.Target) { t.Checksum = s } }

// whole checks that a download has succeeded, with everything.
func whole(t *testing.T, want, got []byte, result download.Result, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(want, got) || result.Bytes != int64(len(want)) || result.Checksum != sum(want) {
		t.Errorf("%d bytes with %s came, %d with %s were sent", len(got), result.Checksum, len(want), sum(want))
	}
}

func TestADownload(t *testing.T) {
	for _, size := range []int{1, 4096, 4097, 3*mib + 5} {
		want := content(size)
		s := backingtest.Serve(t, backingtest.File(want))
		var done, total int64
		got, result, err := get(t, config(), s.URL, checksum(sum(want)), func(to *download.Target) {
			to.Progress = func(d, n int64) { done, total = d, n }
		})
		whole(t, want, got, result, err)
		if done != int64(size) || total != int64(size) {
			t.Errorf("progress ended with %d of %d", done, total)
		}
	}
}

func TestZerosBecomeAHoleAtTheEndToo(t *testing.T) {
	want := append(content(5000), make([]byte, 3*mib)...)
	s := backingtest.Serve(t, backingtest.File(want))
	got, result, err := get(t, config(), s.URL)
	whole(t, want, got, result, err)
}

func TestTheChecksumCounts(t *testing.T) {
	s := backingtest.Serve(t, backingtest.File([]byte("evil")))
	if _, _, err := get(t, config(), s.URL, checksum(sum([]byte("good")))); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("got %v", err)
	}
}

// broken is a server that breaks off in the middle of the first answer.
func broken(want []byte, header string, then func(n int, w http.ResponseWriter, r *http.Request)) func(n int, w http.ResponseWriter, r *http.Request) {
	return func(n int, w http.ResponseWriter, r *http.Request) {
		if n > 1 {
			then(n, w, r)
			return
		}
		backingtest.BreakOff(w, fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s", len(want), header), string(want[:len(want)/2]))
	}
}

func TestABrokenTransferIsCarriedOn(t *testing.T) {
	want := content(3 * mib)
	old := time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat)
	for name, row := range map[string]struct {
		header string
		then   func(n int, w http.ResponseWriter, r *http.Request)
		ranged bool
	}{
		"with an entity tag": {"ETag: " + backingtest.Tag(want) + "\r\n", backingtest.File(want), true},
		"with an old date": {"Last-Modified: " + old + "\r\nDate: " + time.Now().UTC().Format(http.TimeFormat) + "\r\n", func(_ int, w http.ResponseWriter, r *http.Request) {
			modified, _ := http.ParseTime(old)
			http.ServeContent(w, r, "", modified, bytes.NewReader(want))
		}, true},
		"from the beginning with a weak entity tag":        {"ETag: W/" + backingtest.Tag(want) + "\r\n", backingtest.File(want), false},
		"from the beginning with nothing to know it by":    {"", backingtest.File(want), false},
		"from the beginning where ranges are not possible": {"ETag: " + backingtest.Tag(want) + "\r\n", func(_ int, w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(want) }, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := backingtest.Serve(t, broken(want, row.header, row.then))
			got, result, err := get(t, config(), s.URL)
			whole(t, want, got, result, err)
			requests := s.Requests()
			if len(requests) != 2 || (requests[1].Header.Get("Range") != "") != row.ranged {
				t.Errorf("%d requests, the last with range %q", len(requests), requests[len(requests)-1].Header.Get("Range"))
			}
		})
	}
}

// TestContentThatChangesBetweenAttempts has a server break off and then have another file. What comes is one or the other.
func TestContentThatChangesBetweenAttempts(t *testing.T) {
	first, second := content(2*mib), content(2*mib)
	second[0] = first[0] + 1
	for name, then := range map[string]func(n int, w http.ResponseWriter, r *http.Request){
		"honestly": backingtest.File(second),
		"with a range of it under a new tag": func(n int, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Range") != "" {
				r.Header.Set("If-Range", backingtest.Tag(second))
			}
			backingtest.File(second)(n, w, r)
		},
		"with a range of another length": func(n int, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Range") == "" {
				backingtest.File(second)(n, w, r)
				return
			}
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", mib, 3*mib-1, 3*mib))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(make([]byte, 2*mib))
		},
		"with a range that begins elsewhere": func(n int, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Range") == "" {
				backingtest.File(second)(n, w, r)
				return
			}
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", 0, 2*mib-1, 2*mib))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(second)
		},
		"with nothing at that place": func(n int, w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Range") != "" {
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
				return
			}
			backingtest.File(second)(n, w, r)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := backingtest.Serve(t, broken(first, "ETag: "+backingtest.Tag(first)+"\r\n", then))
			got, result, err := get(t, config(), s.URL)
			whole(t, second, got, result, err)
		})
	}
	t.Run("a checksum of the first", func(t *testing.T) {
		s := backingtest.Serve(t, broken(first, "ETag: "+backingtest.Tag(first)+"\r\n", backingtest.File(second)))
		if _, _, err := get(t, config(), s.URL, checksum(sum(first))); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("got %v", err)
		}
	})
}

// TestHostileServers never ends with a file.
func TestHostileServers(t *testing.T) {
	brief := config()
	brief.Idle = 200 * time.Millisecond
	small := config()
	small.MaxBytes = mib
	short := config()
	short.MaxTime = 500 * time.Millisecond
	for name, row := range map[string]struct {
		cfg     download.Config
		handler func(n int, w http.ResponseWriter, r *http.Request)
		want    error
	}{
		"stalls before it answers": {brief, func(_ int, _ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }, errdefs.ErrUnavailable},
		"stalls in the middle": {brief, func(_ int, w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = w.Write([]byte("some"))
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, errdefs.ErrUnavailable},
		"drips for ever": {short, func(_ int, w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				_, _ = w.Write([]byte("x"))
				_ = http.NewResponseController(w).Flush()
				time.Sleep(10 * time.Millisecond)
			}
		}, errdefs.ErrUnavailable},
		"says that it sends more than it does": {config(), func(_ int, w http.ResponseWriter, _ *http.Request) {
			backingtest.BreakOff(w, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n", "short")
		}, errdefs.ErrUnavailable},
		"always breaks off at once": {config(), func(_ int, w http.ResponseWriter, _ *http.Request) {
			backingtest.BreakOff(w, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n", "")
		}, errdefs.ErrUnavailable},
		"breaks off a chunk": {config(), func(_ int, w http.ResponseWriter, _ *http.Request) {
			backingtest.BreakOff(w, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n", "10\r\nshort")
		}, errdefs.ErrUnavailable},
		"says no length and closes": {config(), func(_ int, w http.ResponseWriter, _ *http.Request) {
			backingtest.BreakOff(w, "HTTP/1.1 200 OK\r\nConnection: close\r\n", "is this all?")
		}, errdefs.ErrFailedPrecondition},
		"is too long by its own word": {small, backingtest.File(content(2 * mib)), errdefs.ErrOutOfRange},
		"is too long without a word":  {small, func(_ int, w http.ResponseWriter, _ *http.Request) { endless(w) }, errdefs.ErrOutOfRange},
		"encodes the file": {config(), func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			_, _ = w.Write([]byte("x"))
		}, errdefs.ErrFailedPrecondition},
		"sends a part unasked":         {config(), func(_ int, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusPartialContent) }, errdefs.ErrFailedPrecondition},
		"does not have it":             {config(), func(_ int, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) }, errdefs.ErrFailedPrecondition},
		"fails":                        {config(), func(_ int, w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }, errdefs.ErrUnavailable},
		"redirects in a circle":        {config(), redirect(func(r *http.Request) string { return r.URL.Path }), errdefs.ErrFailedPrecondition},
		"redirects to a file":          {config(), redirect(func(*http.Request) string { return "file:///etc/shadow" }), errdefs.ErrPermissionDenied},
		"redirects with userinfo":      {config(), redirect(func(*http.Request) string { return "http://u:p@127.0.0.1/" }), errdefs.ErrPermissionDenied},
		"redirects inward":             {config(), redirect(func(*http.Request) string { return "http://[::1]:1/" }), errdefs.ErrPermissionDenied},
		"redirects to metadata":        {config(), redirect(func(*http.Request) string { return "http://169.254.169.254/latest/meta-data/" }), errdefs.ErrPermissionDenied},
		"redirects to a private place": {config(), redirect(func(*http.Request) string { return "http://10.0.0.1/" }), errdefs.ErrPermissionDenied},
		"sends a header without end": {config(), func(_ int, w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", strings.Repeat("x", mib))
		}, errdefs.ErrUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := backingtest.Serve(t, row.handler)
			_, _, err := get(t, row.cfg, s.URL+"/path?secret=hidden")
			if !errors.Is(err, row.want) {
				t.Errorf("got %v, want %v", err, row.want)
			}
			if err != nil && (strings.Contains(err.Error(), "hidden") || strings.Contains(err.Error(), "u:p@")) {
				t.Errorf("the error shows a secret: %v", err)
			}
			for _, r := range s.Requests() {
				if r.Header.Get("Referer") != "" {
					t.Errorf("a request has the referer %s", r.Header.Get("Referer"))
				}
			}
		})
	}
}

func endless(w http.ResponseWriter) {
	for {
		if _, err := w.Write(make([]byte, 64<<10)); err != nil {
			return
		}
	}
}

func redirect(to func(r *http.Request) string) func(n int, w http.ResponseWriter, r *http.Request) {
	return func(_ int, w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Location", to(r))
		w.WriteHeader(http.StatusFound)
	}
}

func TestWithoutALengthAChecksumWillDo(t *testing.T) {
	want := "is this all?"
	s := backingtest.Serve(t, func(_ int, w http.ResponseWriter, _ *http.Request) {
		backingtest.BreakOff(w, "HTTP/1.1 200 OK\r\nConnection: close\r\n", want)
	})
	got, result, err := get(t, config(), s.URL, checksum(sum([]byte(want))))
	whole(t, []byte(want), got, result, err)
}

func TestHTTPS(t *testing.T) {
	want := content(mib)
	good := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/down" {
			http.Redirect(w, r, "http://"+r.Host+"/", http.StatusFound)
			return
		}
		_, _ = w.Write(want)
	}))
	defer good.Close()
	trusting := config()
	trusting.Roots = good.Client().Transport.(*http.Transport).TLSClientConfig
	got, result, err := get(t, trusting, good.URL)
	whole(t, want, got, result, err)
	if _, _, err := get(t, trusting, good.URL+"/down"); !errors.Is(err, errdefs.ErrPermissionDenied) {
		t.Errorf("a redirect to http: %v", err)
	}
	if _, _, err := get(t, config(), good.URL); !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a certificate that nobody trusts: %v", err)
	}
}

func TestARedirectToAnAllowedAddressIsFollowed(t *testing.T) {
	want := content(1000)
	inner := backingtest.Serve(t, backingtest.File(want))
	outer := backingtest.Serve(t, redirect(func(*http.Request) string { return inner.URL + "/image" }))
	got, result, err := get(t, config(), outer.URL)
	whole(t, want, got, result, err)
	only := config()
	only.AllowCIDRs, only.AllowHosts = nil, []string{"localhost"}
	_, port, _ := strings.Cut(strings.TrimPrefix(outer.URL, "http://"), ":")
	if _, _, err := get(t, only, "http://localhost:"+port+"/"); !errors.Is(err, errdefs.ErrPermissionDenied) {
		t.Errorf("an allowed host redirects to an address that is not: %v", err)
	}
}

func TestAddressesThatAreNotPublicAreRefused(t *testing.T) {
	s := backingtest.Serve(t, backingtest.File([]byte("inside")))
	_, port, _ := strings.Cut(strings.TrimPrefix(s.URL, "http://"), ":")
	for _, host := range []string{
		"127.0.0.1", "localhost", "127.1.2.3", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]", "169.254.169.254", "10.1.2.3", "172.16.0.1",
		"192.168.1.1", "100.100.100.200", "168.63.129.16", "192.0.0.192", "[fd00:ec2::254]", "[fe80::1%25lo]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]",
		"[::127.0.0.1]", "224.0.0.1", "255.255.255.255",
	} {
		_, _, err := get(t, download.Config{Pause: time.Millisecond}, "http://"+host+":"+port+"/")
		if !errors.Is(err, errdefs.ErrPermissionDenied) {
			t.Errorf("%s: %v", host, err)
		}
	}
	if n := len(s.Requests()); n > 0 {
		t.Errorf("%d requests have arrived", n)
	}
	for name, cfg := range map[string]download.Config{
		"by a range":         {AllowCIDRs: here},
		"by a name":          {AllowHosts: []string{"LOCALHOST."}},
		"by another's range": {AllowCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}, AllowHosts: []string{"localhost"}},
	} {
		if _, _, err := get(t, cfg, "http://localhost:"+port+"/"); err != nil {
			t.Errorf("allowed %s: %v", name, err)
		}
	}
}

func TestNoProxyIsUsed(t *testing.T) {
	proxy := backingtest.Serve(t, backingtest.File([]byte("proxy")))
	for _, name := range []string{"http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"} {
		t.Setenv(name, proxy.URL)
	}
	if _, _, err := get(t, config(), "http://192.168.255.254/"); !errors.Is(err, errdefs.ErrPermissionDenied) {
		t.Errorf("got %v", err)
	}
	if len(proxy.Requests()) > 0 {
		t.Error("the proxy was used")
	}
}

func TestSpace(t *testing.T) {
	want := content(2 * mib)
	s := backingtest.Serve(t, backingtest.File(want))
	space := func(n int64) func(*download.Target) {
		return func(to *download.Target) { to.Space = func(context.Context) (int64, error) { return n, nil } }
	}
	if _, _, err := get(t, config(), s.URL, space(2*mib-1)); !errors.Is(err, errdefs.ErrResourceExhausted) {
		t.Errorf("got %v", err)
	}
	got, result, err := get(t, config(), s.URL, space(2*mib))
	whole(t, want, got, result, err)
}

func TestACancelledDownloadSaysWhy(t *testing.T) {
	started := make(chan struct{}, 1)
	s := backingtest.Serve(t, func(_ int, _ http.ResponseWriter, r *http.Request) {
		started <- struct{}{}
		<-r.Context().Done()
	})
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("nobody wants it any more")
	go func() { <-started; cancel(why) }()
	if _, err := download.New(config()).Get(ctx, s.URL, download.Target{File: f}); !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
}
