package kata_test

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/kata"
	"crust.dev/crust/runtimehandler/kata/assist"
	"crust.dev/crust/runtimehandler/kata/config"
	stand "crust.dev/crust/test/kata"
)

// TestTrap15GoStats: the path is decoded twice, the status counts, and fields that are zero are absent.
func TestTrap15GoStats(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	s := n.Start("s1", stand.Options{Guest: full{&stand.Memory{}}, OldAgent: true}).Boot()
	for i, name := range []string{"plain", "a+b", "50%", "a%2Fb", "a&b=c?d", "a b", "ä#"} {
		d := volume(t, n, "u1", fmt.Sprint("v", i))
		device := filepath.Join(filepath.Dir(d.Device), name)
		if err := os.Rename(d.Device, device); err != nil {
			t.Fatal(err)
		}
		d.Device = device
		mustStage(t, h, d)
		use(t, s, d)
		stats, err := h.Stats(t.Context(), d.TargetPath, has(t, h, d, s))
		if err != nil || stats.Bytes.Total == 0 || stats.Bytes.Available != 0 || stats.Abnormal || stats.Message != "" {
			t.Errorf("%q: %+v, %v", name, stats, err)
		}
	}
}

// full is a guest whose filesystems have no space left.
type full struct{ *stand.Memory }

func (f full) Usage(v stand.Volume) (stand.Usage, error) {
	u, err := f.Memory.Usage(v)
	u.Free = 0
	return u, err
}

// shim answers on a socket as it is told.
func shim(t *testing.T, n *stand.Node, handler http.HandlerFunc) runtimehandler.Sandbox {
	t.Helper()
	path := n.Path("shim.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: handler}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	return runtimehandler.Sandbox{ID: "s1", Runtime: "kata-go", Address: path}
}

func TestAnswersThatAreNone(t *testing.T) {
	for name, tc := range map[string]struct {
		code int
		body string
	}{
		"the text of an error with 200":  {200, "mount /x not found in sandbox"},
		"an error with JSON":             {500, `{"usage":[{"total":10,"unit":1}]}`},
		"no bytes":                       {200, `{"usage":[{"total":10,"unit":2}]}`},
		"negative":                       {200, `{"usage":[{"total":-10,"unit":1}]}`},
		"more than there is":             {200, `{"usage":[{"total":10,"used":11,"unit":1}]}`},
		"a number that is none":          {200, `{"usage":[{"total":"10","unit":1}]}`},
		"more than anybody would answer": {200, strings.Repeat(" ", 8<<20)},
	} {
		t.Run(name, func(t *testing.T) {
			n := stand.New(t)
			h := newHandler(t, n, kata.Config{})
			d := volume(t, n, "u1", "v1")
			mustStage(t, h, d)
			sandbox := shim(t, n, func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path == "/metrics" {
					w.WriteHeader(http.StatusNotFound)
					return
				}
				w.WriteHeader(tc.code)
				fmt.Fprint(w, tc.body)
			})
			if stats, err := h.Stats(t.Context(), d.TargetPath, sandbox); !errdefs.IsFailedPrecondition(err) && !errdefs.IsUnavailable(err) {
				t.Errorf("stats: %+v, %v", stats, err)
			}
		})
	}
}

// TestExpandBody: both runtimes find their words in one body.
func TestExpandBody(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	d := volume(t, n, "u1", "v1")
	mustStage(t, h, d)
	bodies := make(chan map[string]any, 1)
	sandbox := shim(t, n, func(w http.ResponseWriter, r *http.Request) {
		var body map[string]any
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || !strings.HasPrefix(r.RequestURI, "http://") {
			t.Errorf("%s %s: %v", r.Method, r.RequestURI, err)
		}
		bodies <- body
		w.WriteHeader(http.StatusInternalServerError)
	})
	if _, err := h.Expand(t.Context(), d.TargetPath, sandbox, 0); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("expand: %v", err)
	}
	body := <-bodies
	if body["VolumePath"] != d.Device || body["Size"] != float64(d.SizeBytes) || body["size"] != float64(d.SizeBytes) {
		t.Errorf("body %v", body)
	}
	if _, ok := body["volume_guest_path"]; !ok {
		t.Errorf("body %v", body)
	}
}

