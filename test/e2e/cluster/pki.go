package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// authority signs the certificates of one cluster; its key is never written.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	next int64
}

const validity = 7 * 24 * time.Hour

// newAuthority makes an authority, and ca.crt in a directory.
func newAuthority(dir string) (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	a := &authority{dir: dir, key: key, next: 1}
	a.cert = a.template("crust-cluster")
	a.cert.IsCA, a.cert.BasicConstraintsValid, a.cert.KeyUsage = true, true, x509.KeyUsageCertSign|x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, a.cert, a.cert, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return a, writePEM(filepath.Join(dir, "ca.crt"), "CERTIFICATE", der)
}

func (a *authority) template(name string, groups ...string) *x509.Certificate {
	a.next++
	return &x509.Certificate{
		SerialNumber: big.NewInt(a.next), Subject: pkix.Name{CommonName: name, Organization: groups},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(validity),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost", "kubernetes", "kubernetes.default.svc"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
}

// issue makes file.crt and file.key for a user, or server, and its groups.
func (a *authority) issue(file, user string, groups ...string) error {
	key, err := a.newKey(file)
	if err != nil {
		return err
	}
	der, err := x509.CreateCertificate(rand.Reader, a.template(user, groups...), a.cert, key.Public(), a.key)
	if err != nil {
		return err
	}
	return writePEM(filepath.Join(a.dir, file+".crt"), "CERTIFICATE", der)
}

// newKey makes file.key, and file.pub, which service accounts need.
func (a *authority) newKey(file string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, err
	}
	if err := writePEM(filepath.Join(a.dir, file+".key"), "EC PRIVATE KEY", private); err != nil {
		return nil, err
	}
	return key, writePEM(filepath.Join(a.dir, file+".pub"), "PUBLIC KEY", public)
}

func writePEM(file, kind string, der []byte) error {
	return os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// kubeconfig writes a file with which a user reaches the API server.
func (a *authority) kubeconfig(file, user, server string) error {
	return writeKubeconfig(file, server, filepath.Join(a.dir, "ca.crt"),
		fmt.Sprintf("client-certificate: %q, client-key: %q", filepath.Join(a.dir, user+".crt"), filepath.Join(a.dir, user+".key")))
}

// writeKubeconfig writes a file for a user with some credentials, which are YAML.
func writeKubeconfig(file, server, ca, credentials string) error {
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: u, user: {%s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, server, ca, credentials)
	return os.WriteFile(file, []byte(text), 0o600)
}
