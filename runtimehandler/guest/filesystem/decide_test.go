package filesystem_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"crust.dev/crust/runtimehandler/guest/filesystem"
)

const large = 1 << 30

// found is a finding on a large device.
func found(change func(*filesystem.Finding)) filesystem.Finding {
	f := filesystem.Finding{NonZero: -1, Bytes: large}
	change(&f)
	return f
}

func TestDecide(t *testing.T) {
	blank := found(func(*filesystem.Finding) {})
	unrecognised := found(func(f *filesystem.Finding) { f.NonZero = 4096 })
	ext4 := found(func(f *filesystem.Finding) { f.Type, f.Usage, f.NonZero = "ext4", "filesystem", 1024 })
	dirty := found(func(f *filesystem.Finding) { f.Type, f.Usage, f.NonZero, f.Journal = "ext4", "filesystem", 1024, true })
	xfs := found(func(f *filesystem.Finding) { f.Type, f.Usage, f.NonZero = "xfs", "filesystem", 0 })
	luks := found(func(f *filesystem.Finding) { f.Type, f.Usage, f.NonZero = "crypto_LUKS", "crypto", 0 })
	lvm := found(func(f *filesystem.Finding) { f.Type, f.Usage, f.NonZero = "LVM2_member", "raid", 512 })
	table := found(func(f *filesystem.Finding) { f.Table, f.NonZero = "gpt", 450 })
	both := found(func(f *filesystem.Finding) { f.Type, f.Usage, f.Table, f.NonZero = "ext4", "filesystem", "dos", 510 })
	ambivalent := found(func(f *filesystem.Finding) { f.Ambivalent, f.NonZero = true, 0 })
	// Nothing that the device does not show may be made up: what is recognised counts even if all samples are zero.
	hidden := found(func(f *filesystem.Finding) { f.Type, f.Usage = "xfs", "filesystem" })
	ext3 := found(func(f *filesystem.Finding) { f.Type, f.Usage, f.NonZero = "ext3", "filesystem", 1024 })

	type wish = filesystem.Wish
	type decision = filesystem.Decision
	const nothing, fresh, over = filesystem.NothingKnown, filesystem.NeverWritten, filesystem.UnfinishedFormat
	for _, tc := range []struct {
		name string
		f    filesystem.Finding
		w    wish
		want decision
		says string // of a refusal
	}{
		{"the wanted filesystem is checked and used", ext4, wish{Type: "ext4"}, decision{Check: true}, ""},
		{"also if the storage is wrong about it", ext4, wish{Type: "ext4", Grounds: fresh}, decision{Check: true}, ""},
		{"one that was not unmounted, too", dirty, wish{Type: "ext4"}, decision{Check: true}, ""},
		{"but not if nothing may be changed", dirty, wish{Type: "ext4", ReadOnly: true}, decision{}, "read-write once"},
		{"a clean one is not checked either then", ext4, wish{Type: "ext4", ReadOnly: true}, decision{}, ""},
		{"whatever the grounds", ext4, wish{Type: "ext4", ReadOnly: true, Grounds: over}, decision{}, ""},
		{"what may be unfinished is checked in full", xfs, wish{Type: "xfs", Grounds: over}, decision{Make: filesystem.MakeUnlessSound}, ""},

		{"another filesystem", xfs, wish{Type: "ext4"}, decision{}, "xfs"},
		{"another filesystem, never written", xfs, wish{Type: "ext4", Grounds: fresh}, decision{}, "xfs"},
		{"another filesystem, unfinished", xfs, wish{Type: "ext4", Grounds: over}, decision{}, "xfs"},
		{"another filesystem, all samples zero", hidden, wish{Type: "ext4", Grounds: fresh}, decision{}, "xfs"},
		{"what mkfs.ext4 may look like before its end", ext3, wish{Type: "ext4", Grounds: over}, decision{Make: filesystem.MakeOver}, ""},
		{"but not to everybody", ext3, wish{Type: "ext4", Grounds: fresh}, decision{}, "ext3"},
		{"and not on the way to XFS", ext3, wish{Type: "xfs", Grounds: over}, decision{}, "ext3"},
		{"LUKS", luks, wish{Type: "xfs", Grounds: over}, decision{}, "LUKS"},
		{"LVM", lvm, wish{Type: "xfs", Grounds: fresh}, decision{}, "LVM"},
		{"a partition table", table, wish{Type: "ext4", Grounds: over}, decision{}, "partition table (gpt)"},
		{"a partition table and the wanted filesystem", both, wish{Type: "ext4"}, decision{}, "both"},
		{"more than one signature", ambivalent, wish{Type: "ext4", Grounds: over}, decision{}, "more than one kind"},

		{"a blank device of which nothing is known", blank, wish{Type: "ext4"}, decision{}, "not known to be blank"},
		{"one that was never written", blank, wish{Type: "ext4", Grounds: fresh}, decision{Make: filesystem.MakeFresh}, ""},
		{"one that is read-only", blank, wish{Type: "ext4", Grounds: fresh, ReadOnly: true}, decision{}, "read-only"},
		{"one that says otherwise", unrecognised, wish{Type: "xfs", Grounds: fresh}, decision{}, "offset 4096"},
		{"unrecognised data", unrecognised, wish{Type: "xfs"}, decision{}, "offset 4096"},
		{"what an interrupted mkfs has left", unrecognised, wish{Type: "xfs", Grounds: over}, decision{Make: filesystem.MakeOver}, ""},
		{"or has not even begun", blank, wish{Type: "xfs", Grounds: over}, decision{Make: filesystem.MakeOver}, ""},
		{"unrecognised data, read-only", unrecognised, wish{Type: "xfs", Grounds: over, ReadOnly: true}, decision{}, "read-write once"},
	} {
		got, err := filesystem.Decide(tc.f, tc.w)
		if tc.says != "" {
			if !errors.Is(err, errdefs.ErrFailedPrecondition) || !strings.Contains(err.Error(), tc.says) || !strings.Contains(err.Error(), ";") {
				t.Errorf("%s: error %v, want one with %q and a cure", tc.name, err, tc.says)
			}
		} else if err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%s: %s", tc.name, diff)
		}
	}
}

