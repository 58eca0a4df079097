package cbt

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/kubernetes-csi/external-snapshot-metadata/pkg/api"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"crust.dev/crust/test/e2e/cluster"
	"crust.dev/crust/test/priv"
)

// buildSidecar builds Kubernetes' own sidecar from its module, unless that was done before.
func buildSidecar(t *testing.T) string {
	t.Helper()
	root, err := filepath.Abs("../..")
	must(t, err)
	bin, err := cluster.Build(t.Context(), root, t.Output(), "snapshotmetadata")
	must(t, err)
	return filepath.Join(bin, "csi-snapshot-metadata")
}

// certificate makes one for 127.0.0.1 and returns where it is.
func certificate(t *testing.T) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "sidecar"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	must(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(private)
	must(t, err)
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	must(t, os.WriteFile(cert, certPEM, 0o600), os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}), 0o600))
	pool = x509.NewCertPool()
	pool.AppendCertsFromPEM(certPEM)
	return cert, key, pool
}

// startSidecar runs the sidecar beside the driver, and returns a client of it.
func (b *bench) startSidecar(t *testing.T, server *apiServer) api.SnapshotMetadataClient {
	t.Helper()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	must(t, os.WriteFile(kubeconfig, fmt.Appendf(nil, `{"apiVersion":"v1","kind":"Config","current-context":"c",
		"clusters":[{"name":"c","cluster":{"server":%q}}],"users":[{"name":"u","user":{}}],"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}]}`, server.URL), 0o600))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	must(t, l.Close())
	cert, key, roots := certificate(t)
	var log bytes.Buffer
	cmd := exec.Command(buildSidecar(t), "-csi-address", b.Path("csi.sock"), "-kubeconfig", kubeconfig, "-tls-cert", cert, "-tls-key", key,
		"-port", fmt.Sprint(port), "-http-endpoint", "127.0.0.1:0")
	cmd.Stdout, cmd.Stderr = &log, &log
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the sidecar's log:\n%s", &log)
		}
	})
	conn, err := grpc.NewClient(fmt.Sprintf("127.0.0.1:%d", port), grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12})))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return api.NewSnapshotMetadataClient(conn)
}

// relayed are the ranges of a stream of the sidecar.
func relayed(ctx context.Context, open func(context.Context) (interface {
	Recv() (*api.GetMetadataDeltaResponse, error)
}, error),
) (ranges [][2]int64, err error) {
	stream, err := open(ctx)
	if err != nil {
		return nil, err
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return ranges, nil
		}
		if err != nil {
			return ranges, err
		}
		for _, r := range m.GetBlockMetadata() {
			ranges = append(ranges, [2]int64{r.GetByteOffset(), r.GetSizeBytes()})
		}
	}
}

// TestSidecar has Kubernetes' sidecar relay our answers, with the rights that our manifests give it and no others.
func TestSidecar(t *testing.T) {
	priv.Root(t)
	b := newBench(t)
	must(t, b.StartDriver(b.ctx()))
	b.dial()
	server := newAPIServer(t)
	v := b.volume("v", "ext4", "", 16*mib)
	file, err := os.OpenFile(b.file(v), os.O_RDWR, 0)
	must(t, err)
	write := func(page int64) {
		_, err := file.WriteAt(bytes.Repeat([]byte("x"), block), page*block)
		must(t, err)
	}
	write(7)
	resp, err := csi.NewControllerClient(b.conn).CreateSnapshot(b.ctx(), &csi.CreateSnapshotRequest{Name: "base", SourceVolumeId: v.ID, Parameters: map[string]string{"crust.dev/keep-bases": "1"}})
	must(t, err)
	base := resp.GetSnapshot().GetSnapshotId()
	write(100)
	write(3000)
	must(t, file.Close())
	target := b.snapshot("target", v.ID)
	server.snapshotObjects("tuesday", target)
	server.put("/apis/cbt.storage.k8s.io/v1beta1/snapshotmetadataservices/csi.crust.dev", map[string]any{
		"apiVersion": "cbt.storage.k8s.io/v1beta1", "kind": "SnapshotMetadataService", "metadata": map[string]any{"name": "csi.crust.dev"},
		"spec": map[string]any{"audience": "csi.crust.dev", "address": "127.0.0.1:1", "caCert": "YQ=="},
	})
	// The class names a secret, so that the sidecar has to read that, too.
	server.put("/apis/snapshot.storage.k8s.io/v1/volumesnapshotclasses/crust-backup", map[string]any{
		"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotClass", "metadata": map[string]any{"name": "crust-backup"},
		"driver": "csi.crust.dev", "deletionPolicy": "Delete", "parameters": map[string]any{
			"csi.storage.k8s.io/snapshotter-secret-name": "s", "csi.storage.k8s.io/snapshotter-secret-namespace": "crust-system",
		},
	})
	server.put("/api/v1/namespaces/crust-system/secrets/s", map[string]any{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"name": "s"}, "data": map[string]any{"k": "dg=="}})
	client := b.startSidecar(t, server)
	ask := func(token, namespace, base string, offset int64) ([][2]int64, error) {
		return relayed(b.ctx(), func(ctx context.Context) (interface {
			Recv() (*api.GetMetadataDeltaResponse, error)
		}, error) {
			return client.GetMetadataDelta(ctx, &api.GetMetadataDeltaRequest{
				SecurityToken: token, Namespace: namespace, BaseSnapshotId: base, TargetSnapshotName: "tuesday", StartingOffset: offset,
			}, grpc.WaitForReady(true))
		})
	}
	want := [][2]int64{{100 * block, block}, {3000 * block, block}}
	var got [][2]int64
	// It is not ready before it has spoken with the driver.
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		got, err = ask(token, "app", base, 0)
		if status.Code(err) != codes.Unavailable || time.Now().After(deadline) {
			break
		}
	}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Fatalf("%v (-want +got):\n%s", err, diff)
	}
	_, err = csi.NewControllerClient(b.conn).DeleteSnapshot(b.ctx(), &csi.DeleteSnapshotRequest{SnapshotId: base})
	must(t, err)
	if got, err := ask(token, "app", base, 101*block); err != nil || !slices.Equal(got, want[1:]) {
		t.Errorf("the rest, since a snapshot that was deleted: %v, %v", got, err)
	}
	for what, c := range map[string]struct {
		err  error
		want codes.Code
	}{
		"another token":     {second(ask("other", "app", base, 0)), codes.Unauthenticated},
		"another namespace": {second(ask(token, "other", base, 0)), codes.PermissionDenied},
		"beyond the end":    {second(ask(token, "app", base, 1<<40)), codes.OutOfRange},
		"no such base":      {second(ask(token, "app", "none", 0)), codes.NotFound},
	} {
		if status.Code(c.err) != c.want {
			t.Errorf("%s: got %v, want %v", what, c.err, c.want)
		}
	}
	for _, asked := range []string{"get secrets", "get volumesnapshotclasses"} {
		if !server.did(asked) {
			t.Errorf("the sidecar never asked to %s", asked)
		}
	}
}

func second[T any](_ T, err error) error { return err }
