package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/registry"

	"crust.dev/crust/test/docs"
)

// act is a command of a document, as it is written there. What has to differ here is added at its end: the chart's values, and
// --dry-run=server where what is described would be the end of this cluster. Its output has the texts of want.
type act struct {
	line, more string
	want       []string
}

// inSystem is how many of the commands begin.
const inSystem = "kubectl --namespace crust-system "

// The documented commands in an order in which each finds what it is about. Some are in several documents, and are run once more.
var (
	installing = []act{
		{line: "kubectl create namespace crust-system"},
		{line: "kubectl label namespace crust-system pod-security.kubernetes.io/enforce=privileged"},
	}
	firstPodActs = []act{
		{line: "skopeo copy --all oci-archive:bin/images/crust-node.tar docker://registry.example.com/storage/crust-node:0.1.0", more: "--dest-tls-verify=false"},
		{line: "helm install crust deploy/helm/crust --namespace crust-system --create-namespace --set image.registry=registry.example.com/storage",
			more: "--values values.yaml --set image.tag=0.1.0"},
		{line: inSystem + "rollout status daemonset/crust-node"},
		{line: inSystem + "exec daemonset/crust-node --container crustd -- crustctl status", want: []string{"Default handler", Driver}},
		{line: "kubectl apply --filename first.yaml"},
		{line: "kubectl wait pod/first --for=condition=Ready --timeout=180s"},
		{line: "kubectl logs first", want: []string{"/dev/vd", " on /data type ext4"}},
		{line: inSystem + "exec daemonset/crust-node --container crustd -- crustctl list", want: []string{"first", "mounted"}},
	}
	looking = []act{
		{line: inSystem + "get pods --output wide --selector app.kubernetes.io/component=node", want: []string{"crust-node-"}},
		{line: "kubectl describe pod first", want: []string{"SandboxVolumeMounted"}},
		{line: inSystem + "exec crust-node-abcde --container crustd -- crustctl status", want: []string{"Default handler", Driver}},
		{line: inSystem + "exec crust-node-abcde --container crustd -- crustctl list", want: []string{"first"}},
		{line: inSystem + "logs crust-node-abcde --container crustd", want: []string{"crustd is ready"}},
		{line: inSystem + "logs deployment/crust-controller --container router", want: []string{"serving"}},
		{line: inSystem + "logs deployment/crust-controller --container csi-resizer", want: []string{"lease"}},
		{line: inSystem + "logs deployment/crust-controller --container csi-snapshotter", want: []string{"lease"}},
		{line: inSystem + "exec crust-node-abcde --container crust-csi -- crustctl pool", want: []string{"Free", "Volumes"}},
		{line: inSystem + "exec crust-node-abcde --container crust-csi -- crustctl volumes --sharing", want: []string{"-vol-"}},
		{line: inSystem + "exec crust-node-abcde --container crust-csi -- crustctl cbt bases"},
	}
	upgrading = []act{
		{line: "helm upgrade crust deploy/helm/crust --namespace crust-system --reset-then-reuse-values --set image.tag=0.2.0", more: "--set image.tag=0.1.0 --set log.level=debug --wait"},
		{line: inSystem + "rollout status daemonset/crust-node"},
		{line: "helm rollback crust --namespace crust-system", more: "--wait"},
	}
	draining = []act{
		{line: "crustctl uninstall-check --kubeconfig admin.conf"},
		{line: "kubectl drain worker-1 --ignore-daemonsets --delete-emptydir-data", want: []string{"drained"}},
		{line: "kubectl uncordon worker-1"},
		{line: "kubectl delete node worker-1", more: "--dry-run=server"},
		{line: "kubectl apply --filename deploy/manifests/crust.yaml", more: "--dry-run=server", want: []string{"daemonset.apps/crust-node"}},
	}
	removing = []act{
		{line: "helm uninstall crust --namespace crust-system", more: "--wait"},
		{line: inSystem + "create secret generic crust-route-node --from-file=tls.crt=node.crt --from-file=tls.key=node.key --from-file=ca.crt"},
		{line: inSystem + "create secret generic crust-route-router --from-file=tls.crt=router.crt --from-file=tls.key=router.key --from-file=ca.crt"},
		{line: "kubectl apply --filename deploy/manifests/crust-full.yaml", more: "--dry-run=server", want: []string{"deployment.apps/crust-controller"}},
		{line: "chattr -R -i /var/lib/crust/pool"},
		{line: "rm -r /var/lib/crust /run/crust"},
	}
	labelling    = act{line: "kubectl label volumesnapshotcontent snapcontent-abcde snapshot.storage.kubernetes.io/managed-by=worker-1"} // by withoutController
	throwingAway = act{line: "helm uninstall crust --namespace crust-system --no-hooks", more: "--wait"}
)

// elsewhere are the beginnings of commands that are run by other tests, or by none.
var elsewhere = map[string]string{
	"make images ":           "the images of this cluster are made by what it calls",
	"ctr --namespace k8s.io": "this is how the images of this cluster have come to its node",
	"openssl ":               "all of them are run, by their block",
	"crust-csi repair ":      "tests of csiplugin, on pools that lack more",
}

