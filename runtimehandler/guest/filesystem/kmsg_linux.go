package filesystem

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// maxKernelLines is how many of the kernel's messages an error carries; the last ones.
const maxKernelLines = 6

// kernelLog collects what the kernel has to say about a device from now on. Filesystems write most of what is wrong into
// the kernel's log and not into the file descriptor of the mount. Without a log it collects nothing.
type kernelLog struct{ fd int }

func openKernelLog() kernelLog {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return kernelLog{fd: -1}
	}
	if _, err := unix.Seek(fd, 0, unix.SEEK_END); err != nil {
		_ = unix.Close(fd)
		return kernelLog{fd: -1}
	}
	return kernelLog{fd: fd}
}

func (l kernelLog) close() {
	if l.fd >= 0 {
		_ = unix.Close(l.fd)
	}
}

// about returns the last lines that name the device, each once.
func (l kernelLog) about(device string) []string {
	if l.fd < 0 {
		return nil
	}
	var lines []string
	record := make([]byte, os.Getpagesize()*2) // the kernel never has a longer one (dev-kmsg)
	for {
		n, err := unix.Read(l.fd, record)
		if err == unix.EPIPE || err == unix.EINTR {
			continue // records were overwritten: go on with the next
		}
		if err != nil || n <= 0 {
			break
		}
		if text := kernelText(string(record[:n])); strings.Contains(text, device+")") {
			lines = append(lines, text)
		}
	}
	return lines[max(0, len(lines)-maxKernelLines):]
}

// kernelText returns the text of a record of /dev/kmsg: what is between the semicolon and the end of the line.
func kernelText(record string) string {
	_, text, _ := strings.Cut(record, ";")
	text, _, _ = strings.Cut(text, "\n")
	return text
}
