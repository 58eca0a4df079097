package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// bill is the bill of materials of an image: Debian's packages that files are from, with the digests of the packages, and the
// modules that our programs were built of, as they say themselves.
func (c config) bill(arch string, r *rootfs) ([]byte, error) {
	var components []cdx.Component
	for _, d := range r.used() {
		content, err := os.ReadFile(d.path)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(content)
		purl := fmt.Sprintf("pkg:deb/debian/%s@%s?arch=%s", d.name, strings.ReplaceAll(d.version, "+", "%2B"), d.architecture)
		components = append(components, cdx.Component{
			BOMRef: purl, Type: cdx.ComponentTypeLibrary, Name: d.name, Version: d.version, PackageURL: purl,
			Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
		})
	}
	modules := map[string]cdx.Component{}
	for _, program := range r.programs {
		info, err := buildinfo.ReadFile(program)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", program, err)
		}
		add := func(path, version string) {
			purl := "pkg:golang/" + path + "@" + version
			modules[purl] = cdx.Component{BOMRef: purl, Type: cdx.ComponentTypeLibrary, Name: path, Version: version, PackageURL: purl}
		}
		add("std", strings.TrimPrefix(info.GoVersion, "go"))
		for _, m := range info.Deps {
			add(m.Path, m.Version)
		}
	}
	for _, m := range modules {
		components = append(components, m)
	}
	slices.SortFunc(components, func(a, b cdx.Component) int { return strings.Compare(a.BOMRef, b.BOMRef) })
	bom := cdx.NewBOM()
	bom.Metadata = &cdx.Metadata{Component: &cdx.Component{
		BOMRef: "image", Type: cdx.ComponentTypeContainer, Name: "crust-node", Version: c.version,
		Properties: &[]cdx.Property{{Name: "architecture", Value: arch}},
	}}
	bom.Components = &components
	var b bytes.Buffer
	err := cdx.NewBOMEncoder(&b, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom)
	return b.Bytes(), err
}