// TestDecideNeverMakesWithoutGrounds goes through all findings: a filesystem is made only on a device on which nothing is
// recognised, or its own traces, and only on the caller's word.
func TestDecideNeverMakesWithoutGrounds(t *testing.T) {
	types := []string{"", "ext2", "ext4", "xfs", "btrfs", "crypto_LUKS", "LVM2_member", "linux_raid_member", "swap", "zfs_member"}
	for _, fsType := range filesystem.Types() {
		for _, there := range types {
			for _, tbl := range []string{"", "gpt"} {
				for _, ambivalent := range []bool{false, true} {
					for _, nonZero := range []int64{-1, 0} {
						for _, readOnly := range []bool{false, true} {
							for _, grounds := range []filesystem.Grounds{filesystem.NothingKnown, filesystem.NeverWritten, filesystem.UnfinishedFormat} {
								f := filesystem.Finding{Type: there, Table: tbl, Ambivalent: ambivalent, NonZero: nonZero, Bytes: large}
								d, err := filesystem.Decide(f, filesystem.Wish{Type: fsType, ReadOnly: readOnly, Grounds: grounds})
								if err != nil || d.Make == filesystem.MakeNone {
									continue
								}
								own := there == "" || there == fsType || fsType == "ext4" && strings.HasPrefix(there, "ext")
								blank := there == "" && nonZero < 0
								if readOnly || ambivalent || tbl != "" || grounds == filesystem.NothingKnown ||
									grounds == filesystem.NeverWritten && !blank || grounds == filesystem.UnfinishedFormat && !own {
									t.Errorf("%+v as %s, grounds %v, read-only %v: %+v", f, fsType, grounds, readOnly, d)
								}
							}
						}
					}
				}
			}
		}
	}
}

func TestDecideSizes(t *testing.T) {
	for fsType, least := range map[string]int64{"ext4": filesystem.MinExt4Bytes, "xfs": filesystem.MinXFSBytes} {
		for _, grounds := range []filesystem.Grounds{filesystem.NeverWritten, filesystem.UnfinishedFormat} {
			w := filesystem.Wish{Type: fsType, Grounds: grounds}
			if _, err := filesystem.Decide(filesystem.Finding{NonZero: -1, Bytes: least}, w); err != nil {
				t.Errorf("%s on %d bytes: %v", fsType, least, err)
			}
			if _, err := filesystem.Decide(filesystem.Finding{NonZero: -1, Bytes: least - 512}, w); !errors.Is(err, errdefs.ErrOutOfRange) {
				t.Errorf("%s on %d bytes: %v", fsType, least-512, err)
			}
		}
		small := filesystem.Finding{Type: fsType, NonZero: 0, Bytes: least / 2}
		if _, err := filesystem.Decide(small, filesystem.Wish{Type: fsType}); err != nil {
			t.Errorf("a small %s that is there: %v", fsType, err)
		}
	}
	if _, err := filesystem.Decide(filesystem.Finding{}, filesystem.Wish{Type: "ntfs"}); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("an unknown type: %v", err)
	}
}
