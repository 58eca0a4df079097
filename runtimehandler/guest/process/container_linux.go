package process

import (
	"fmt"
	"os/exec"
	"path"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// Container is what makes a command one of a container's.
type Container struct {
	// Root is the root directory of the container, in which Argv and Dir of the command are paths.
	Root string
	// UID, GID and Groups are who the command is.
	UID, GID uint32
	Groups   []uint32
	// Join is the name of a container's first command, with which this one ends. Empty: this one is the first.
	Join string
}

// containerCommand is the command of a container, not yet in its group.
func (s Spec) containerCommand() (*exec.Cmd, error) {
	c := s.Container
	dir := s.Dir
	if dir == "" {
		dir = "/"
	}
	root, err := unix.Open(c.Root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("root %s: %w: %w", c.Root, err, errdefs.ErrNotFound)
	}
	defer unix.Close(root)
	if st, err := statIn(root, dir); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, fmt.Errorf("working directory %s does not exist in the container: %w", dir, errdefs.ErrNotFound)
	}
	program, err := lookPathIn(root, s.Argv[0], dir, s.Env)
	if err != nil {
		return nil, err
	}
	return &exec.Cmd{
		Path: program,
		Args: s.Argv,
		Env:  append([]string{}, s.Env...), // nil would be ours
		Dir:  dir,
		SysProcAttr: &syscall.SysProcAttr{
			Setsid:     true,
			Chroot:     c.Root,
			Credential: &syscall.Credential{Uid: c.UID, Gid: c.GID, Groups: c.Groups},
		},
	}, nil
}

// statIn looks at a path as a process would whose root directory is root.
func statIn(root int, name string) (unix.Stat_t, error) {
	var st unix.Stat_t
	fd, err := unix.Openat2(root, name, &unix.OpenHow{
		Flags:   unix.O_PATH | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS,
	})
	if err != nil {
		return st, err
	}
	defer unix.Close(fd)
	return st, unix.Fstat(fd, &st)
}

// lookPathIn is lookPath in a container.
func lookPathIn(root int, name, dir string, env []string) (string, error) {
	dirs := []string{dir}
	if !strings.Contains(name, "/") {
		dirs = nil
		for _, e := range env {
			if list, ok := strings.CutPrefix(e, "PATH="); ok {
				dirs = strings.Split(list, ":") // the last one counts
			}
		}
	}
	for _, d := range dirs {
		program := name
		if !path.IsAbs(name) {
			program = path.Join(dir, d, name)
			if path.IsAbs(d) {
				program = path.Join(d, name)
			}
		}
		if st, err := statIn(root, program); err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Mode&0o111 != 0 {
			return program, nil
		}
	}
	return "", fmt.Errorf("program %q is not in the container, or is not executable (PATH=%s): %w", name, strings.Join(dirs, ":"), errdefs.ErrNotFound)
}

// startIn starts a command in a group.
func (g *group) startIn(cmd *exec.Cmd) error {
	return g.use(func(fd int) error {
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, fd
		return cmd.Start()
	})
}
