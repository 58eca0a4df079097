package kata

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"
)

// serveGo serves the Go runtime's management API, with net/http as that does.
func (s *Sandbox) serveGo(l net.Listener) {
	mux := http.NewServeMux()
	mux.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) {
		s.wait()
		text, err := s.metrics()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprint(w, text)
	})
	mux.HandleFunc("/direct-volume/stats", s.goStats)
	mux.HandleFunc("/direct-volume/resize", s.goResize)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	_ = server.Serve(l)
	_ = server.Close()
}

// goStats decodes the query, and unescapes what is in it once more.
func (s *Sandbox) goStats(w http.ResponseWriter, r *http.Request) {
	s.wait()
	values, ok := r.URL.Query()["path"]
	if !ok || len(values) == 0 {
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprint(w, "Required parameter path not found")
		return
	}
	fail := func(err error) {
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprint(w, err)
	}
	path, err := url.PathUnescape(values[0])
	if err != nil {
		fail(err)
		return
	}
	if _, err := os.Stat(path); err != nil {
		fail(err)
		return
	}
	v, u, err := s.usage(func(v attached) bool { return v.Device == path })
	switch {
	case err != nil:
		fail(err)
	case s.Policy:
		fail(errors.New("rpc error: code = PermissionDenied desc = \"VolumeStatsRequest is blocked by policy\""))
	default:
		_ = v
		// The fields of protobuf's JSON that are zero are left out.
		_ = json.NewEncoder(w).Encode(map[string]any{
			"usage": []map[string]int64{
				nonZero(map[string]int64{"available": u.Free, "total": u.Total, "used": u.Total - u.Free, "unit": 1}),
				nonZero(map[string]int64{"available": u.FreeInodes, "total": u.Inodes, "used": u.Inodes - u.FreeInodes, "unit": 2}),
			},
			"volume_condition": map[string]string{"message": "OK"},
		})
	}
}

func nonZero(m map[string]int64) map[string]int64 {
	for k, v := range m {
		if v == 0 {
			delete(m, k)
		}
	}
	return m
}

func (s *Sandbox) usage(is func(attached) bool) (attached, Usage, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range s.volumes {
		if is(v) {
			u, err := s.Guest.Usage(v.Volume)
			return v, u, err
		}
	}
	return attached{}, Usage{}, errors.New("mount not found in sandbox")
}

// goResize forwards the request to the agent, which cannot do it.
func (s *Sandbox) goResize(w http.ResponseWriter, r *http.Request) {
	s.wait()
	var req struct {
		VolumePath string
		Size       uint64
	}
	err := json.NewDecoder(r.Body).Decode(&req)
	if err == nil {
		err = s.resize(func(v attached) bool { return v.Device == req.VolumePath })
	}
	if err != nil {
		w.WriteHeader(http.StatusInternalServerError)
		fmt.Fprint(w, err)
	}
}

func (s *Sandbox) resize(is func(attached) bool) error {
	v, _, err := s.usage(is)
	switch {
	case err != nil:
		return err
	case s.OldAgent:
		return errors.New("rpc error: code = NotFound desc = /grpc.AgentService/ResizeVolume is not supported")
	case !s.CanResize:
		return errors.New("rpc error: code = Unimplemented desc = resize_volume is not implemented in kata-agent")
	}
	return s.Guest.Resize(v.Volume)
}

// serveRust serves the management API of runtime-rs, which is stricter about requests and closes the connection when it
// fails.
func (s *Sandbox) serveRust(l net.Listener) {
	var conns sync.WaitGroup
	defer conns.Wait()
	for {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		conns.Go(func() {
			defer conn.Close()
			req, err := http.ReadRequest(bufio.NewReader(conn))
			if err != nil {
				return
			}
			body, err := io.ReadAll(req.Body)
			if err != nil {
				return
			}
			s.wait()
			if code, text, ok := s.answerRust(req, body); ok {
				resp := http.Response{StatusCode: code, ProtoMajor: 1, ProtoMinor: 1, ContentLength: int64(len(text)), Body: io.NopCloser(strings.NewReader(text)), Close: true}
				_ = resp.Write(conn)
			}
		})
	}
}

func (s *Sandbox) answerRust(req *http.Request, body []byte) (code int, text string, ok bool) {
	absolute := strings.HasPrefix(req.RequestURI, "http://")
	switch req.Method + " " + req.URL.Path {
	case "GET /metrics":
		text, err := s.metrics()
		return http.StatusOK, text, err == nil
	case "POST /direct-volume/stats":
		path := req.URL.Query().Get("path")
		_, u, err := s.usage(func(v attached) bool { return v.Path == path })
		return http.StatusOK, fmt.Sprintf("Usage: [VolumeUsage { available: %d, total: %d }] Volume Condition: VolumeCondition { abnormal: false }", u.Free, u.Total),
			absolute && err == nil && !s.Policy
	case "POST /direct-volume/resize":
		var r struct {
			Path string `json:"volume_guest_path"`
			Size uint64 `json:"size"`
		}
		err := json.Unmarshal(body, &r)
		if err == nil {
			err = s.resize(func(v attached) bool { return v.Path == r.Path })
		}
		return http.StatusOK, "", absolute && err == nil
	}
	return http.StatusNotFound, "URL NOT FOUND", true
}

// metrics are those of the agent among others. It reports each device once, and no filesystem that is mounted read-only.
func (s *Sandbox) metrics() (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.up || s.Policy {
		return "", errors.New("the agent does not answer")
	}
	text := "# HELP kata_shim_threads Kata containerd shim v2 process threads.\n# TYPE kata_shim_threads gauge\nkata_shim_threads 14\n# TYPE kata_shim_threads gauge\n"
	if s.OldAgent {
		return text, nil
	}
	text += "# HELP kata_guest_filesystem_bytes Guest filesystem usage in bytes.\n# TYPE kata_guest_filesystem_bytes gauge\n"
	text += `kata_guest_filesystem_bytes{mount="/",device="pmem0p1",item="total"} 1.0e+08` + "\n"
	for i, v := range s.volumes {
		if v.ReadOnly {
			continue
		}
		u, err := s.Guest.Usage(v.Volume)
		if err != nil {
			continue
		}
		add := func(metric, item string, value int64) {
			text += fmt.Sprintf("%s{mount=%q,device=\"vd%c\",item=%q} %d\n", metric, v.Path, 'b'+i, item, value)
		}
		for metric, values := range map[string][2]int64{"kata_guest_filesystem_bytes": {u.Total, u.Free}, "kata_guest_filesystem_inodes": {u.Inodes, u.FreeInodes}} {
			add(metric, "total", values[0])
			add(metric, "used", values[0]-values[1])
			add(metric, "available", values[1])
		}
	}
	return text, nil
}