// documented does what the documents say, with a registry from which the pods' image is pulled. It ends with nothing installed.
func documented(s *space) {
	blocks, err := docs.Blocks(filepath.Join(s.root, "docs"))
	must(s.t, err)
	everyCommandIsKnown(s, blocks)
	r := newReader(s)

	r.run(throwingAway)
	s.kubectl("delete", "namespace", namespace)
	r.run(installing...)
	s.system("create", "secret", "tls", "metadata", "--cert", s.pki("apiserver.crt"), "--key", s.pki("apiserver.key"))
	r.write("first.yaml", strings.ReplaceAll(block(s, blocks, "yaml", "kind: Pod"), "image: busybox", "image: "+Image+"\n      imagePullPolicy: Never"))
	r.run(firstPodActs...)
	r.write("backup.yaml", block(s, blocks, "yaml", "kind: VolumeSnapshot"))
	r.run(looking...)
	s.kubectl("apply", "--filename", r.path("backup.yaml"))
	s.ready("monday")
	r.run(upgrading...)
	s.kubectl("delete", "pod", "first")
	r.run(draining...)
	s.kubectl("delete", "pvc", "--all") // one waits for its first consumer, and holds on to the snapshot
	s.kubectl("delete", "volumesnapshots", "--all")
	eventually(s.t, "no volumes are left", func(context.Context) error {
		if left := s.kubectl("get", "pv,volumesnapshotcontents", "-o", "name"); left != "" {
			return errors.New(left)
		}
		return nil
	})
	for _, b := range blocks {
		if b.Info == "sh run" {
			r.shell(b.Text)
		}
	}
	r.run(removing...)
}

// everyCommandIsKnown: what the documents have is run here or named as run elsewhere, and nothing is run that they do not have.
func everyCommandIsKnown(s *space, blocks []docs.Block) {
	s.t.Helper()
	lines := docs.Commands(blocks)
	all := slices.Concat(installing, firstPodActs, looking, upgrading, draining, removing, []act{labelling, throwingAway})
	for _, a := range all {
		if !slices.Contains(lines, a.line) {
			s.t.Errorf("no document has %q", a.line)
		}
	}
	for _, line := range lines {
		known := slices.ContainsFunc(all, func(a act) bool { return a.line == line })
		for prefix := range elsewhere {
			known = known || strings.HasPrefix(line, prefix)
		}
		if !known {
			s.t.Errorf("nobody runs %q", line)
		}
	}
	if s.t.Failed() {
		s.t.FailNow()
	}
}

// block is the documented block of a kind that has a text at the end of a line.
func block(s *space, blocks []docs.Block, kind, text string) string {
	s.t.Helper()
	for _, b := range blocks {
		if b.Info == kind && strings.Contains(b.Text, text+"\n") {
			return b.Text
		}
	}
	s.t.Fatalf("no document has a block with %q", text)
	return ""
}

// reader is somebody who types in what documents say, in a directory with a copy of the repository.
type reader struct {
	*space
	dir   string
	names []string // what the documents call things, each followed by what it is called here
}

// newReader prepares a directory. What is done without a namespace is done in the scenario's.
func newReader(s *space) *reader {
	s.t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	s.t.Cleanup(server.Close)
	r := &reader{s, s.t.TempDir(), []string{
		"worker-1", Node, "registry.example.com", server.Listener.Addr().String(), "/var/lib/crust", s.path("crust"),
	}}
	must(s.t, os.Symlink(filepath.Join(s.root, "deploy"), r.path("deploy")))
	must(s.t, os.MkdirAll(r.path("bin"), 0o700))
	must(s.t, os.Symlink(filepath.Dir(s.nodeImage()), r.path("bin", "images")))
	must(s.t, os.Symlink(s.valuesFile(), r.path("values.yaml")))
	raw, err := os.ReadFile(s.Kubeconfig())
	must(s.t, err)
	r.write("admin.conf", string(raw))
	r.shell("kubectl config set-context --current --namespace " + s.name)
	return r
}

func (r *reader) path(elem ...string) string {
	return filepath.Join(append([]string{r.dir}, elem...)...)
}

func (r *reader) write(name, text string) {
	r.t.Helper()
	must(r.t, os.WriteFile(r.path(name), []byte(text), 0o600))
}

// run types in commands, with the names that things have here.
func (r *reader) run(acts ...act) {
	r.t.Helper()
	for _, a := range acts {
		node := ""
		if strings.Contains(a.line, "crust-node-abcde") {
			node = r.nodePod()
		}
		line := strings.NewReplacer(append([]string{"crust-node-abcde", node}, r.names...)...).Replace(a.line)
		eventually(r.t, a.line, func(context.Context) error { // a log may come a moment later
			out := r.shell(strings.TrimSpace(line + " " + a.more))
			for _, want := range a.want {
				if !strings.Contains(out, want) {
					return fmt.Errorf("it says nothing of %q:\n%s", want, out)
				}
			}
			return nil
		})
	}
}

// nodePod is the pod of the node that is not about to go.
func (r *reader) nodePod() (name string) {
	r.t.Helper()
	eventually(r.t, "one pod of the node", func(context.Context) error {
		names := strings.Fields(r.system("get", "pods", "--selector", "app.kubernetes.io/component=node", "-o", "jsonpath={.items[*].metadata.name}"))
		if len(names) != 1 {
			return fmt.Errorf("there are %q", names)
		}
		name = names[0]
		return nil
	})
	return name
}

func (r *reader) shell(script string) string {
	r.t.Helper()
	cmd := exec.CommandContext(step(r.t), "bash", "-euc", script)
	cmd.Dir = r.dir
	cmd.Env = append(os.Environ(), "KUBECONFIG="+r.path("admin.conf"), "PATH="+r.bin+":"+r.ours+":"+os.Getenv("PATH"))
	return r.succeeds(cmd)
}
