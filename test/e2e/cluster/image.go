package cluster

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Image is the only image of the cluster: Debian's static busybox, which sleeps if it is not told what to do, so that it
// serves as sandbox image, too. Nothing can be pulled, so pods need imagePullPolicy: Never.
const Image = "crust.dev/test/busybox:1"

const busybox = "/bin/busybox"

// writeImage writes the image as an archive that containerd imports.
func writeImage(file string) error {
	content, err := os.ReadFile(busybox)
	if err != nil {
		return fmt.Errorf("%w; install Debian's package busybox-static", err)
	}
	applets, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("%s --list: %w", busybox, err)
	}
	links := strings.Fields(string(applets))
	files := map[string][]byte{"bin/busybox": content, "etc/passwd": []byte("root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:user:/home:/bin/sh\n")}
	return archive(file, Image, files, links, v1.Config{Cmd: []string{"/bin/sleep", "2147483647"}, Env: []string{"PATH=/bin"}})
}

// writeProgramImage writes an image of the given name that has one static program, as sidecars do.
func writeProgramImage(file, image, program string) error {
	content, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	base := filepath.Base(program)
	return archive(file, image, map[string][]byte{base: content}, nil, v1.Config{Entrypoint: []string{"/" + base}})
}

// archive writes an image with files, and with links to busybox.
func archive(file, image string, files map[string][]byte, links []string, run v1.Config) error {
	layer, err := writeLayer(files, links)
	if err != nil {
		return err
	}
	added, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer)), nil })
	if err != nil {
		return err
	}
	img, err := mutate.AppendLayers(empty.Image, added)
	if err != nil {
		return err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return err
	}
	config.OS, config.Architecture, config.Config = "linux", runtime.GOARCH, run
	if img, err = mutate.ConfigFile(img, config); err != nil {
		return err
	}
	tag, err := name.NewTag(image)
	if err != nil {
		return err
	}
	return tarball.WriteToFile(file, tag, img)
}

func writeLayer(files map[string][]byte, links []string) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	var errs []error
	for _, dir := range []string{"bin/", "etc/", "proc/", "sys/", "dev/", "tmp/", "root/"} {
		errs = append(errs, w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}))
	}
	for name, data := range files {
		errs = append(errs, w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(data))}))
		_, err := w.Write(data)
		errs = append(errs, err)
	}
	for _, link := range links {
		if link != "busybox" {
			errs = append(errs, w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + link, Linkname: "busybox"}))
		}
	}
	return b.Bytes(), errors.Join(append(errs, w.Close())...)
}
