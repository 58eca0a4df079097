package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"crust.dev/crust/cmd/internal/output"
	"crust.dev/crust/crust/configfile"
	"crust.dev/crust/protocol/rpc"
)

// checkConfigFile reads crustd's file.
func checkConfigFile(_ context.Context, n *Node) []Finding {
	path := n.ConfigFile
	if n.Status.GetConfigFile() != "" {
		path = n.Status.GetConfigFile()
	}
	if path == "" {
		return nil
	}
	_, err := configfile.Read(n.at(path))
	switch {
	case errors.Is(err, os.ErrNotExist) && n.Status.GetConfigFile() == "":
		return ok(fmt.Sprintf("there is no %s; crustd has flags, or defaults", path))
	case err != nil:
		text := strings.ReplaceAll(err.Error(), n.at(path), path)
		return one(Error, text, "a crustd that is started with this file ends at once; one that runs goes on with the old one",
			"mend the file; crustd --check-config --config "+path+" checks it")
	}
	return ok(path + " is valid")
}

// checkDaemon asks crustd how it is.
func checkDaemon(_ context.Context, n *Node) []Finding {
	if n.DaemonErr != nil {
		return one(Error, fmt.Sprintf("crustd does not answer on %s: %v", n.AdminSocket, n.DaemonErr),
			"no volume is published, and the kubelet waits; running sandboxes keep their volumes",
			"start crustd, or look at its log (journalctl -u crustd, or kubectl logs); if it serves another socket, say so with --admin-endpoint")
	}
	var findings []Finding
	if v := n.Status.GetVersion(); v != n.Version {
		findings = append(findings, one(Warning, fmt.Sprintf("crustd is %s, crustctl is %s", v, n.Version), "one may not know what the other says", "use both of one release")...)
	}
	for _, c := range n.Status.GetChecks() {
		if !c.GetOk() {
			findings = append(findings, one(Error, fmt.Sprintf("%s: %s", c.GetName(), c.GetMessage()), "crustd says so itself, and /readyz does too", cureOf(c.GetName()))...)
		}
	}
	return unless(findings, fmt.Sprintf("version %s answers, and all its checks are in order", n.Status.GetVersion()))
}

// cureOf says what helps when one of crustd's own checks fails.
func cureOf(check string) string {
	word, _, _ := strings.Cut(check, " ")
	switch word {
	case "driver":
		return "start the CSI driver, or correct upstream in crustd's configuration; crustd finds it by itself when it is there"
	case "registration":
		return "look for the driver's name in the kubelet's log; check registrationDir in crustd's configuration"
	case "kubernetes":
		return "check that the API server can be reached from this node and that crustd may get, list and watch pods and RuntimeClasses"
	case "configuration":
		return "mend the file, or restart crustd if that is what it asks for"
	}
	return "look at crustd's log"
}

// checkSockets looks at the sockets that crustd serves and uses.
func checkSockets(_ context.Context, n *Node) []Finding {
	var findings []Finding
	count := 0
	for _, s := range n.sockets() {
		if s.path == "" {
			continue
		}
		if n.exists(s.path) {
			count++
		}
		findings = append(findings, n.checkSocket(s)...)
	}
	return unless(findings, fmt.Sprintf("%d sockets are there, for root alone", count))
}

type socket struct {
	what, path string
	ours       bool // served by crustd
}

// sockets are those that crustd names, or if it is down, those of its file.
func (n *Node) sockets() []socket {
	list := []socket{{"for crustctl", n.AdminSocket, true}}
	if n.Status != nil {
		list = append(list, socket{"for shims", n.Status.GetRuntimeEndpoint(), true}, socket{"for drivers", n.Status.GetKepEndpoint(), true})
		for _, d := range n.Status.GetDrivers() {
			list = append(list, socket{"for the kubelet", d.GetEndpoint(), true}, socket{"of the driver", d.GetUpstream(), false})
		}
		return list
	}
	file := n.file()
	list = append(list, socket{"for shims", path(file.RuntimeEndpoint), true}, socket{"for drivers", path(file.KEPEndpoint), true})
	for _, d := range file.Drivers {
		list = append(list, socket{"for the kubelet", path(d.Endpoint), true}, socket{"of the driver", path(d.Upstream), false})
	}
	return list
}

