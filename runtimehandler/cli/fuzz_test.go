package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/cli"
)

// FuzzStrangersRecord puts anything in the place of a record. The sweep removes it only if it says that it is ours.
func FuzzStrangersRecord(f *testing.F) {
	f.Add([]byte(`{"volume-type":"block","device":"/dev/x","metadata":{"crust.dev/target-path":"/x"}}`))
	f.Add([]byte(`{"volume-type":"block","device":"/dev/x","metadata":{}}`))
	f.Add([]byte(`{"metadata":{"crust.dev/target-path":7}}`))
	f.Add([]byte("\x00"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		h, err := cli.New(cli.Config{Root: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(h.Roots()[0], "record")
		path := filepath.Join(dir, "mountInfo.json")
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, path, string(raw), 0o600)
		if _, err := h.Sweep(t.Context(), nil); err != nil {
			t.Error(err)
		}
		var record struct {
			Metadata map[string]string `json:"metadata"`
		}
		ours := json.Unmarshal(raw, &record) == nil && record.Metadata["crust.dev/target-path"] != ""
		if have, err := os.ReadFile(path); !ours && (err != nil || string(have) != string(raw)) {
			t.Errorf("%q is now %q, error %v", raw, have, err)
		}
	})
}

// TestRecordThatIsNoFile: nothing waits for the other end of a pipe, or reads without end.
func TestRecordThatIsNoFile(t *testing.T) {
	h, err := cli.New(cli.Config{Root: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	for name, place := range map[string]func(path string) error{
		"pipe":    func(path string) error { return unix.Mkfifo(path, 0o600) },
		"link":    func(path string) error { return os.Symlink("/dev/zero", path) },
		"endless": func(path string) error { return os.WriteFile(path, make([]byte, 2<<20), 0o600) },
	} {
		dir := filepath.Join(h.Roots()[0], name)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := place(filepath.Join(dir, "mountInfo.json")); err != nil {
			t.Fatal(err)
		}
	}
	left, err := h.Sweep(t.Context(), nil)
	if err != nil || len(left) != 3 {
		t.Errorf("left %+v, error %v", left, err)
	}
	for _, l := range left {
		if _, err := os.Lstat(l.Path); err != nil || !l.Stranger {
			t.Errorf("%+v: %v", l, err)
		}
	}
}
