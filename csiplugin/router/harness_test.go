package router_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"crust.dev/crust/csiplugin/internal/scratch"
	"crust.dev/crust/protocol/rpc"
)

func TestMain(m *testing.M) { os.Exit(scratch.Main(m)) }

func must(t testing.TB, steps ...error) {
	t.Helper()
	for _, err := range steps {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// authority issues certificates.
type authority struct {
	t    testing.TB
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "authority"}, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	return &authority{t, key, cert}
}

// issue writes a certificate for a name, its key, and the authority's certificate into a directory, as the Secrets of cert-manager
// have them. Files that are there are replaced.
func (a *authority) issue(dir, name string) string {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(a.t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.cert, key.Public(), a.key)
	must(a.t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	must(a.t, err)
	for file, block := range map[string]*pem.Block{
		"tls.crt": {Type: "CERTIFICATE", Bytes: der}, "tls.key": {Type: "PRIVATE KEY", Bytes: private}, "ca.crt": {Type: "CERTIFICATE", Bytes: a.cert.Raw},
	} {
		must(a.t, os.WriteFile(filepath.Join(dir, file), pem.EncodeToMemory(block), 0o600))
	}
	return dir
}

// fileFlags are the flags for what issue has written.
func fileFlags(dir string) []string {
	return []string{"--route-cert", filepath.Join(dir, "tls.crt"), "--route-key", filepath.Join(dir, "tls.key"), "--route-ca", filepath.Join(dir, "ca.crt")}
}

// apiServer lists nodes, and does nothing else.
type apiServer struct {
	*httptest.Server
	mu    sync.Mutex
	nodes map[string]corev1.Node
}

const label = "csi.crust.dev/pool"

func newAPIServer(t *testing.T) *apiServer {
	s := &apiServer{nodes: map[string]corev1.Node{}}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || r.URL.Path != "/api/v1/nodes" {
			http.Error(w, "not for a router", http.StatusForbidden)
			return
		}
		wanted, err := labels.Parse(r.URL.Query().Get("labelSelector"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		list := corev1.NodeList{TypeMeta: metav1.TypeMeta{Kind: "NodeList", APIVersion: "v1"}}
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, node := range s.nodes {
			if wanted.Matches(labels.Set(node.Labels)) {
				list.Items = append(list.Items, node)
			}
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(list)
	}))
	t.Cleanup(s.Close)
	return s
}

// put says that a node has a pool.
func (s *apiServer) put(name, address, pool string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodes[name] = corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label: pool}},
		Status: corev1.NodeStatus{
			Addresses:  []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: name}, {Type: corev1.NodeInternalIP, Address: address}},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
}

// remove removes a node.
func (s *apiServer) remove(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.nodes, name)
}

func (s *apiServer) kubeconfig(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, os.WriteFile(path, fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Config","current-context":"c",
		"clusters":[{"name":"c","cluster":{"server":%q}}],"users":[{"name":"u","user":{}}],"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}]}`, s.URL), 0o600))
	return path
}

// process is a crust-csi that runs.
type process struct {
	t      *testing.T
	argv   []string
	socket string
	cmd    *exec.Cmd
	conn   *grpc.ClientConn
}

// crustCSI builds the command.
func crustCSI(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "crust-csi")
	scratch.Run(t, "go", "build", "-o", bin, "crust.dev/crust/cmd/crust-csi")
	return bin
}

func start(t *testing.T, bin string, args ...string) *process {
	t.Helper()
	p := &process{t: t, socket: filepath.Join(scratch.Dir(t), "csi.sock")}
	p.argv = append([]string{bin, "--endpoint", "unix://" + p.socket, "--log-level", "debug"}, args...)
	conn, err := rpc.Dial(p.socket)
	must(t, err)
	p.conn = conn
	p.run()
	t.Cleanup(func() {
		_ = conn.Close()
		p.stop(syscall.SIGTERM)
	})
	return p
}

// run starts the process, and waits until it listens.
func (p *process) run() {
	p.t.Helper()
	log := &bytes.Buffer{}
	p.cmd = exec.Command(p.argv[0], p.argv[1:]...)
	p.cmd.Stderr = log
	must(p.t, p.cmd.Start())
	p.t.Cleanup(func() {
		if p.t.Failed() {
			p.t.Logf("%s\n%s", strings.Join(p.argv, " "), log)
		}
	})
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if probe, err := net.Dial("unix", p.socket); err == nil {
			must(p.t, probe.Close())
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatal("it does not listen")
		}
	}
}

// stop ends the process, unless it has ended.
func (p *process) stop(by syscall.Signal) {
	if p.cmd == nil {
		return
	}
	must(p.t, p.cmd.Process.Signal(by))
	if err := p.cmd.Wait(); err != nil && by == syscall.SIGTERM {
		p.t.Errorf("it ended with %v", err)
	}
	p.cmd = nil
}
