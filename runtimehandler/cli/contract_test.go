package cli_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"crust.dev/crust/runtimehandler"
	"crust.dev/crust/runtimehandler/cli"
	"crust.dev/crust/runtimehandler/handlertest"
)

// A runtime's command, as a shell script that keeps its state in files beside itself: one per mounted volume, with the
// size of the device.
const script = `#!/bin/sh
set -eu
dir=${0%/*}
[ "$1" = crust ] || exit 2
name=$(printf %s "$3" | tr / _)
[ ! -e "$dir/hang" ] || exec sleep 600
[ -e "$dir/$name" ] || { echo "no volume at $3" >&2; exit 1; }
case $2 in
stats)
	size=$(cat "$dir/$name.size")
	echo "{\"usage\":[{\"total\":$size,\"used\":4096,\"available\":$((size / 2)),\"unit\":\"BYTES\"},{\"total\":100,\"used\":1,\"available\":99,\"unit\":2}],\"volume_condition\":{\"abnormal\":false}}"
	;;
resize)
	size=$(stat -c %s "$(cat "$dir/$name")")
	echo "$size" > "$dir/$name.size"
	echo "{\"capacity_bytes\":$size}"
	;;
*) exit 2 ;;
esac
`

// runtime finds records as KEP-2857 says a runtime does.
type runtime struct {
	t         *testing.T
	root, bin string
}

func newRuntime(t *testing.T) *runtime {
	dir := t.TempDir()
	r := &runtime{t: t, root: filepath.Join(dir, "records"), bin: filepath.Join(dir, "bin")}
	if err := os.Mkdir(r.bin, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(r.command(), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *runtime) command() string { return filepath.Join(r.bin, "runtime") }

func (r *runtime) Handler() runtimehandler.Handler {
	h, err := cli.New(cli.Config{Root: r.root, Capabilities: runtimehandler.Capabilities{OnlineExpand: true, Group: true}})
	if err != nil {
		r.t.Fatal(err)
	}
	return h
}

// record returns the record for a mount source.
func (r *runtime) record(source string) string { return filepath.Join(r.root, cli.RecordName(source)) }

func (r *runtime) state(target string) string {
	return filepath.Join(r.bin, strings.ReplaceAll(target, "/", "_"))
}

func (r *runtime) Mount(t *testing.T, d runtimehandler.Deferral) runtimehandler.Sandbox {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(r.record(d.TargetPath), "mountInfo.json"))
	if err != nil {
		t.Fatal(err)
	}
	var info struct {
		Type    string   `json:"volume-type"`
		Device  string   `json:"device"`
		FSType  string   `json:"fstype"`
		Options []string `json:"options"`
	}
	if err := json.Unmarshal(raw, &info); err != nil {
		t.Fatal(err)
	}
	if info.Type != "block" || info.Device != d.Device || info.FSType != d.FSType || fmt.Sprint(info.Options) != fmt.Sprint(d.MountFlags) {
		t.Errorf("record %+v of %+v", info, d)
	}
	for file, content := range map[string]string{
		r.state(d.TargetPath):                                info.Device,
		r.state(d.TargetPath) + ".size":                      fmt.Sprint(d.SizeBytes),
		filepath.Join(r.record(d.TargetPath), "runtime-cli"): r.command() + "\n",
	} {
		if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	status, err := r.Handler().Status(t.Context(), d.TargetPath, nil)
	if err != nil || status.Sandbox == nil {
		t.Fatalf("status: %+v, %v", status, err)
	}
	return *status.Sandbox
}

func (r *runtime) Unmount(t *testing.T, d runtimehandler.Deferral) {
	t.Helper()
	for _, file := range []string{filepath.Join(r.record(d.TargetPath), "runtime-cli"), r.state(d.TargetPath)} {
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
	}
}

func (r *runtime) Hang(t *testing.T, _ runtimehandler.Deferral) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(r.bin, "hang"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func (r *runtime) Lose(t *testing.T) {
	t.Helper()
	if err := os.RemoveAll(r.root); err != nil {
		t.Fatal(err)
	}
}

func TestContract(t *testing.T) {
	handlertest.Run(t, func(t *testing.T) handlertest.Runtime { return newRuntime(t) })
}