// file is crustd's configuration file, or an empty one; what is wrong with it is told by checkConfigFile.
func (n *Node) file() *configfile.File {
	if n.ConfigFile != "" {
		if f, err := configfile.Read(n.at(n.ConfigFile)); err == nil {
			return f
		}
	}
	return &configfile.File{}
}

func path(endpoint string) string {
	p, _ := rpc.ParseEndpoint(endpoint) // wrong ones are told by checkConfigFile
	return p
}

func (n *Node) checkSocket(s socket) []Finding {
	what := fmt.Sprintf("the socket %s, %s", s.what, s.path)
	// Of the directories links are followed; the socket itself must be none.
	info, err := os.Lstat(filepath.Join(n.at(filepath.Dir(s.path)), filepath.Base(s.path)))
	switch {
	case err != nil && s.ours && n.DaemonErr != nil:
		return nil // crustd is down, which was said
	case err != nil && !s.ours:
		return one(Error, fmt.Sprintf("%s, is not there", what), "crustd can publish nothing without the driver", "start the CSI driver, or correct upstream in crustd's configuration")
	case err != nil:
		return one(Error, fmt.Sprintf("%s, is not there", what), "somebody has removed it while crustd serves it; nobody can connect any more", "restart crustd")
	case info.Mode().Type() != os.ModeSocket:
		return one(Error, what+", is no socket", "crustd does not replace what is not its own, and cannot start", "remove it, or choose another path in crustd's configuration")
	}
	st, isUnix := info.Sys().(*syscall.Stat_t)
	if s.ours && (info.Mode().Perm()&0o077 != 0 || isUnix && st.Uid != 0) {
		return one(Warning, fmt.Sprintf("%s, has mode %04o and belongs to user %d", what, info.Mode().Perm(), st.Uid), "it is for root alone; crustd turns others away, but they can keep it busy",
			"find out who has changed it, and restart crustd")
	}
	return nil
}

// What should be free where the journal is. A record has about 1 KiB; bbolt doubles its file as it grows.
const (
	littleBytes = 64 << 20
	noBytes     = 1 << 20
)

// checkState looks at the directory of the journal.
func checkState(_ context.Context, n *Node) []Finding {
	dir := n.Status.GetStateDir()
	if dir == "" {
		dir = n.file().StateDir
	}
	if dir == "" {
		dir = "/var/lib/crust"
	}
	info, err := n.stat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist) && n.Status == nil:
		return ok(dir + " is not there; crustd makes it when it starts")
	case err != nil:
		return one(Error, fmt.Sprintf("the state directory: %v", err), "crustd cannot keep its records", "make "+dir+" a directory of root's, and restart crustd")
	case !info.IsDir():
		return one(Error, "the state directory "+dir+" is no directory", "crustd cannot keep its records", "remove what is there, or choose another stateDir")
	}
	fs, err := n.Filesystem(n.at(dir))
	if err != nil {
		return one(Error, fmt.Sprintf("the state directory: %v", err), "crustd cannot keep its records", "mend its filesystem")
	}
	const cure = "free space on its filesystem, or move stateDir while no volume is published"
	free := output.Bytes(fs.FreeBytes)
	var findings []Finding
	switch {
	case fs.FreeBytes < noBytes || fs.FreeInodes == 0:
		findings = one(Error, fmt.Sprintf("%s has no space left (%s)", dir, free), "crustd refuses to publish what it cannot record", cure)
	case fs.FreeBytes < littleBytes:
		findings = one(Warning, fmt.Sprintf("%s has only %s left", dir, free), "when it is full, crustd refuses to publish", cure)
	}
	if fs.InMemory {
		findings = append(findings, one(Error, dir+" is in memory", "after a reboot crustd would not know which volumes it has published, and which hold data",
			"choose a stateDir on a disk")...)
	}
	if info.Mode().Perm()&0o077 != 0 {
		findings = append(findings, one(Warning, fmt.Sprintf("%s has mode %04o", dir, info.Mode().Perm()), "its records are for root alone", "chmod 0700 "+dir)...)
	}
	return unless(findings, fmt.Sprintf("%s, %s free", dir, free))
}
