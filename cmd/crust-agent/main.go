// Crust-agent is what runs inside a sandbox: it mounts the filesystems of volumes for the host. As process 1 it brings the
// guest up first, and its flags come from the kernel's command line, after "--".
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"
	"time"

	containerdlog "github.com/containerd/log"

	guestv1 "crust.dev/crust/protocol/crust/guest/v1"
	"crust.dev/crust/protocol/rpc"
	"crust.dev/crust/runtimehandler/guest"
	"crust.dev/crust/runtimehandler/guest/boot"
	"crust.dev/crust/runtimehandler/guest/channel"
	"crust.dev/crust/runtimehandler/guest/modules"
)

// version is set by the linker for releases.
var version = "development"

type flags struct {
	port      string
	vsockPort uint
	vsockPeer uint
	modules   string
	dedicated bool
	probe     uint
}

func parse(args []string) (flags, error) {
	var f flags
	set := flag.NewFlagSet("crust-agent", flag.ContinueOnError)
	set.StringVar(&f.port, "port", guest.DefaultPort, "name of the virtio-serial port on which to serve; empty is none")
	set.UintVar(&f.vsockPort, "vsock-port", 0, "vsock port on which to serve; 0 is none")
	set.UintVar(&f.vsockPeer, "vsock-peer", channel.HostCID, "vsock context id that may connect")
	set.StringVar(&f.modules, "modules", "", "directory with the lists of kernel modules to load; empty is none")
	set.BoolVar(&f.dedicated, "dedicated", false, "the guest exists for the agent only; process 1 sets it")
	set.UintVar(&f.probe, "probe-vsock", 0, "serve nothing; ask the agent on this vsock port of the same guest for its info")
	if err := set.Parse(args); err != nil {
		return f, err
	}
	if set.NArg() > 0 {
		return f, fmt.Errorf("unexpected argument %q", set.Arg(0))
	}
	return f, nil
}

func main() {
	// The memory of a guest is the pod's: what Go keeps to be fast is better given back.
	debug.SetGCPercent(50)
	if boot.IsInit() {
		asInit()
	}
	if err := run(os.Args[1:]); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "crust-agent: %v\n", err)
		os.Exit(1)
	}
}

// asInit does not return. What is wrong with the flags is found by the child, where it can be seen on the console.
func asInit() {
	// The kernel hands over every word that it does not know, ours or not.
	args := slices.DeleteFunc(os.Args[1:], func(word string) bool { return !strings.HasPrefix(word, "--") })
	f, _ := parse(args)
	err := boot.Run(boot.Config{
		Modules: modules.Dir(f.modules),
		Program: "/proc/self/exe",
		Args:    append([]string{"crust-agent", "--dedicated"}, args...),
		Env:     os.Environ(),
	})
	fmt.Fprintf(os.Stderr, "crust-agent: %v\n", err)
	os.Exit(1)
}

func run(args []string) error {
	f, err := parse(args)
	if err != nil {
		return err
	}
	_ = containerdlog.SetLevel("fatal") // ttrpc logs every closed connection as an error, past our logger
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if f.probe != 0 {
		return probe(ctx, uint32(f.probe))
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	agent, err := guest.New(guest.Config{
		Version:   version,
		Port:      f.port,
		VsockPort: uint32(f.vsockPort),
		VsockPeer: uint32(f.vsockPeer),
		Modules:   modules.Dir(f.modules),
		Dedicated: f.dedicated,
		Log:       log,
	})
	if err != nil {
		return err
	}
	return agent.Run(ctx)
}

// probe prints what the agent on a vsock port of this guest says of itself.
func probe(ctx context.Context, port uint32) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	const self = 1 // VMADDR_CID_LOCAL
	conn, err := channel.DialVsock(ctx, self, port)
	if err != nil {
		return err
	}
	client := rpc.NewTTRPCClient(conn)
	defer client.Close()
	info, err := guestv1.NewTTRPCAgentClient(client).GetInfo(ctx, &guestv1.GetInfoRequest{})
	if err != nil {
		return rpc.FromWire(err)
	}
	return json.NewEncoder(os.Stdout).Encode(info)
}
