// Command render writes the plain manifests that are made from the Helm chart.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"crust.dev/crust/deploy"
)

func main() {
	dir := flag.String("o", "deploy/manifests", "`directory` for the manifests; others in it are removed")
	flag.Parse()
	if err := run(*dir); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}

func run(dir string) error {
	list, err := deploy.Manifests()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	old, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return err
	}
	for _, path := range old {
		if _, ok := list[filepath.Base(path)]; !ok {
			if err := os.Remove(path); err != nil {
				return err
			}
		}
	}
	for name, text := range list {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
}
