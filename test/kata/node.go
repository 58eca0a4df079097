package kata

import (
	"encoding/json"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// Node is a node with Kata on it.
type Node struct {
	t testing.TB
	// Root is where the node's filesystem is.
	Root string

	mu        sync.Mutex
	sandboxes map[string]*Sandbox
}

// New makes a node in a directory of its own. Nothing of Kata's is there until a sandbox starts.
func New(t testing.TB) *Node {
	t.Helper()
	root, err := os.MkdirTemp("", "k") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	return At(t, root)
}

// At makes a node in a directory of the caller's. Its sandboxes end with the test.
func At(t testing.TB, root string) *Node {
	n := &Node{t: t, Root: root, sandboxes: map[string]*Sandbox{}}
	t.Cleanup(func() {
		for _, s := range n.all() {
			s.Stop()
		}
	})
	return n
}

func (n *Node) all() []*Sandbox {
	n.mu.Lock()
	defer n.mu.Unlock()
	var list []*Sandbox
	for _, s := range n.sandboxes {
		list = append(list, s)
	}
	return list
}

// Path is a path on the node.
func (n *Node) Path(elem ...string) string {
	return filepath.Join(append([]string{n.Root}, elem...)...)
}

// Records is the directory of direct volumes.
func (n *Node) Records() string { return n.Path("run/kata-containers/shared/direct-volumes") }

// Reboot ends all sandboxes and empties /run.
func (n *Node) Reboot() {
	n.t.Helper()
	for _, s := range n.all() {
		s.Stop()
	}
	if err := os.RemoveAll(n.Path("run")); err != nil {
		n.t.Fatal(err)
	}
}

// write puts a value into a file as JSON, or a string as it is.
func (n *Node) write(path string, content any) {
	n.t.Helper()
	text, ok := content.(string)
	if !ok {
		raw, err := json.Marshal(content)
		if err != nil {
			n.t.Fatal(err)
		}
		text = string(raw)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		n.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		n.t.Fatal(err)
	}
}
