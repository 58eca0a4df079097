package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// deb is a Debian package that was downloaded.
type deb struct {
	path, name, version, architecture, source string
	// control is what dpkg knows of it.
	control []byte
}

// download gets the packages of tools and all that they depend on, in a state of apt's own, so that neither this machine's
// packages nor its architecture count. apt checks the archive's signatures, with the sources and keys of this machine.
func (c config) download(ctx context.Context, arch string) ([]deb, error) {
	dir := filepath.Join(c.cache, arch)
	archives := filepath.Join(dir, "cache", "archives")
	for _, sub := range []string{filepath.Join(dir, "lists", "partial"), filepath.Join(archives, "partial")} {
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return nil, err
		}
	}
	status := filepath.Join(dir, "status") // nothing is installed
	if err := os.WriteFile(status, nil, 0o644); err != nil {
		return nil, err
	}
	options := []string{
		"-o", "APT::Architecture=" + arch, "-o", "APT::Architectures::=" + arch, "-o", "Dir::State=" + dir, "-o", "Dir::State::lists=" + filepath.Join(dir, "lists"),
		"-o", "Dir::State::status=" + status, "-o", "Dir::Cache=" + filepath.Join(dir, "cache"), "-o", "Acquire::Languages=none", "-o", "APT::Sandbox::User=",
		"-o", "APT::Install-Recommends=false", "-o", "Debug::NoLocking=true", "-qq",
	}
	c.say("%s: what packages are there", arch)
	if _, err := output(ctx, "apt-get", append(slices.Clone(options), "update")...); err != nil {
		return nil, err
	}
	var names []string
	for _, t := range c.tools {
		names = append(names, t.pkg)
	}
	install := append(slices.Clone(options), "--yes", "install")
	plan, err := output(ctx, "apt-get", append(append(slices.Clone(install), "--simulate"), names...)...)
	if err != nil {
		return nil, err
	}
	c.say("%s: downloading %s", arch, strings.Join(names, ", "))
	if _, err := output(ctx, "apt-get", append(append(install, "--download-only"), names...)...); err != nil {
		return nil, err
	}
	return planned(ctx, plan, archives)
}

// planned reads the packages that apt-get --simulate has said that it would install. The directory may have older ones, too.
func planned(ctx context.Context, plan []byte, archives string) ([]deb, error) {
	var list []deb
	for _, m := range regexp.MustCompile(`(?m)^Inst (\S+) \((\S+) .*\[(\w+)\]`).FindAllSubmatch(plan, -1) {
		name, version, arch := string(m[1]), string(m[2]), string(m[3])
		name, _, _ = strings.Cut(name, ":")
		d, err := inspect(ctx, filepath.Join(archives, name+"_"+strings.ReplaceAll(version, ":", "%3a")+"_"+arch+".deb"))
		if err != nil {
			return nil, err
		}
		list = append(list, d)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("apt-get would install nothing: %s", plan)
	}
	slices.SortFunc(list, func(a, b deb) int { return strings.Compare(a.name, b.name) })
	return list, nil
}

func inspect(ctx context.Context, path string) (deb, error) {
	control, err := output(ctx, "dpkg-deb", "--field", path)
	if err != nil {
		return deb{}, err
	}
	d := deb{path: path, control: control}
	for line := range strings.Lines(string(control)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "Package":
			d.name = value
		case "Version":
			d.version = value
		case "Architecture":
			d.architecture = value
		case "Source":
			d.source, _, _ = strings.Cut(value, " ")
		}
	}
	if d.name == "" || d.version == "" {
		return deb{}, fmt.Errorf("%s has no name or no version", path)
	}
	return d, nil
}

// output runs a command. Its error has the end of what the command has said.
func output(ctx context.Context, argv0 string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, argv0, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C", "DEBIAN_FRONTEND=noninteractive")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if errors.Is(err, exec.ErrNotFound) {
		return nil, fmt.Errorf("%s: %w; images are built on Debian and its relatives", argv0, err)
	}
	if err != nil {
		text := stderr.Bytes()
		return nil, fmt.Errorf("%s %s: %w: %s", argv0, strings.Join(args, " "), err, text[max(0, len(text)-2000):])
	}
	return out, nil
}
