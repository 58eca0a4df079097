package qemu

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"unicode"
)

// The console's log is two files, so that a guest that writes without end costs twice this much disk and no more.
const (
	consoleName   = "console.log"
	consoleBefore = "console.log.1"
	maxConsole    = 512 << 10 // of each file, in bytes
	maxTail       = 8 << 10   // of what is kept in memory, in bytes
)

// consoleLog is an endless log in a bounded space. It never fails to take what comes: a console that nobody reads would
// stop the guest.
type consoleLog struct {
	dir string

	mu      sync.Mutex
	file    *os.File
	written int
	tail    []byte
}

func openConsole(dir string) (*consoleLog, error) {
	l := &consoleLog{dir: dir}
	if err := l.open(); err != nil {
		return nil, fmt.Errorf("console: %w", err)
	}
	return l, nil
}

func (l *consoleLog) open() (err error) {
	l.written = 0
	l.file, err = os.OpenFile(filepath.Join(l.dir, consoleName), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	return err
}

// copyFrom takes everything until the console ends.
func (l *consoleLog) copyFrom(r io.Reader) {
	buf := make([]byte, 16<<10)
	for {
		n, err := r.Read(buf)
		l.write(buf[:n])
		if err != nil {
			return
		}
	}
}

// write keeps the end in memory whatever happens to the file.
func (l *consoleLog) write(b []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tail = append(l.tail, b...)
	l.tail = l.tail[max(0, len(l.tail)-maxTail):]
	if l.file == nil {
		return
	}
	if l.written+len(b) > maxConsole && !l.rotate() {
		return
	}
	n, err := l.file.Write(b)
	l.written += n
	if err != nil { // the disk is full: the guest must not notice
		_ = l.file.Close()
		l.file = nil
	}
}

func (l *consoleLog) rotate() bool {
	err := errors.Join(l.file.Close(), os.Rename(filepath.Join(l.dir, consoleName), filepath.Join(l.dir, consoleBefore)))
	if err == nil {
		err = l.open()
	}
	if err != nil {
		l.file = nil
	}
	return err == nil
}

func (l *consoleLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file != nil {
		_ = l.file.Close()
		l.file = nil
	}
}

// last returns the end of the console's text, for a person.
func (l *consoleLog) last() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Printable(string(l.tail))
}

// The states of the reader of control sequences (ECMA-48 and what xterm makes of it).
const (
	plain   = iota
	escape  // after ESC
	control // in a control sequence, until its final byte
	command // in an operating system command, until BEL or ESC
	single  // before the one byte that ends a short sequence
)

// Printable takes control sequences out of a console's text: it is the guest's, and must not talk to the terminal of who
// reads it.
func Printable(text string) string {
	var b strings.Builder
	state := plain
	for _, r := range strings.ToValidUTF8(text, "?") {
		switch {
		case r == 0x1b:
			state = escape
		case r == '\n':
			state = plain // whatever was begun: a line is a line
			b.WriteRune(r)
		case state == escape:
			state = map[rune]int{'[': control, ']': command, '(': single, ')': single, '#': single}[r]
		case state == control:
			if r >= '@' && r <= '~' {
				state = plain
			}
		case state == command:
			if r == '\a' {
				state = plain
			}
		case state == single:
			state = plain
		case r == '\t' || !unicode.IsControl(r):
			b.WriteRune(r)
		}
	}
	return b.String()
}
