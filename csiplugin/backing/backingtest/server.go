package backingtest

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// Server is an HTTP server that misbehaves as it is told. Its address is 127.0.0.1.
type Server struct {
	*httptest.Server

	mu       sync.Mutex
	requests []*http.Request
}

// Serve starts a server whose requests go to handler, with a number that counts from 1. It ends with the test.
func Serve(t testing.TB, handler func(n int, w http.ResponseWriter, r *http.Request)) *Server {
	t.Helper()
	s := &Server{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.requests = append(s.requests, r)
		n := len(s.requests)
		s.mu.Unlock()
		handler(n, w, r)
	}))
	t.Cleanup(s.Close)
	return s
}

// Requests are the requests that have come.
func (s *Server) Requests() []*http.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]*http.Request(nil), s.requests...)
}

// File serves content as a good server does: with length, an entity tag, and ranges.
func File(content []byte) func(n int, w http.ResponseWriter, r *http.Request) {
	return func(_ int, w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", Tag(content))
		http.ServeContent(w, r, "", time.Time{}, strings.NewReader(string(content)))
	}
}

// Tag is an entity tag for content.
func Tag(content []byte) string { return fmt.Sprintf(`"%x"`, len(content)*31+int(content[0])) }

// BreakOff sends the header of the whole answer and some bytes of it, and then closes the connection.
func BreakOff(w http.ResponseWriter, header, body string) {
	conn, rw, err := w.(http.Hijacker).Hijack()
	if err != nil {
		panic(err)
	}
	_, _ = rw.WriteString(header + "\r\n" + body)
	_ = rw.Flush()
	_ = conn.Close()
}
