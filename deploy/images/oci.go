package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// epoch is the time of everything, so that the same content is the same bytes.
var epoch = time.Unix(0, 0).UTC()

const billType = "application/vnd.cyclonedx+json"

// image makes an image with one layer.
func (c config) image(arch string, r *rootfs) (v1.Image, error) {
	content, err := layer(r.files)
	if err != nil {
		return nil, err
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil },
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return nil, err
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	if img, err = mutate.Append(img, mutate.Addendum{Layer: l, History: v1.History{Created: v1.Time{Time: epoch}, CreatedBy: "deploy/images"}}); err != nil {
		return nil, err
	}
	return mutate.ConfigFile(img, c.configFile(arch, img))
}

func (c config) configFile(arch string, img v1.Image) *v1.ConfigFile {
	file, err := img.ConfigFile()
	if err != nil {
		panic(err) // it is in memory
	}
	file = file.DeepCopy()
	file.Architecture, file.OS, file.Created = arch, "linux", v1.Time{Time: epoch}
	file.Config = v1.Config{
		Env: []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin", "LC_ALL=C", "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"},
		Cmd: []string{"/usr/local/bin/crustd", "--help"},
		Labels: map[string]string{
			"org.opencontainers.image.title": "crust-node", "org.opencontainers.image.version": c.version, "org.opencontainers.image.licenses": "Apache-2.0",
		},
	}
	return file
}

// layer is a tar archive of files, sorted by name, all of them root's.
func layer(files map[string]entry) ([]byte, error) {
	var names []string
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	var b bytes.Buffer
	t := tar.NewWriter(&b)
	for _, name := range names {
		if err := write(t, name, files[name]); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), t.Close()
}

func write(t *tar.Writer, name string, e entry) error {
	h := &tar.Header{Format: tar.FormatPAX, Name: strings.TrimPrefix(name, "/"), ModTime: epoch, Mode: int64(e.mode.Perm())}
	if e.mode&fs.ModeSticky != 0 {
		h.Mode |= 0o1000
	}
	data := e.data
	switch {
	case e.dir:
		h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"
	case e.link != "":
		h.Typeflag, h.Linkname = tar.TypeSymlink, e.link
	default:
		h.Typeflag = tar.TypeReg
		if e.path != "" {
			var err error
			if data, err = os.ReadFile(e.path); err != nil {
				return err
			}
		}
		h.Size = int64(len(data))
	}
	if err := t.WriteHeader(h); err != nil {
		return err
	}
	_, err := t.Write(data)
	return err
}

// archive writes an OCI archive: one index with the images by architecture, and behind them their bills of materials.
func (c config) archive(file, work string, images map[string]v1.Image, bills map[string][]byte) (v1.Hash, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	var attached []mutate.IndexAddendum
	for _, arch := range c.arches {
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: images[arch], Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
		artifact, err := attach(images[arch], bills[arch])
		if err != nil {
			return v1.Hash{}, err
		}
		// So that nobody takes it for an image to run.
		attached = append(attached, mutate.IndexAddendum{Add: artifact, Descriptor: v1.Descriptor{ArtifactType: billType, Platform: &v1.Platform{OS: "unknown", Architecture: "unknown"}}})
	}
	index = mutate.AppendManifests(index, attached...)
	tag := c.name[strings.LastIndex(c.name, ":")+1:]
	p, err := layout.Write(work, empty.Index)
	if err != nil {
		return v1.Hash{}, err
	}
	// The one name is for tools that ask for a tag, the other for containerd.
	if err := p.AppendIndex(index, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": tag, "io.containerd.image.name": c.name})); err != nil {
		return v1.Hash{}, err
	}
	digest, err := index.Digest()
	if err != nil {
		return digest, err
	}
	return digest, pack(file, work)
}

// attach makes an artifact of a bill of materials that refers to its image (OCI 1.1).
func attach(img v1.Image, bill []byte) (v1.Image, error) {
	subject, err := partial.Descriptor(img)
	if err != nil {
		return nil, err
	}
	artifact := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), billType)
	if artifact, err = mutate.Append(artifact, mutate.Addendum{Layer: static.NewLayer(bill, billType)}); err != nil {
		return nil, err
	}
	with, ok := mutate.Subject(artifact, *subject).(v1.Image)
	if !ok {
		return nil, errors.New("a subject makes something else of an image")
	}
	return with, nil
}

// pack makes one file of a directory.
func pack(file, dir string) (err error) {
	files := map[string]entry{}
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, err := filepath.Rel(dir, path)
		files["/"+name] = entry{path: path, dir: d.IsDir(), mode: 0o644}
		if d.IsDir() {
			files["/"+name] = entry{dir: true, mode: 0o755}
		}
		return err
	})
	if err != nil {
		return err
	}
	content, err := layer(files)
	if err != nil {
		return err
	}
	temp := file + ".part"
	if err := os.WriteFile(temp, content, 0o644); err != nil {
		return err
	}
	return os.Rename(temp, file)
}
