package cli_test

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/cli"
)

func staged(t *testing.T, r *runtime) runtimehandler.Deferral {
	t.Helper()
	group := uint32(7)
	d := runtimehandler.Deferral{
		Driver: "d", VolumeID: "v", TargetPath: "/pods/1/" + strings.Repeat("long", 500), Device: "/dev/x", FSType: "xfs", ReadOnly: true,
		Group: &group, GroupChangePolicy: runtimehandler.GroupChangeOnRootMismatch, Format: true, Blankness: runtimehandler.BlanknessNeverWritten,
	}
	if err := r.Handler().Stage(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestRecord(t *testing.T) {
	r := newRuntime(t)
	d := staged(t, r)
	raw, err := os.ReadFile(filepath.Join(r.record(d.TargetPath), "mountInfo.json"))
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"volume-type": "block", "device": "/dev/x", "fstype": "xfs", "options": []any{"ro"},
		"metadata": map[string]any{"fsGroup": "7", "fsGroupChangePolicy": "OnRootMismatch", "crust.dev/format": "never-written", "crust.dev/target-path": d.TargetPath},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	entries, err := os.ReadDir(r.root)
	if err != nil || len(entries) != 1 {
		t.Errorf("in the directory of records: %v, %v", entries, err)
	}
}

// TestSweepWithAnOldList: what was staged or unstaged after the list was made is not overruled.
func TestSweepWithAnOldList(t *testing.T) {
	r := newRuntime(t)
	d, h := staged(t, r), r.Handler()
	if err := h.Stage(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Sweep(t.Context(), nil); err != nil { // a list from before
		t.Fatal(err)
	}
	if _, err := os.Stat(r.record(d.TargetPath)); err != nil {
		t.Errorf("the sweep has removed a record that was just put out: %v", err)
	}
	if err := h.Unstage(t.Context(), d.TargetPath); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Sweep(t.Context(), []runtimehandler.Deferral{d}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(r.record(d.TargetPath)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the sweep has put back a record that was just removed: %v", err)
	}
}

func TestStrangersAreLeftAlone(t *testing.T) {
	r := newRuntime(t)
	d := staged(t, r)
	theirs := filepath.Join(r.root, strings.Repeat("ab", 32))
	if err := os.Mkdir(theirs, 0o700); err != nil {
		t.Fatal(err)
	}
	record := filepath.Join(theirs, "mountInfo.json")
	for file, content := range map[string]string{record: `{"device":"/dev/y","metadata":{}}`, filepath.Join(r.root, "notes"): "x"} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	left, err := r.Handler().Sweep(t.Context(), []runtimehandler.Deferral{d})
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, l := range left {
		if !l.Stranger {
			t.Errorf("%s is not taken for a stranger's", l.Path)
		}
		paths = append(paths, l.Path)
	}
	if diff := cmp.Diff([]string{theirs, filepath.Join(r.root, "notes")}, paths); diff != "" {
		t.Error(diff)
	}
	if content, err := os.ReadFile(record); err != nil || string(content) != `{"device":"/dev/y","metadata":{}}` {
		t.Errorf("their record is now %q, %v", content, err)
	}
}

// TestWhatTheRuntimeKeepsStays: KEP-2857 lets a runtime keep files of its own beside the record.
func TestWhatTheRuntimeKeepsStays(t *testing.T) {
	r := newRuntime(t)
	d := staged(t, r)
	own := filepath.Join(r.record(d.TargetPath), "sandbox-1")
	if err := os.WriteFile(own, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.Handler().Unstage(t.Context(), d.TargetPath); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(own); err != nil {
		t.Errorf("the runtime's file: %v", err)
	}
	if _, err := os.Stat(filepath.Join(r.record(d.TargetPath), "mountInfo.json")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the record is still there: %v", err)
	}
	if err := r.Handler().Stage(t.Context(), d); err != nil {
		t.Errorf("staging again beside it: %v", err)
	}
}

func TestCommandsThatAreNotTrusted(t *testing.T) {
	for name, prepare := range map[string]func(t *testing.T, r *runtime, file string){
		"a path that is not absolute": func(t *testing.T, _ *runtime, file string) { write(t, file, "runtime\n", 0o600) },
		"a path with dots":            func(t *testing.T, r *runtime, file string) { write(t, file, r.bin+"/../bin/runtime", 0o600) },
		"two lines":                   func(t *testing.T, r *runtime, file string) { write(t, file, r.command()+"\n/bin/sh\n", 0o600) },
		"a file that others can write": func(t *testing.T, r *runtime, file string) {
			write(t, file, r.command(), 0o600)
			if err := os.Chmod(file, 0o666); err != nil {
				t.Fatal(err)
			}
		},
		"a link out of the directory": func(t *testing.T, r *runtime, file string) {
			if err := os.Symlink("/etc/hostname", file); err != nil {
				t.Fatal(err)
			}
		},
		"a directory": func(t *testing.T, _ *runtime, file string) {
			if err := os.Mkdir(file, 0o700); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRuntime(t)
			d := staged(t, r)
			prepare(t, r, filepath.Join(r.record(d.TargetPath), "runtime-cli"))
			if status, err := r.Handler().Status(t.Context(), d.TargetPath, nil); err == nil {
				t.Errorf("status: %+v", status)
			}
		})
	}
	t.Run("a command that others can write", func(t *testing.T) {
		r := newRuntime(t)
		d := staged(t, r)
		sandbox := runtimehandler.Sandbox{Address: r.command()}
		if err := os.Chmod(r.command(), 0o777); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Handler().Stats(t.Context(), d.TargetPath, sandbox); !errors.Is(err, errdefs.ErrPermissionDenied) {
			t.Errorf("stats: %v", err)
		}
	})
}

func TestAnswersThatAreNone(t *testing.T) {
	for name, tc := range map[string]struct{ script, text string }{
		"no JSON":            {"echo hello", "not what KEP-2857 says"},
		"no bytes":           {`echo '{"usage":[{"total":1,"unit":2}]}'`, "without bytes"},
		"negative":           {`echo '{"usage":[{"total":-1,"unit":1}]}'`, "impossible"},
		"more than all":      {`echo '{"usage":[{"total":1,"used":2,"unit":1}]}'`, "impossible"},
		"a failure":          {"echo first >&2; echo 'the reason' >&2; exit 3", "the reason"},
		"no end of output":   {"yes '{'", "no answer within"},
		"a child that stays": {"sleep 600 & echo '{\"usage\":[]}'", "without bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRuntime(t)
			write(t, r.command(), "#!/bin/sh\n"+tc.script+"\n", 0o755)
			h, err := cli.New(cli.Config{Root: r.root, Timeout: time.Second})
			if err != nil {
				t.Fatal(err)
			}
			_, err = h.Stats(t.Context(), "/t", runtimehandler.Sandbox{Address: r.command()})
			if !errors.Is(err, errdefs.ErrUnavailable) || !strings.Contains(err.Error(), tc.text) {
				t.Errorf("stats: %v, want ErrUnavailable with %q", err, tc.text)
			}
		})
	}
}

func TestNewRefuses(t *testing.T) {
	for _, c := range []cli.Config{{Root: "x"}, {Timeout: -1}} {
		if _, err := cli.New(c); !errors.Is(err, errdefs.ErrInvalidArgument) {
			t.Errorf("New(%+v): %v", c, err)
		}
	}
}

func write(t *testing.T, file, content string, mode os.FileMode) {
	t.Helper()
	if err := os.WriteFile(file, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

// FuzzAnswer: whatever a command prints, it is either refused or statistics that add up.
func FuzzAnswer(f *testing.F) {
	f.Add(`{"usage":[{"total":10,"used":5,"available":5,"unit":1}],"volume_condition":{"abnormal":true,"message":"x"}}`)
	f.Add(`{"Usage":[{"total":10,"unit":"BYTES"}],"VolumeCondition":{}}`)
	f.Add(`{"usage":[{"unit":{}}]}`)
	f.Fuzz(func(t *testing.T, text string) {
		stats, err := cli.ParseStats([]byte(text))
		if err != nil {
			return
		}
		for _, u := range []runtimehandler.Usage{stats.Bytes, stats.Inodes} {
			if u.Total < 0 || u.Used < 0 || u.Available < 0 || u.Used > u.Total || u.Available > u.Total {
				t.Errorf("%q reads as %+v", text, stats)
			}
		}
	})
}
