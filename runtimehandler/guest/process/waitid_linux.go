package process

import (
	"errors"
	"unsafe"

	"golang.org/x/sys/unix"
)

// siginfoChild is siginfo_t as waitid(2) fills it in on 64-bit machines. Package unix keeps the union to itself.
type siginfoChild struct {
	signo, errno, code int32
	_                  int32
	pid                int32
	uid                uint32
	status             int32
	_                  [100]byte
}

// The values of si_code for a child (sigaction(2)).
const cldExited = 1

// signalBase is added to the number of the signal that has ended a process, as shells do.
const signalBase = 128

// waitExit waits until a child has ended, leaves it uncollected, and returns its exit code. Only this process may collect
// the child, and not before.
func waitExit(pid int) int {
	var info siginfoChild
	for {
		err := unix.Waitid(unix.P_PID, pid, (*unix.Siginfo)(unsafe.Pointer(&info)), unix.WEXITED|unix.WNOWAIT, nil)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return signalBase // not our child: a broken invariant, and no reason to take the agent down
		}
	}
	if info.code == cldExited {
		return int(info.status)
	}
	return signalBase + int(info.status)
}
