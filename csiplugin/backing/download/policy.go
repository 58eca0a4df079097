package download

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
)

// special are addresses that are not, or need not be, those of a public server. They are IANA's registries of special-purpose
// addresses (RFC 6890 and its updates), multicast, translations that carry another address within, and the one public address
// at which a cloud serves metadata to its machines.
var special = []struct {
	prefix netip.Prefix
	what   string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "this network"},
	{netip.MustParsePrefix("10.0.0.0/8"), "private"},
	{netip.MustParsePrefix("100.64.0.0/10"), "shared by providers, or a cloud's metadata"},
	{netip.MustParsePrefix("127.0.0.0/8"), "loopback"},
	{netip.MustParsePrefix("168.63.129.16/32"), "a cloud's metadata"},
	{netip.MustParsePrefix("169.254.0.0/16"), "link-local, or a cloud's metadata"},
	{netip.MustParsePrefix("172.16.0.0/12"), "private"},
	{netip.MustParsePrefix("192.0.0.0/24"), "assigned to protocols, or a cloud's metadata"},
	{netip.MustParsePrefix("192.0.2.0/24"), "for documentation"},
	{netip.MustParsePrefix("192.88.99.0/24"), "a 6to4 relay"},
	{netip.MustParsePrefix("192.168.0.0/16"), "private"},
	{netip.MustParsePrefix("198.18.0.0/15"), "for benchmarks"},
	{netip.MustParsePrefix("198.51.100.0/24"), "for documentation"},
	{netip.MustParsePrefix("203.0.113.0/24"), "for documentation"},
	{netip.MustParsePrefix("224.0.0.0/4"), "multicast"},
	{netip.MustParsePrefix("240.0.0.0/4"), "reserved"},
	{netip.MustParsePrefix("::/128"), "unspecified"},
	{netip.MustParsePrefix("::1/128"), "loopback"},
	{netip.MustParsePrefix("::/96"), "an IPv4 address in a deprecated form"},
	{netip.MustParsePrefix("64:ff9b::/96"), "an IPv4 address behind a translator"},
	{netip.MustParsePrefix("64:ff9b:1::/48"), "an IPv4 address behind a translator"},
	{netip.MustParsePrefix("100::/64"), "discarded"},
	{netip.MustParsePrefix("2001::/23"), "assigned to protocols, such as Teredo"},
	{netip.MustParsePrefix("2001:db8::/32"), "for documentation"},
	{netip.MustParsePrefix("2002::/16"), "6to4"},
	{netip.MustParsePrefix("3fff::/20"), "for documentation"},
	{netip.MustParsePrefix("5f00::/16"), "segment routing"},
	{netip.MustParsePrefix("fc00::/7"), "private, or a cloud's metadata"},
	{netip.MustParsePrefix("fe80::/10"), "link-local"},
	{netip.MustParsePrefix("fec0::/10"), "site-local"},
	{netip.MustParsePrefix("ff00::/8"), "multicast"},
}

// policy says which addresses may be connected to.
type policy struct {
	cidrs []netip.Prefix
	hosts []string
}

// checkAddress is ErrPermissionDenied for an address that must not be connected to.
func (p policy) checkAddress(addr netip.Addr) error {
	addr = addr.Unmap().WithZone("")
	for _, allowed := range p.cidrs {
		if allowed.Contains(addr) {
			return nil
		}
	}
	for _, s := range special {
		if s.prefix.Contains(addr) {
			return fmt.Errorf("address %s is %s, and images are not fetched from there; the operator can allow it with --image-allow-cidr or --image-allow-host: %w", addr, s.what, errdefs.ErrPermissionDenied)
		}
	}
	return nil
}

// dial connects to host:port. The address is looked at by the dialer, when it is certain.
func (p policy) dial(ctx context.Context, network, hostPort string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(hostPort)
	if err != nil {
		return nil, err
	}
	d := net.Dialer{Timeout: connectTimeout}
	if !slices.Contains(p.hosts, strings.ToLower(strings.TrimSuffix(host, "."))) {
		d.ControlContext = func(_ context.Context, _, address string, _ syscall.RawConn) error {
			to, err := netip.ParseAddrPort(address)
			if err != nil {
				return fmt.Errorf("address %s: %w", address, err)
			}
			return p.checkAddress(to.Addr())
		}
	}
	return d.DialContext(ctx, network, hostPort)
}
