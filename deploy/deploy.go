// Package deploy is what is installed in a cluster, embedded: the Helm chart, and the plain manifests that are rendered from
// it. It renders the chart as helm does, without a cluster. It never talks to one.
package deploy

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"sigs.k8s.io/yaml"
)

//go:embed all:helm/crust
var files embed.FS

// KubeVersion is the Kubernetes that is rendered for.
const KubeVersion = "v1.36.0"

// Chart loads the chart.
func Chart() (*chart.Chart, error) {
	var parts []*loader.BufferedFile
	const root = "helm/crust"
	err := fs.WalkDir(files, root, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := files.ReadFile(name)
		parts = append(parts, &loader.BufferedFile{Name: strings.TrimPrefix(name, root+"/"), Data: data})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the chart: %w", err)
	}
	c, err := loader.LoadFiles(parts)
	if err != nil {
		return nil, fmt.Errorf("load the chart: %w", err)
	}
	return c, nil
}

// Template is what one template became.
type Template struct {
	// Name is the file's name beneath templates.
	Name string
	// Text is YAML with any number of documents.
	Text string
}

// Render renders the chart for a release of the name crust, and checks the values against the chart's schema as an install
// does. The result is sorted by name; templates that came out empty are left out.
func Render(namespace string, values map[string]any) ([]Template, error) {
	c, err := Chart()
	if err != nil {
		return nil, err
	}
	version, err := chartutil.ParseKubeVersion(KubeVersion)
	if err != nil {
		return nil, err
	}
	capabilities := *chartutil.DefaultCapabilities
	capabilities.KubeVersion = *version
	all, err := chartutil.ToRenderValues(c, values, chartutil.ReleaseOptions{Name: "crust", Namespace: namespace, Revision: 1, IsInstall: true}, &capabilities)
	if err != nil {
		return nil, err
	}
	rendered, err := engine.Render(c, all)
	if err != nil {
		return nil, err
	}
	var list []Template
	for name, text := range rendered {
		if strings.Contains(text, "<no value>") {
			return nil, fmt.Errorf("%s uses a value that there is not:\n%s", name, text)
		}
		if base := path.Base(name); path.Ext(base) == ".yaml" && blank(text) == "" {
			continue
		} else if path.Ext(base) == ".yaml" {
			list = append(list, Template{base, strings.TrimSpace(text) + "\n"})
		}
	}
	if len(list) == 0 {
		return nil, errors.New("the chart has no templates")
	}
	slices.SortFunc(list, func(a, b Template) int { return strings.Compare(a.Name, b.Name) })
	return list, nil
}

// blank is a text without comments, separators and white space: empty if there is no object in it.
func blank(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "---" && !strings.HasPrefix(line, "#") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// manifests are the sets of values that there are plain manifests for.
var manifests = []struct{ name, about, values string }{
	{"crust.yaml", "crustd, crust-csi and classes for them on every node. Volumes cannot be expanded: that takes the controller.", `
namespace: {create: true}
uninstallCheck: {enabled: false}
controller: {enabled: false}
`},
	{"crust-full.yaml", "The same with the controller and with snapshots. The types of external-snapshotter have to be there first, and the\n" +
		"# Secrets crust-route-node and crust-route-router: docs/install.md.", `
namespace: {create: true}
uninstallCheck: {enabled: false}
controller: {tls: {source: secret}}
snapshots: {enabled: true}
`},
}

// Manifests renders the plain manifests, by the names of their files. Hooks are not among them: only helm runs those.
func Manifests() (map[string]string, error) {
	list := map[string]string{}
	for _, m := range manifests {
		var values map[string]any
		if err := yaml.UnmarshalStrict([]byte(m.values), &values); err != nil {
			return nil, fmt.Errorf("values of %s: %w", m.name, err)
		}
		templates, err := Render("crust-system", values)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.name, err)
		}
		var b strings.Builder
		fmt.Fprintf(&b, "# %s\n# Made from the chart by `make manifests`; change that and not this.\n", m.about)
		for _, t := range order(templates) {
			fmt.Fprintf(&b, "---\n%s", strings.TrimPrefix(t.Text, "---\n"))
		}
		list[m.name] = b.String()
	}
	return list, nil
}

// order puts first what the others need to be there.
func order(templates []Template) []Template {
	slices.SortStableFunc(templates, func(a, b Template) int {
		first := func(t Template) int {
			return slices.Index([]string{"configmap.yaml", "csidriver.yaml", "namespace.yaml"}, t.Name)
		}
		return first(b) - first(a)
	})
	return templates
}
