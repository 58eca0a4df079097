package qemu

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/runtimehandler/qemu/image"
)

var update = flag.Bool("update", false, "write the golden files")

func TestCommandLine(t *testing.T) {
	base := Config{Accel: TCG, Dir: "/vm", Image: image.Image{Kernel: "/boot/vmlinuz", Initrd: "/cache/initrd.cpio"}}
	for _, tc := range []struct {
		name   string
		change func(*Config)
		fds    descriptors
	}{
		{"tcg", func(*Config) {}, descriptors{console: 3, qmp: 4, agent: 5}},
		{"kvm-vsock", func(c *Config) {
			c.Accel, c.CPUs, c.MemoryMiB, c.NoSeccomp = KVM, 4, 2048, true
			c.KernelArgs, c.AgentArgs = []string{"loglevel=7"}, []string{"--x"}
		}, descriptors{console: 3, qmp: 4, agent: 5, vsock: 6, vsockCID: 42}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := base
			tc.change(&c)
			c, err := c.withDefaults()
			if err != nil {
				t.Fatal(err)
			}
			got := lines(commandLine(c, tc.fds))
			golden := filepath.Join("testdata", tc.name+".golden")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s\nif that is meant, go test -run TestCommandLine -update", diff)
			}
		})
	}
}

// lines puts each option with its value on a line.
func lines(args []string) string {
	var b strings.Builder
	for i, arg := range args {
		switch {
		case i == 0:
		case strings.HasPrefix(arg, "-"):
			b.WriteByte('\n')
		default:
			b.WriteByte(' ')
		}
		b.WriteString(arg)
	}
	return b.String() + "\n"
}

func TestConfig(t *testing.T) {
	good := Config{Accel: TCG, Dir: "/vm", Image: image.Image{Kernel: "/k", Initrd: "/i"}}
	if c, err := good.withDefaults(); err != nil || c.CPUs != 1 || c.MemoryMiB != 512 || c.Binary == "" || c.Log == nil {
		t.Errorf("%+v, %v", c, err)
	}
	for name, change := range map[string]func(*Config){
		"no accelerator":          func(c *Config) { c.Accel = "" },
		"an unknown accelerator":  func(c *Config) { c.Accel = "xen" },
		"no directory":            func(c *Config) { c.Dir = "" },
		"a relative kernel":       func(c *Config) { c.Image.Kernel = "k" },
		"a comma in a path":       func(c *Config) { c.Image.Initrd = "/a,b" },
		"less than no processors": func(c *Config) { c.CPUs = -1 },
		"too little memory":       func(c *Config) { c.MemoryMiB = 64 },
	} {
		c := good
		change(&c)
		if _, err := c.withDefaults(); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
