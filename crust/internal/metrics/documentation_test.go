package metrics_test

import (
	"os"
	"strings"
	"testing"

	"crust.dev/crust/crust/internal/journal"
	"crust.dev/crust/crust/internal/metrics"
)

// TestEveryMetricIsDocumented: the guide says what to make of each.
func TestEveryMetricIsDocumented(t *testing.T) {
	guide, err := os.ReadFile("../../../docs/operator-guide.md")
	if err != nil {
		t.Fatal(err)
	}
	m := metrics.New(func() []journal.Record { return []journal.Record{{}} })
	m.Call("/csi.v1.Node/NodePublishVolume", 0, 0)
	m.Finding("left")
	m.Registration(true)
	families, err := m.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	ours := 0
	for _, f := range families {
		name := f.GetName()
		if strings.HasPrefix(name, "go_") || strings.HasPrefix(name, "process_") {
			continue
		}
		ours++
		if !strings.Contains(string(guide), "\n| `"+name) {
			t.Errorf("%s is not in docs/operator-guide.md", name)
		}
	}
	if ours < 6 {
		t.Errorf("only %d metrics were gathered", ours)
	}
}
