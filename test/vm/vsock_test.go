package vm_test

import (
	"strings"
	"testing"

	"crust.dev/crust/runtimehandler/qemu"
	"crust.dev/crust/test/vm"
)

// TestVsock has a client in the guest connect to the agent over vsock, because here is no host with vsock. Only the peer
// that the agent was told to expect gets an answer.
func TestVsock(t *testing.T) {
	vm.Need(t)
	t.Parallel()
	m := vm.Start(t, func(c *qemu.Config) { c.AgentArgs = []string{"--vsock-port=52601", "--vsock-peer=1"} })
	if got := m.Run(t, "crust-agent", "--probe-vsock=52601"); !strings.Contains(got, `"fs_types":["ext4","xfs"]`) {
		t.Errorf("the agent says %s", got)
	}
	const strict = "52602"
	c := m.Begin(t, "crust-agent", "--port=", "--vsock-port="+strict)
	for {
		if _, _, code := m.Begin(t, "crust-agent", "--probe-vsock="+strict).Wait(); code == 0 {
			t.Fatal("the agent has answered somebody who is not the host")
		}
		// Either it has refused the peer, and says so, or it does not listen yet.
		said, err := c.Read()
		if err != nil || said.GetExited() {
			t.Fatalf("the agent has ended: %v, %v", said, err)
		}
		if strings.Contains(string(said.GetStderr()), "only 2 may connect") {
			break
		}
	}
	c.Close()
}
