package csiplugin

import (
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// parsePath reads a required path of a request: absolute and without ".." (CSI only says absolute; where the other leads
// depends on what is mounted). It comes back in its shortest form. Errors are ErrInvalidArgument.
func parsePath(field, text string) (string, error) {
	switch {
	case text == "":
		return "", invalid("%s is missing", field)
	case len(text) >= unix.PathMax:
		return "", invalid("%s has %d bytes; the kernel takes %d", field, len(text), unix.PathMax-1)
	case strings.ContainsRune(text, 0):
		return "", invalid("%s has a zero byte in it", field)
	case !filepath.IsAbs(text):
		return "", invalid("%s %q is not absolute", field, text)
	case slices.Contains(strings.Split(text, "/"), ".."):
		return "", invalid("%s %q has a component ..", field, text)
	case filepath.Clean(text) == "/":
		return "", invalid("%s is the root directory", field)
	}
	return filepath.Clean(text), nil
}
