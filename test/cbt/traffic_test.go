package cbt

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/runtimehandler/sandbox"
	"crust.dev/crust/test/node"
	"crust.dev/crust/test/priv"
	"crust.dev/crust/test/vm"
)

// rounds are what a guest does to a filesystem in $D between two snapshots.
var rounds = []struct {
	name, script string
	// zeroed is how many blocks have no data any more, at least.
	zeroed int64
	// trim says that what the filesystem does not use is discarded then.
	trim bool
}{
	{name: "a tree is unpacked", script: `mkdir -p $D/tree; for i in $(seq 60); do head -c $((i * 700)) /dev/urandom > $D/tree/$i; done; sync`},
	{name: "blocks are written here and there", script: `head -c 8388608 /dev/zero > $D/db; sync
		for i in $(seq 40); do n=$(($(od -An -N2 -tu2 /dev/urandom) % 2048))
		dd if=/dev/urandom of=$D/db bs=4096 seek=$n count=1 conv=notrunc,fsync 2>/dev/null; done`},
	{name: "nothing", script: `sync`},
	{name: "files are removed and their space discarded", zeroed: 100, script: `for i in $(seq 1 2 60); do rm $D/tree/$i; done; sync
		head -c 3000000 /dev/urandom > $D/gone; sync; rm $D/gone; sync`},
	{name: "the rest is removed, and all that is free trimmed", zeroed: 100, trim: true, script: `rm -r $D/tree; sync`},
	{name: "the same is written again", script: `cp $D/db /tmp/db.$$; dd if=/tmp/db.$$ of=$D/db bs=65536 conv=notrunc,fsync 2>/dev/null; rm /tmp/db.$$`},
	{name: "a writer is at work", script: `(i=0; while [ $i -lt 400 ]; do i=$((i + 1)); head -c 5000 /dev/urandom >> $D/log; sync $D/log; done) > /dev/null 2>&1 &
		sleep 1`},
}

// trim has the guest's agent discard what a filesystem does not use, which is mounted at a path in the sandbox.
func (b *bench) trim(s *node.Sandbox, sandboxID, path string) {
	b.Helper()
	// The agent knows the filesystem by the place where it has mounted it first.
	places, err := s.Sh(b.ctx(), `while read -r dev at _; do [ "$at" = `+path+` ] && found=$dev; done < /proc/mounts
		while read -r dev at _; do [ "$dev" = "$found" ] && echo "$at"; done < /proc/mounts; true`)
	must(b, err)
	conn, err := sandbox.Connect(b.ctx(), b.Path("sandboxes"), sandboxID)
	must(b, err)
	defer conn.Close()
	resp, err := guestv1.NewTTRPCAgentClient(conn).TrimVolume(b.ctx(), &guestv1.TrimVolumeRequest{MountPath: strings.Fields(places)[0]})
	must(b, err)
	if resp.GetTrimmedBytes() == 0 {
		b.Errorf("nothing was trimmed in %s", path)
	}
	b.Logf("%d bytes were trimmed in %s", resp.GetTrimmedBytes(), path)
}

// TestTraffic compares snapshots of filesystems that a microVM writes to.
func TestTraffic(t *testing.T) {
	priv.Root(t)
	vm.Need(t)
	b := newBench(t, "crustd", "crust-agent", "crust-sandbox", "crustctl")
	b.Accel = string(vm.Accel(t))
	_, err := b.BuildImage(b.ctx())
	must(t, err, b.StartServices(b.ctx()))
	b.dial()
	volumes := map[string]*node.Volume{"ext4": b.volume("ext4", "ext4", "", 64*mib), "xfs": b.volume("xfs", "xfs", "", 300*mib)}
	var mounts []node.Mount
	for _, v := range volumes {
		must(t, v.Stage(b.ctx()), v.Publish(b.ctx(), "pod-"+v.Name))
		mounts = append(mounts, node.Mount{Source: v.Target(), Destination: "/mnt/" + v.Name})
	}
	s, err := b.StartSandbox(b.ctx(), "writer", mounts...)
	must(t, err)
	snaps := map[string][]string{}
	for i, round := range rounds {
		for name, v := range volumes {
			_, err := s.Sh(b.ctx(), "D=/mnt/"+name+"\n"+round.script)
			must(t, err)
			if round.trim {
				b.trim(s, "writer", "/mnt/"+name)
			}
			snaps[name] = append(snaps[name], b.snapshot(fmt.Sprintf("%s-%d", name, i), v.ID))
			if i == 2 && name == "xfs" {
				_, err := v.Expand(b.ctx(), v.Size+64*mib)
				must(t, err)
			}
		}
	}
	must(t, s.Stop(b.ctx()))
	for name, v := range volumes {
		list := snaps[name]
		last := len(list) - 1
		t.Run(name, func(t *testing.T) {
			b := &bench{Node: b.Node, TB: t, bin: b.bin, conn: b.conn}
			for i := range list {
				t.Log(rounds[i].name)
				if i == 0 {
					b.verify(name, "", list[0], v.Size)
				} else if c := b.verify(name, list[i-1], list[i], v.Size); c.zeroed < rounds[i].zeroed {
					t.Errorf("%d blocks have no data any more, want %d: what the guest discards does not arrive", c.zeroed, rounds[i].zeroed)
				}
			}
			b.verify(name, list[0], list[last], v.Size)
			b.verify(name, "", list[last], v.Size)
			b.backups(name, list)
		})
	}
	must(t, volumes["ext4"].Unpublish(b.ctx()), volumes["xfs"].Unpublish(b.ctx()))
}

// backups has crustctl write an image of each snapshot, all but the first from the one before and what has changed. It
// compares each with its snapshot itself.
func (b *bench) backups(fsType string, snaps []string) {
	b.Helper()
	dir := b.TempDir()
	for i, snap := range snaps {
		restored := b.volume(fmt.Sprintf("restored-%s-%d", fsType, i), fsType, snap, 0)
		args := []string{
			"cbt", "copy", snap, "--driver-endpoint", "unix://" + b.Path("csi.sock"),
			"--source", b.file(restored), "--image", filepath.Join(dir, fmt.Sprint(i)),
		}
		if i > 0 {
			args = append(args, snaps[i-1], "--base-image", filepath.Join(dir, fmt.Sprint(i-1)))
		}
		out, err := exec.CommandContext(b.ctx(), filepath.Join(b.bin, "crustctl"), args...).CombinedOutput()
		if err != nil {
			b.Fatalf("crustctl %v: %v\n%s", args, err, out)
		}
		b.Logf("%s", out)
		if info, err := os.Stat(filepath.Join(dir, fmt.Sprint(i))); err != nil || info.Size() != restored.Size {
			b.Errorf("the image: %v, %v", info, err)
		}
		must(b, restored.Delete(b.ctx()))
	}
}