// TestMetricsAreTheSecondSource: for several volumes of one sandbox each has its own.
func TestMetricsAreTheSecondSource(t *testing.T) {
	for _, kind := range []config.Runtime{config.Go, config.Rust} {
		t.Run(string(kind), func(t *testing.T) {
			n := stand.New(t)
			h := newHandler(t, n, kata.Config{})
			s := n.Start("s1", stand.Options{Runtime: kind, Guest: &stand.Memory{}}).Boot()
			for i, size := range []int64{64 << 20, 128 << 20, 256 << 20} {
				d := volume(t, n, "u1", fmt.Sprint("v", i))
				if err := os.Truncate(d.Device, size); err != nil {
					t.Fatal(err)
				}
				mustStage(t, h, d)
				if _, err := s.CreateContainer(fmt.Sprint("c", i), stand.Mount{Source: d.TargetPath, Destination: fmt.Sprint("/data/d", i)}); err != nil {
					t.Fatal(err)
				}
				sandbox := has(t, h, d, s)
				stats, err := h.MetricStats(t.Context(), d.TargetPath, d.Device, sandbox)
				if err != nil || stats.Bytes.Total != size/16*15 || stats.Inodes.Used != 11 {
					t.Errorf("volume %d: %+v, %v", i, stats, err)
				}
			}
		})
	}
}

// TestMountsThatEndAlike: two volumes of a pod at /a/data and /b/data cannot be told apart on runtime-rs, and are not.
func TestMountsThatEndAlike(t *testing.T) {
	n := stand.New(t)
	h := newHandler(t, n, kata.Config{})
	s := n.Start("s1", stand.Options{Runtime: config.Rust}).Boot()
	a, b := volume(t, n, "u1", "v1"), volume(t, n, "u1", "v2")
	for i, d := range []runtimehandler.Deferral{a, b} {
		mustStage(t, h, d)
		if _, err := s.CreateContainer(fmt.Sprint("c", i), stand.Mount{Source: d.TargetPath, Destination: fmt.Sprintf("/%d/data", i)}); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []runtimehandler.Deferral{a, b} {
		stats, err := h.Stats(t.Context(), d.TargetPath, has(t, h, d, s))
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), `"data"`) {
			t.Errorf("stats: %+v, %v", stats, err)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for name, c := range map[string]kata.Config{
		"name":     {Name: "Kata"},
		"root":     {Root: "x"},
		"runtime":  {Runtime: "c"},
		"step":     {HostAssist: []assist.Step{"mkfs"}},
		"endpoint": {CRIEndpoint: "tcp://x"},
		"timeout":  {CallTimeout: -1},
	} {
		if _, err := kata.New(c); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// FuzzMetrics: whatever a guest reports, no number is negative that is said to be a number.
func FuzzMetrics(f *testing.F) {
	f.Add("kata_guest_filesystem_bytes{mount=\"/a\",device=\"vdb\",item=\"total\"} 10\n")
	f.Add("kata_guest_filesystem_inodes{mount=\"\",item=\"used\"} -Inf\nkata_guest_filesystem_bytes{} 1e300\n")
	f.Fuzz(func(t *testing.T, text string) {
		for _, u := range kata.ParseMetrics(text) {
			for _, v := range []int64{u.Total, u.Used, u.Available} {
				if v < -1 {
					t.Errorf("%q reads as %+v", text, u)
				}
			}
		}
	})
}

// FuzzStats: an answer is refused, or adds up.
func FuzzStats(f *testing.F) {
	f.Add(`{"usage":[{"available":5,"total":10,"used":5,"unit":1},{"total":100,"used":100,"unit":2}],"volume_condition":{"message":"OK"}}`)
	f.Fuzz(func(t *testing.T, text string) {
		stats, err := kata.ParseStats(text)
		if err != nil {
			return
		}
		for _, u := range []runtimehandler.Usage{stats.Bytes, stats.Inodes} {
			if u.Total < 0 || u.Used < 0 || u.Available < 0 || u.Used > u.Total || u.Available > u.Total {
				t.Errorf("%q reads as %+v", text, stats)
			}
		}
	})
}

// FuzzBundle: reading an OCI configuration ends.
func FuzzBundle(f *testing.F) {
	f.Add(`{"annotations":{"io.kubernetes.cri.sandbox-id":"s"},"mounts":[{"type":"bind","source":"/a","destination":"/b"}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		for _, source := range kata.ParseBundle(text) {
			if !filepath.IsAbs(source) {
				t.Errorf("%q has source %q", text, source)
			}
		}
	})
}
