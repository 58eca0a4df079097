package process_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"crust.dev/crust/crust/internal/process"
)

func TestAlive(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	id, err := process.Of(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	alive := func(t *testing.T, id process.Identity) bool {
		t.Helper()
		alive, err := id.Alive()
		if err != nil {
			t.Fatal(err)
		}
		return alive
	}
	if !alive(t, id) {
		t.Error("a running process is not alive")
	}
	reused, otherBoot := id, id
	reused.Start++
	otherBoot.Boot = "another"
	if alive(t, reused) {
		t.Error("a pid that was given to another process counts as alive")
	}
	if alive(t, otherBoot) {
		t.Error("a process of another boot counts as alive")
	}
	if alive(t, process.Identity{}) {
		t.Error("no process at all counts as alive")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// Until it is waited for it is a zombie, which holds no files.
	for alive(t, id) {
	}
	if _, err := process.Of(1 << 30); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("identity of no process: %v", err)
	}
}

func TestHolders(t *testing.T) {
	path := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(path, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	if holders, err := process.Holders(path); err != nil || len(holders) != 0 {
		t.Fatalf("holders of a closed file: %v, %v", holders, err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	cmd := exec.Command("sleep", "60")
	cmd.ExtraFiles = []*os.File{f}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	holders, err := process.Holders(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(holders) != 1 || holders[0].PID != cmd.Process.Pid {
		t.Errorf("holders: %v, want sleep with pid %d", holders, cmd.Process.Pid)
	}
	if holders, err := process.Holders(path + ".missing"); err != nil || len(holders) != 0 {
		t.Errorf("holders of a missing file: %v, %v", holders, err)
	}
}
