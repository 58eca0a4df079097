package process

import (
	"context"
	"io"
	"sync"
)

// maxBuffered is how much of a stream is kept, in bytes.
const maxBuffered = 256 << 10

// MaxChunk is how much of a stream is handed over at a time, in bytes. A page of it fits into a ttrpc message many times.
const MaxChunk = 64 << 10

// buffer is a bounded queue of bytes between a pipe and somebody who comes for them now and then.
type buffer struct {
	mu      sync.Mutex
	data    []byte
	ended   bool          // nothing will be added any more
	broken  bool          // nobody takes anything any more
	changed chan struct{} // closed and replaced at every change
}

func newBuffer() *buffer { return &buffer{changed: make(chan struct{})} }

// update changes the buffer under its lock and wakes everybody who waits.
func (b *buffer) update(fn func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	fn()
	b.wake()
}

func (b *buffer) wake() {
	close(b.changed)
	b.changed = make(chan struct{})
}

// take returns up to n bytes, whether there will never be more, and what to wait for if there are none.
func (b *buffer) take(n int) (data []byte, end bool, changed <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n = min(n, len(b.data)); n > 0 {
		data = append(data, b.data[:n]...)
		b.data = b.data[:copy(b.data, b.data[n:])]
		b.wake()
	}
	return data, b.ended && len(b.data) == 0, b.changed
}

// room waits until there is room for n bytes. It returns false if nobody takes any, or ctx has ended.
func (b *buffer) room(ctx context.Context, n int) bool {
	for {
		b.mu.Lock()
		free, broken, changed := maxBuffered-len(b.data), b.broken, b.changed
		b.mu.Unlock()
		if broken {
			return false
		}
		if free >= n {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

// fill copies from a pipe until it ends. It reads only when there is room for what it reads.
func (b *buffer) fill(ctx context.Context, from io.Reader) {
	chunk := make([]byte, MaxChunk/2)
	for b.room(ctx, len(chunk)) {
		n, err := from.Read(chunk)
		b.update(func() { b.data = append(b.data, chunk[:n]...) })
		if err != nil {
			break
		}
	}
	b.update(func() { b.ended = true })
}

// drain copies to a pipe until there is nothing more to come, or the pipe takes no more, and closes it.
func (b *buffer) drain(ctx context.Context, to io.WriteCloser) {
	defer func() {
		_ = to.Close()
		b.update(func() { b.broken = true })
	}()
	for {
		b.mu.Lock()
		pending, ended, changed := append([]byte(nil), b.data...), b.ended, b.changed
		b.mu.Unlock()
		if len(pending) == 0 {
			if ended {
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
			continue
		}
		n, err := to.Write(pending)
		b.update(func() { b.data = b.data[:copy(b.data, b.data[n:])] })
		if err != nil {
			return
		}
	}
}
