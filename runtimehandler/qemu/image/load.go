package image

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// indexName is the file in an image's directory that names its parts.
const indexName = "image.json"

// Save notes in a directory which image is there, for [Load], and returns what it has written.
func (i Image) Save(dir string) ([]byte, error) {
	raw, err := json.Marshal(i)
	if err != nil {
		return nil, fmt.Errorf("guest image: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, indexName), append(raw, '\n'), 0o644); err != nil {
		return nil, fmt.Errorf("guest image: %w", err)
	}
	return raw, nil
}

// Load finds the image that was made in a directory.
func Load(dir string) (Image, error) {
	var i Image
	raw, err := os.ReadFile(filepath.Join(dir, indexName))
	if err != nil {
		return i, fmt.Errorf("no guest image: %w; make one with: crust-sandbox image --out %s", err, dir)
	}
	if err := json.Unmarshal(raw, &i); err != nil {
		return i, fmt.Errorf("%s: %w; make it again with: crust-sandbox image --out %s", filepath.Join(dir, indexName), err, dir)
	}
	return i, nil
}
