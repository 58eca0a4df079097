package doctor_test

import (
	"os"
	"strings"
	"testing"
)

// TestEveryCheckIsDocumented: the guide says what a finding of each check means.
func TestEveryCheckIsDocumented(t *testing.T) {
	guide, err := os.ReadFile("../../../../docs/operator-guide.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, f := range (row{}).examine(t).Findings {
		seen[f.Check] = true
		if !strings.Contains(string(guide), "\n| `"+f.Check+"` | ") {
			t.Errorf("check %s is not in docs/operator-guide.md", f.Check)
		}
	}
	if len(seen) < 12 {
		t.Errorf("only %d checks have found anything", len(seen))
	}
}
