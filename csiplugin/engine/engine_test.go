package engine_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/engine"
)

func TestParseName(t *testing.T) {
	for name, c := range map[string]struct {
		in   string
		good bool
	}{
		"a handle":          {"0123456789ab-vol-00112233445566778899aabbccddeeff", true},
		"128 bytes":         {strings.Repeat("a", 128), true},
		"129 bytes":         {strings.Repeat("a", 129), false},
		"empty":             {"", false},
		"a temporary name":  {".new-a", false},
		"an option":         {"-rf", false},
		"another directory": {"a/b", false},
		"upper case":        {"A", false},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := engine.ParseName(c.in)
			if c.good && (err != nil || string(got) != c.in) {
				t.Errorf("got %q, %v", got, err)
			}
			if !c.good && !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}
