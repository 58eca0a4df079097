package command

import (
	"strings"
	"sync"
)

// head keeps the first bytes that are written to it.
type head struct {
	limit int
	kept  []byte
}

func (h *head) Write(b []byte) (int, error) {
	h.kept = append(h.kept, b[:min(len(b), h.limit-len(h.kept))]...)
	return len(b), nil
}

func (h *head) String() string { return string(h.kept) }

// tail keeps the last bytes that are written to it. Two streams may share one.
type tail struct {
	limit int

	mu   sync.Mutex
	kept []byte
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.kept = append(t.kept, b[max(0, len(b)-t.limit):]...)
	t.kept = t.kept[max(0, len(t.kept)-t.limit):]
	return len(b), nil
}

// String returns what was kept, in valid UTF-8 and on one line.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := strings.ToValidUTF8(strings.TrimSpace(string(t.kept)), "?")
	return strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' }), " | ")
}

// both writes to two writers that never fail.
type both [2]interface{ Write([]byte) (int, error) }

func (b both) Write(p []byte) (int, error) {
	_, _ = b[0].Write(p)
	return b[1].Write(p)
}
