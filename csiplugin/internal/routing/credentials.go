package routing

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"

	"github.com/containerd/errdefs"
	"google.golang.org/grpc/credentials"

	"crust.dev/crust/protocol/rpc"
)

// NodeName is the DNS name in the certificates of a driver's nodes.
func NodeName(driver string) string { return "node." + driver }

// RouterName is the DNS name in the certificates of a driver's routers.
func RouterName(driver string) string { return "router." + driver }

// Files are what somebody shows and whom they believe, all in PEM. They are read at each handshake, so what is put into their
// place counts from the next one on.
type Files struct {
	// Cert is a certificate, with those between it and the authority behind it, and Key its private key.
	Cert, Key string
	// CA are the authorities, one of which has to have signed the other side's certificate.
	CA string
}

// Given says whether there are any, and is ErrInvalidArgument if some of them are missing.
func (f Files) Given() (bool, error) {
	n := 0
	for _, path := range []string{f.Cert, f.Key, f.CA} {
		if path != "" {
			n++
		}
	}
	if n != 0 && n != 3 {
		return true, fmt.Errorf("certificate %q, key %q and authorities %q go together; give all three: %w", f.Cert, f.Key, f.CA, errdefs.ErrInvalidArgument)
	}
	return n == 3, nil
}

// Check reads the files, and says what is wrong with them.
func (f Files) Check() error {
	_, err := f.load("")
	return err
}

// Credentials are those of gRPC, for servers and for clients, whose other side has to be peer. The log is told who was refused.
func (f Files) Credentials(peer string, log *slog.Logger) credentials.TransportCredentials {
	return &mutual{TransportCredentials: credentials.NewTLS(&tls.Config{ServerName: peer, MinVersion: tls.VersionTLS13}), files: f, peer: peer, log: log}
}

// load makes a configuration for one handshake, on either side. What both sides verify is the same.
func (f Files) load(peer string) (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", f.Cert, f.Key, err)
	}
	raw, err := os.ReadFile(f.CA)
	if err != nil {
		return nil, fmt.Errorf("authorities: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(raw) {
		return nil, fmt.Errorf("authorities %s: there is no certificate in it", f.CA)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert},
		RootCAs: roots, ServerName: peer, // as a client
		ClientCAs: roots, ClientAuth: tls.RequireAndVerifyClientCert, SessionTicketsDisabled: true, // as a server
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 {
				return errors.New("the other side has shown no certificate")
			}
			return s.PeerCertificates[0].VerifyHostname(peer)
		},
	}, nil
}

// mutual is TLS in which both sides show who they are, with the files as they are at that time.
type mutual struct {
	credentials.TransportCredentials
	files Files
	peer  string
	log   *slog.Logger
}

func (m *mutual) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cfg, err := m.files.load(m.peer)
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(cfg).ClientHandshake(ctx, authority, conn)
}

func (m *mutual) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	cfg, err := m.files.load(m.peer)
	if err == nil {
		var secured net.Conn
		var info credentials.AuthInfo
		if secured, info, err = credentials.NewTLS(cfg).ServerHandshake(conn); err == nil {
			return secured, info, nil
		}
	}
	m.log.Warn("a connection was refused", "from", conn.RemoteAddr().String(), "want", m.peer, rpc.LogError, err)
	return nil, nil, err
}

func (m *mutual) Clone() credentials.TransportCredentials { return m }
