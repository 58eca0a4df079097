// Package priv marks tests that need more than an ordinary user has.
package priv

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// Program skips a test unless a program is installed. Where CRUST_REQUIRE contains "root", as in CI, where make test has
// installed what tests need, it fails instead.
func Program(t testing.TB, name string) {
	t.Helper()
	if _, err := exec.LookPath(name); err == nil {
		return
	}
	if Required("root") {
		t.Fatalf("CRUST_REQUIRE demands a machine that has everything, and this one lacks %s", name)
	}
	t.Skip("needs ", name)
}

// Root skips a test unless it runs as root. Where CRUST_REQUIRE contains "root", as in CI, it fails instead.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() == 0 {
		return
	}
	if Required("root") {
		t.Fatal("CRUST_REQUIRE demands root, and this is not root")
	}
	t.Skip("needs root")
}

// Required is whether CRUST_REQUIRE, a list with commas, has a word: tests that need what it stands for are not skipped but fail.
func Required(what string) bool {
	return slices.Contains(strings.Split(os.Getenv("CRUST_REQUIRE"), ","), what)
}
