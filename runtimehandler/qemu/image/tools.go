package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/containerd/errdefs"
)

// toolDirs are where tools are looked for under the root.
var toolDirs = []string{"usr/sbin", "usr/bin", "sbin", "bin"}

// tools are the programs of the image by the Debian package that has them. The agent needs those of the first three; the
// others are for people who look into a sandbox, and for tests.
var tools = []struct {
	pkg   string
	names []string
}{
	{"e2fsprogs", []string{"mkfs.ext4", "e2fsck"}},
	{"xfsprogs", []string{"mkfs.xfs", "xfs_repair"}},
	{"util-linux", []string{"blkid", "dmesg", "lsblk", "blockdev", "findmnt", "setsid", "unshare"}},
	{"mount", []string{"mount", "umount"}},
	{"dash", []string{"sh"}},
	{"coreutils", []string{
		"basename", "cat", "chgrp", "chmod", "chown", "cp", "cut", "date", "dd", "df", "dirname", "du", "echo", "env", "expr",
		"false", "head", "id", "ln", "ls", "mkdir", "mkfifo", "mktemp", "mv", "od", "printf", "pwd", "readlink", "realpath",
		"rm", "rmdir", "seq", "sha256sum", "sleep", "sort", "stat", "sync", "tail", "tee", "test", "timeout", "touch", "tr",
		"true", "truncate", "uname", "uniq", "wc", "yes",
	}},
	{"grep", []string{"grep"}},
	{"sed", []string{"sed"}},
	{"findutils", []string{"find", "xargs"}},
}

// findTool returns where a tool is under the root. ErrNotFound, naming the package to install, if it is missing.
func findTool(root, name, pkg string) (string, error) {
	for _, dir := range toolDirs {
		path := filepath.Join(root, dir, name)
		info, err := os.Stat(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("guest image: %w", err)
		}
		if info.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", fmt.Errorf("guest image: there is no %s under %s; install Debian's package %s (apt-get install %s): %w",
		name, root, pkg, pkg, errdefs.ErrNotFound)
}
