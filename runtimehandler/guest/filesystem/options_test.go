package filesystem_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"crust.dev/crust/runtimehandler/guest/filesystem"
)

func TestParseOptions(t *testing.T) {
	type words struct {
		Attributes        uint64
		Generic, Specific []string
		ReadOnly          bool
	}
	for _, tc := range []struct {
		name  string
		flags []string
		want  words
		fails bool
	}{
		{"none", nil, words{}, false},
		{"of the mount", []string{"noatime", "nosuid", "nodev", "noexec"}, words{Attributes: unix.MOUNT_ATTR_NOATIME | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOEXEC}, false},
		{"several in one", []string{"noatime,nosuid"}, words{Attributes: unix.MOUNT_ATTR_NOATIME | unix.MOUNT_ATTR_NOSUID}, false},
		{"the last one wins", []string{"noatime", "strictatime", "nosuid", "suid", "ro", "rw"}, words{Attributes: unix.MOUNT_ATTR_STRICTATIME}, false},
		{"read-only is both", []string{"ro"}, words{Attributes: unix.MOUNT_ATTR_RDONLY, Generic: []string{"ro"}, ReadOnly: true}, false},
		{"of every filesystem", []string{"sync", "dirsync", "lazytime"}, words{Generic: []string{"sync", "dirsync", "lazytime"}}, false},
		{"of one filesystem", []string{"data=ordered", "nobarrier"}, words{Specific: []string{"data=ordered", "nobarrier"}}, false},
		{"commas between quotes", []string{`context="a:b:c0,c1",noatime`}, words{Attributes: unix.MOUNT_ATTR_NOATIME, Specific: []string{"context=a:b:c0,c1"}}, false},
		{"of fstab", []string{"defaults", "nofail", "_netdev", "noauto", "x-systemd.automount", "comment=x"}, words{}, false},
		{"a value makes another option", []string{"sync=1"}, words{Specific: []string{"sync=1"}}, false},
		{"bind", []string{"bind"}, words{}, true},
		{"remount", []string{"remount,ro"}, words{}, true},
		{"another device", []string{"source=/dev/vdb"}, words{}, true},
		{"nothing before the sign", []string{"=x"}, words{}, true},
		{"a zero byte", []string{"a=\x00"}, words{}, true},
		{"nothing but a comma", []string{",", ""}, words{}, false},
	} {
		o, err := filesystem.ParseOptions(tc.flags)
		if tc.fails {
			if !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("%s: %v", tc.name, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
		got := words{ReadOnly: o.ReadOnly()}
		got.Attributes, got.Generic, got.Specific = o.Words()
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s: %s", tc.name, diff)
		}
	}
}

func TestDefaultOptions(t *testing.T) {
	for _, tc := range []struct {
		fsType string
		flags  []string
		want   []string
	}{
		{"ext4", nil, []string{"errors=remount-ro"}},
		{"ext4", []string{"errors=panic"}, []string{"errors=panic"}},
		{"ext4", []string{"commit=1"}, []string{"commit=1", "errors=remount-ro"}},
		{"xfs", nil, []string{"nouuid"}},
		{"xfs", []string{"nouuid", "inode64"}, []string{"nouuid", "inode64"}},
	} {
		o, err := filesystem.ParseOptions(tc.flags)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, got := o.WithDefaults(tc.fsType).Words(); !slices.Equal(got, tc.want) {
			t.Errorf("%s with %v: %v, want %v", tc.fsType, tc.flags, got, tc.want)
		}
	}
}

// FuzzParseOptions: whatever is asked for, nothing that names another device, and nothing that changes an existing mount,
// gets through; and "ro" is never lost.
func FuzzParseOptions(f *testing.F) {
	for _, seed := range []string{"ro,noatime", "bind", `a="b,c"`, "=", ",,", "x-y", "rw,ro"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, flags string) {
		o, err := filesystem.ParseOptions([]string{flags, "ro"})
		if err != nil {
			if !errors.Is(err, errdefs.ErrInvalidArgument) {
				t.Errorf("kind of %v", err)
			}
			return
		}
		if !o.ReadOnly() {
			t.Error("not read-only")
		}
		_, _, specific := o.Words()
		for _, word := range specific {
			key, _, _ := strings.Cut(word, "=")
			if key == "" || key == "source" || key == "bind" || key == "remount" {
				t.Errorf("%q got through", word)
			}
		}
	})
}
