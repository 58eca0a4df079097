package main

import (
	"bytes"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"crust.dev/crust/csiplugin"
)

func TestRunAnswersByItself(t *testing.T) {
	for name, c := range map[string]struct {
		args       []string
		stdout, ok string
	}{
		"help":                             {[]string{"--help"}, "--node-id", ""},
		"version":                          {[]string{"--version"}, "crust-csi ", ""},
		"an unknown flag":                  {[]string{"--bogus"}, "", "bogus"},
		"an argument":                      {[]string{"bogus"}, "", "bogus"},
		"a bad log level":                  {[]string{"--log-level", "loud"}, "", "loud"},
		"a bad log format":                 {[]string{"--log-format", "xml"}, "", "xml"},
		"a bad pool size":                  {[]string{"--pool-size", "10GB"}, "", "pool-size"},
		"a bad mode":                       {[]string{"--endpoint", "unix:///a", "--node-id", "n", "--pool", "/p", "--mode", "some"}, "", "some"},
		"a router with a pool":             {[]string{"--mode=router", "--pool", "/p"}, "", "--pool"},
		"a router without certificate":     {[]string{"--mode=router", "--endpoint", "unix:///a"}, "", "certificate"},
		"half a certificate":               {[]string{"--endpoint", "unix:///a", "--node-id", "n", "--pool", "/p", "--route-cert", "c"}, "", "all three"},
		"a node that has nothing to route": {[]string{"--endpoint", "unix:///a", "--node-id", "n", "--pool", "/p", "--mode", "node", "--route-listen", ":1", "--route-cert", "c", "--route-key", "k", "--route-ca", "a"}, "", "mode node"},
		"an address without":               {[]string{"--endpoint", "unix:///a", "--node-id", "n", "--pool", "/p", "--route-listen", ":1"}, "", "certificate"},
		"a repair of nothing":              {[]string{"repair"}, "", "--pool"},
		"a probe of nothing":               {[]string{"probe"}, "", "endpoint"},
		"a probe of nobody":                {[]string{"probe", "--endpoint", "unix:///nowhere/csi.sock"}, "", "probe /nowhere/csi.sock"},
		"nothing to work on":               {nil, "", "endpoint"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("CSI_ENDPOINT", "")
			var stdout, stderr bytes.Buffer
			err := run(t.Context(), c.args, &stdout, &stderr)
			if c.ok == "" && err != nil || c.ok != "" && (err == nil || !strings.Contains(err.Error(), c.ok)) {
				t.Errorf("got %v", err)
			}
			if !strings.Contains(stdout.String(), c.stdout) || stderr.Len() > 0 {
				t.Errorf("printed were %q and %q", &stdout, &stderr)
			}
		})
	}
}

func TestFlags(t *testing.T) {
	t.Setenv("CSI_ENDPOINT", "unix:///env.sock")
	o, err := parse([]string{"--node-id", "n", "--pool", "/p", "--pool-size", "10Gi", "--mode", "node", "--driver-name", "d"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := csiplugin.Config{Endpoint: "unix:///env.sock", NodeID: "n", PoolDir: "/p", PoolSize: 10 << 30, Mode: csiplugin.ModeNode, DriverName: "d", Version: o.config.Version}
	want.Images = csiplugin.ImagesConfig{MaxSize: 256 << 30, DownloadTime: 6 * time.Hour, ConvertTime: 6 * time.Hour, ConvertUID: 65534}
	if !reflect.DeepEqual(o.config, want) || o.config.Version == "" {
		t.Errorf("got %+v, want %+v", o.config, want)
	}
}

func TestImageFlags(t *testing.T) {
	o, err := parse([]string{"--image-allow-cidr", "10.0.0.0/8,fd00::/8", "--image-allow-cidr", "192.168.1.0/24", "--image-allow-host", "registry.internal", "--image-max-size", "1Ti", "--image-convert-uid", "1234"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := csiplugin.ImagesConfig{
		AllowCIDRs: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8"), netip.MustParsePrefix("192.168.1.0/24")},
		AllowHosts: []string{"registry.internal"}, MaxSize: 1 << 40, DownloadTime: 6 * time.Hour, ConvertTime: 6 * time.Hour, ConvertUID: 1234,
	}
	if !reflect.DeepEqual(o.config.Images, want) {
		t.Errorf("got %+v, want %+v", o.config.Images, want)
	}
	for _, args := range [][]string{{"--image-allow-cidr", "10.0.0.0"}, {"--image-allow-cidr", "10.0.0.1/8"}, {"--image-allow-host", "http://x"}, {"--image-allow-host", ""}} {
		if _, err := parse(args, nil); err == nil {
			t.Errorf("%q is accepted", args)
		}
	}
}

func TestSize(t *testing.T) {
	for text, want := range map[string]int64{"1": 1, "4Ki": 4096, "300Mi": 300 << 20, "7Ti": 7 << 40, "8388607Ti": 8388607 << 40} {
		var s size
		if err := s.Set(text); err != nil || int64(s) != want {
			t.Errorf("%s is %d, %v", text, s, err)
		}
	}
	for _, text := range []string{"", "-1", "1GB", "Gi", "1.5Gi", "8388608Ti", "9223372036854775808", "1Gi Gi"} {
		var s size
		if err := s.Set(text); err == nil {
			t.Errorf("%q is %d", text, s)
		}
	}
}
