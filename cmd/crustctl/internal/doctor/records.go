package doctor

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	adminv1 "crust.dev/crust/protocol/crust/admin/v1"
)

const (
	// kepRecords is KEP-2857's directory of records.
	kepRecords = "/run/crust"
	// infoName is the file that makes a directory a record, of both kinds.
	infoName = "mountInfo.json"
	// targetKey and handlerKey mark a record as one of crustd's, in its metadata: of KEP-2857, and of Kata.
	targetKey  = "crust.dev/target-path"
	handlerKey = "crust.dev/handler"
)

// record is a record on a runtime's side.
type record struct {
	path   string // of its directory
	target string // the target path that it is for; empty if that is not known
	ours   bool
	err    error
}

// checkRecords looks for records that are for nothing any more, and for those that stop a runtime.
func checkRecords(_ context.Context, n *Node) []Finding {
	var findings []Finding
	count := 0
	for _, root := range []struct {
		dir  string
		read func(dir, name string) (record, bool)
	}{{kepRecords, n.kepRecord}, {kataRecords, n.kataRecord}} {
		entries, err := os.ReadDir(n.at(root.dir))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			findings = append(findings, one(Warning, fmt.Sprintf("records: %v", err), "what is stale there is not known", "make it readable for root")...)
		}
		for _, e := range entries {
			if r, is := root.read(root.dir, e.Name()); e.IsDir() && is {
				count++
				findings = append(findings, n.judge(r)...)
			}
		}
	}
	return unless(findings, fmt.Sprintf("%d records for runtimes, none of them stale", count))
}

// info is what of a record matters here.
type info struct {
	Metadata map[string]string `json:"metadata"`
}

func (n *Node) info(dir string) (i info, err error) {
	raw, err := n.read(filepath.Join(dir, infoName))
	if err != nil {
		return i, err
	}
	return i, json.Unmarshal(raw, &i)
}

// kepRecord reads a record of KEP-2857. Its directory has the name of a digest; other names are no records.
func (n *Node) kepRecord(root, name string) (record, bool) {
	if len(name) != 64 || strings.Trim(name, "0123456789abcdef") != "" {
		return record{}, false
	}
	r := record{path: filepath.Join(root, name)}
	i, err := n.info(r.path)
	r.err, r.target = err, i.Metadata[targetKey]
	r.ours = r.target != ""
	return r, true
}

// kataRecord reads one of Kata's. Every directory there is one.
func (n *Node) kataRecord(root, name string) (record, bool) {
	r := record{path: filepath.Join(root, name)}
	i, err := n.info(r.path)
	_, r.ours = i.Metadata[handlerKey]
	r.err = err
	if target, err := base64.URLEncoding.DecodeString(name); err == nil {
		r.target = string(target)
	} else {
		r.err = fmt.Errorf("its name is no path in base64: %w", err)
	}
	return r, true
}

// judge says what is wrong with a record.
func (n *Node) judge(r record) []Finding {
	what := fmt.Sprintf("the record %s for %s", r.path, cmp.Or(r.target, "nobody knows what"))
	remove := "make sure that no sandbox has the volume, and remove " + r.path
	if r.ours {
		remove = "crustctl gc takes it back"
	}
	known := slices.ContainsFunc(n.Deferrals, func(d *adminv1.Deferral) bool { return n.resolved(d.GetTargetPath()) == n.resolved(r.target) })
	switch {
	case r.err != nil && errors.Is(r.err, os.ErrNotExist):
		return one(Error, what+" has no "+infoName, "Kata's runtime-rs refuses a container whose record is half there; its Go runtime mounts the node's directory instead", remove)
	case r.err != nil:
		return one(Error, fmt.Sprintf("%s cannot be read: %v", what, r.err), "a runtime that cannot read it fails the container, or mounts the node's directory instead", remove)
	case !n.exists(r.target):
		return one(Warning, what+" is stale: the path is not there any more", "records that nobody removes add up; a later pod never has the same path", remove)
	case r.ours && n.Status != nil && !known:
		return one(Warning, what+" is stale: crustd has no such deferral", "a sandbox that starts now would mount what nobody has published", remove)
	}
	return nil
}

// checkSandboxes looks for volumes that are held by what is gone, and for those that are not where they should be.
func checkSandboxes(_ context.Context, n *Node) []Finding {
	if n.Status == nil {
		return nil
	}
	raw, err := n.read("/proc/sys/kernel/random/boot_id")
	boot := strings.TrimSpace(string(raw))
	var findings []Finding
	for _, d := range n.Deferrals {
		if id := d.GetSandbox().GetBootId(); err == nil && id != "" && id != boot {
			findings = append(findings, one(Error, fmt.Sprintf("volume %s is recorded as held by sandbox %s of an earlier boot", d.GetVolumeId(), d.GetSandbox().GetId()),
				"the sandbox is gone; until the record is, no other gets the volume", "crustctl gc takes it back; if it stays, look at crustd's log")...)
		}
		if breach := d.GetSandbox().GetBreach(); breach != "" {
			findings = append(findings, one(Error, fmt.Sprintf("volume %s is not in its sandbox %s: %s", d.GetVolumeId(), d.GetSandbox().GetId(), breach),
				"the pod runs without its data, and cannot write where the data should be", "put right what is named, and delete the pod so that it starts again")...)
		}
		if d.GetExpandingBytes() > 0 {
			findings = append(findings, one(Warning, fmt.Sprintf("the expansion of volume %s is not finished", d.GetVolumeId()), "the device has grown, the filesystem in the sandbox has not",
				"crustd tries again every minute; crustctl expand "+d.GetVolumeId()+" says what stops it")...)
		}
	}
	return unless(findings, fmt.Sprintf("%d volumes are deferred; those that sandboxes hold are there", len(n.Deferrals)))
}
