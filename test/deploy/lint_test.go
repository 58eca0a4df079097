package deploy_test

import (
	"path/filepath"
	"testing"

	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"

	"crust.dev/crust/deploy"
)

// TestLint is helm lint, which takes no warning either.
func TestLint(t *testing.T) {
	version, err := chartutil.ParseKubeVersion(deploy.KubeVersion)
	if err != nil {
		t.Fatal(err)
	}
	for name, values := range valueSets {
		t.Run(name, func(t *testing.T) {
			l := lint.AllWithKubeVersion(filepath.Join("../../deploy/helm/crust"), parse(t, values), "crust-system", version)
			for _, m := range l.Messages {
				if m.Severity > support.InfoSev {
					t.Errorf("%s: %v", m.Path, m.Err)
				}
			}
			if len(l.Messages) == 0 {
				t.Error("nothing was linted: there is always a word about the icon")
			}
		})
	}
}
