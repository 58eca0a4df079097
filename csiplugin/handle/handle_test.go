package handle_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"crust.dev/crust/csiplugin/handle"
)

func TestAHandleSurvivesPrintingAndParsing(t *testing.T) {
	pool := handle.NewPool()
	v := handle.NewVolume(pool)
	got, err := handle.ParseVolume(v.String())
	if err != nil || got != v || got.Pool() != pool {
		t.Fatalf("ParseVolume(%q) = %v, %v", v, got, err)
	}
	if len(v.String()) > 128 {
		t.Errorf("the handle has %d bytes, CSI allows 128", len(v.String()))
	}
	if other := handle.NewVolume(pool); other == v {
		t.Error("two volumes got one handle")
	}
}

func TestAHandleIsAJSONString(t *testing.T) {
	v := handle.NewVolume(handle.NewPool())
	raw, err := json.Marshal(v)
	if err != nil || string(raw) != `"`+v.String()+`"` {
		t.Fatalf("Marshal = %s, %v", raw, err)
	}
	var got handle.Volume
	if err := json.Unmarshal(raw, &got); err != nil || got != v {
		t.Fatalf("Unmarshal = %v, %v", got, err)
	}
}

func TestWhatIsNoHandleDoesNotExist(t *testing.T) {
	good := handle.NewVolume("0123456789ab").String()
	for name, c := range map[string]struct {
		in   string
		want error
	}{
		"empty is a missing field": {"", errdefs.ErrInvalidArgument},
		"another driver's id":      {"pvc-6e1f", errdefs.ErrNotFound},
		"upper case":               {strings.ToUpper(good), errdefs.ErrNotFound},
		"another kind":             {strings.Replace(good, "-vol-", "-snap-", 1), errdefs.ErrNotFound},
		"too short":                {good[:len(good)-1], errdefs.ErrNotFound},
		"trailing newline":         {good + "\n", errdefs.ErrNotFound},
		"a path":                   {"0123456789ab-vol-../../../../etc/passwd", errdefs.ErrNotFound},
		"very long":                {strings.Repeat("a", 1<<16), errdefs.ErrNotFound},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := handle.ParseVolume(c.in)
			if !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
			if len(err.Error()) > 200 {
				t.Errorf("the message has %d bytes", len(err.Error()))
			}
		})
	}
}

func TestAnotherPoolsVolumeIsNamedAsSuch(t *testing.T) {
	v := handle.NewVolume("0123456789ab")
	if err := v.In("0123456789ab"); err != nil {
		t.Fatal(err)
	}
	err := v.In("ffffffffffff")
	var foreign *handle.ForeignError
	if !errors.As(err, &foreign) || !errors.Is(err, errdefs.ErrNotFound) {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{"0123456789ab", "ffffffffffff", v.String()} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %s", err, want)
		}
	}
}

func TestAGroupIsInOnePool(t *testing.T) {
	const pool, another = "0123456789ab", "ffffffffffff"
	a, b, c := handle.NewVolume(pool), handle.NewVolume(pool), handle.NewVolume(another)
	for _, one := range [][]handle.Volume{{a}, {a, b}} {
		if got, err := handle.OnePool(one); err != nil || got != pool {
			t.Errorf("OnePool(%v) = %v, %v", one, got, err)
		}
	}
	_, err := handle.OnePool([]handle.Volume{a, b, c})
	if !errors.Is(err, errdefs.ErrFailedPrecondition) {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{a.String(), c.String(), "pool " + pool, "pool " + another} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %s", err, want)
		}
	}
	var many []handle.Volume
	for range 256 {
		many = append(many, handle.NewVolume(handle.NewPool()))
	}
	if _, err := handle.OnePool(many); err == nil || len(err.Error()) > 2048 {
		t.Errorf("the message of 256 pools: %v", err)
	}
}

func FuzzParseVolume(f *testing.F) {
	f.Add(handle.NewVolume(handle.NewPool()).String())
	f.Add("")
	f.Add("a-vol-b")
	f.Fuzz(func(t *testing.T, s string) {
		v, err := handle.ParseVolume(s)
		if err == nil && v.String() != s {
			t.Errorf("%q was parsed as %q", s, v)
		}
	})
}

func FuzzParsePool(f *testing.F) {
	f.Add("0123456789ab")
	f.Fuzz(func(t *testing.T, s string) {
		p, err := handle.ParsePool(s)
		if err == nil && string(p) != s {
			t.Errorf("%q was parsed as %q", s, p)
		}
	})
}

// TestAKindIsNotTakenForAnother parses each kind's handle as each other's.
func TestAKindIsNotTakenForAnother(t *testing.T) {
	pool := handle.NewPool()
	texts := map[handle.Kind]string{
		handle.KindVolume: handle.NewVolume(pool).String(), handle.KindSnapshot: handle.NewSnapshot(pool).String(), handle.KindGroup: handle.NewGroup(pool).String(),
	}
	for kind, text := range texts {
		_, volumeErr := handle.ParseVolume(text)
		_, snapshotErr := handle.ParseSnapshot(text)
		_, groupErr := handle.ParseGroup(text)
		for parsed, err := range map[handle.Kind]error{handle.KindVolume: volumeErr, handle.KindSnapshot: snapshotErr, handle.KindGroup: groupErr} {
			if parsed == kind && err != nil || parsed != kind && !errors.Is(err, errdefs.ErrNotFound) {
				t.Errorf("%s parsed as %s: %v", text, parsed, err)
			}
		}
		if h, err := handle.Parse(text); err != nil || h.Kind() != kind || h.Pool() != pool || h.String() != text {
			t.Errorf("Parse(%s) = %v, %v", text, h, err)
		}
	}
}
