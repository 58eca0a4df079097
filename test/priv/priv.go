// Package priv marks tests that need more than an ordinary user has.
package priv

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// Root skips a test unless it runs as root. Where CRUST_REQUIRE contains "root", as in CI, it fails instead.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if slices.Contains(strings.Split(os.Getenv("CRUST_REQUIRE"), ","), "root") {
		t.Fatal("CRUST_REQUIRE demands root, and this is not root")
	}
	t.Skip("needs root")
}
