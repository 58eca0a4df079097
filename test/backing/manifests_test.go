package backing

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"
)

// object is what the test needs of a manifest, of whichever kind.
type object struct {
	Kind     string `yaml:"kind"`
	Metadata struct {
		Name string `yaml:"name"`
	} `yaml:"metadata"`
	Parameters map[string]string `yaml:"parameters"`
	Spec       struct {
		Class      string `yaml:"volumeSnapshotClassName"`
		DataSource struct {
			Name string `yaml:"name"`
		} `yaml:"dataSource"`
		Resources struct {
			Requests struct {
				Storage string `yaml:"storage"`
			} `yaml:"requests"`
		} `yaml:"resources"`
		Source struct {
			PVC     string `yaml:"persistentVolumeClaimName"`
			Content string `yaml:"volumeSnapshotContentName"`
			Handle  string `yaml:"snapshotHandle"`
		} `yaml:"source"`
	} `yaml:"spec"`
}

// manifests are the objects of a document's sections, in their order.
type manifests map[string][]object

var blocks = regexp.MustCompile("(?s)```yaml\n(.*?)```")

// readManifests reads the manifests of docs/backing-images.md, after fill has changed the text as a reader would.
func readManifests(t testing.TB, fill *strings.Replacer) manifests {
	t.Helper()
	raw, err := os.ReadFile("../../docs/backing-images.md")
	must(t, err)
	m := manifests{}
	for _, section := range strings.Split(string(raw), "\n## ")[1:] {
		title, text, _ := strings.Cut(section, "\n")
		title, _, _ = strings.Cut(title, ":")
		for _, block := range blocks.FindAllStringSubmatch(text, -1) {
			for _, one := range strings.Split(block[1], "\n---\n") {
				var o object
				must(t, yaml.Load([]byte(fill.Replace(one)), &o))
				m[title] = append(m[title], o)
			}
		}
	}
	return m
}

// find returns the object of a kind and name in any section.
func (m manifests) find(t testing.TB, kind, name string) object {
	t.Helper()
	for _, objects := range m {
		for _, o := range objects {
			if o.Kind == kind && o.Metadata.Name == name {
				return o
			}
		}
	}
	t.Fatalf("the document has no %s %s", kind, name)
	return object{}
}
