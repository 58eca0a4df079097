package kata

import (
	"cmp"
	"encoding/json"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// use is one mount of one container.
type use struct {
	Sandbox             string
	Source, Destination string
	Since               time.Time // when the container was made
}

// bundles reads the OCI configurations that the container runtime has written for its containers. They say which mount
// sources a sandbox was given, whatever Kata has made of them.
type bundles struct {
	patterns []string

	mu    sync.Mutex
	cache map[string]bundle // by path; a configuration does not change, but its name may be used again
}

type bundle struct {
	modified time.Time
	uses     []use
}

func newBundles(patterns []string) *bundles {
	return &bundles{patterns: patterns, cache: map[string]bundle{}}
}

// maxBundle is the largest configuration that is read, in bytes.
const maxBundle = 8 << 20

// all returns the bind mounts of all containers that belong to sandboxes, by sandbox. A configuration that cannot be read,
// or that is just being written, counts as not being there yet.
func (b *bundles) all() map[string][]use {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := make(map[string]bundle, len(b.cache))
	uses := map[string][]use{}
	for _, pattern := range b.patterns {
		paths, _ := filepath.Glob(pattern) // fails for a bad pattern only
		for _, path := range paths {
			have, ok := b.read(path)
			if !ok {
				continue
			}
			now[path] = have
			for _, u := range have.uses {
				uses[u.Sandbox] = append(uses[u.Sandbox], u)
			}
		}
	}
	b.cache = now
	return uses
}

// read returns what is in one configuration, from the cache if it is still the same.
func (b *bundles) read(path string) (bundle, bool) {
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() || info.Size() > maxBundle {
		return bundle{}, false
	}
	if have, ok := b.cache[path]; ok && have.modified.Equal(info.ModTime()) {
		return have, true
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return bundle{}, false
	}
	uses, err := parseBundle(raw, info.ModTime())
	return bundle{modified: info.ModTime(), uses: uses}, err == nil
}

// sandboxAnnotations are where containerd and CRI-O say to which sandbox a container belongs.
var sandboxAnnotations = []string{"io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"}

// parseBundle reads an OCI configuration. A container that belongs to no sandbox has no uses.
func parseBundle(raw []byte, since time.Time) ([]use, error) {
	var spec struct {
		Annotations map[string]string `json:"annotations"`
		Mounts      []struct {
			Source      string `json:"source"`
			Destination string `json:"destination"`
			Type        string `json:"type"`
		} `json:"mounts"`
	}
	if err := json.Unmarshal(raw, &spec); err != nil {
		return nil, err
	}
	sandbox := ""
	for _, key := range sandboxAnnotations {
		sandbox = cmp.Or(sandbox, spec.Annotations[key])
	}
	if sandbox == "" {
		return nil, nil
	}
	var uses []use
	for _, m := range spec.Mounts {
		if m.Type == "bind" && filepath.IsAbs(m.Source) {
			uses = append(uses, use{Sandbox: sandbox, Source: m.Source, Destination: m.Destination, Since: since})
		}
	}
	return uses, nil
}
