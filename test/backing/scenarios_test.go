package backing

import (
	"bytes"
	"crypto/sha512"
	"encoding/hex"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"crust.dev/crust/csiplugin/backing/backingtest"
	"crust.dev/crust/test/node"
)

// fill writes something that is not the same everywhere; digest prints all of it.
const (
	fill   = `mkdir -p /mnt/V/dir; i=0; while [ $i -lt 500 ]; do echo "line $i of many that are not alike" >> /mnt/V/dir/file; i=$((i+1)); done; ln -s dir/file /mnt/V/link; chmod 640 /mnt/V/dir/file; cd /mnt/V`
	digest = `cd /mnt/V && cat link && ls -ln dir/file`
)

// TestScenarios goes through the four scenarios of the document, with qcow2 and with raw, for both kinds of sources, and
// compares what a sandbox finds in each restored volume with what another one has written into the source.
func TestScenarios(t *testing.T) {
	c := newCluster(t)
	plain := readManifests(t, strings.NewReplacer())
	golden := c.provision(plain, plain.find(t, "PersistentVolumeClaim", "golden"))
	first, err := c.StartSandbox(c.ctx(), "first", c.published(golden))
	must(t, err)
	c.sh(first, strings.ReplaceAll(fill, "V", golden.Name))
	want := c.sh(first, strings.ReplaceAll(digest, "V", golden.Name))

	var restored []*node.Volume
	for _, format := range []string{"qcow2", "raw"} {
		restored = append(restored, c.scenarios(format, golden)...)
	}
	// The sandbox has gone on all the while.
	c.sh(first, "echo later >> /mnt/"+golden.Name+"/dir/file")
	if got := c.sh(first, strings.ReplaceAll(digest, "V", golden.Name)); got == want {
		t.Error("the digest does not tell one content from another")
	}

	var mounts []node.Mount
	for _, v := range restored {
		mounts = append(mounts, c.published(v))
	}
	second, err := c.StartSandbox(c.ctx(), "second", mounts...)
	must(t, err)
	for _, v := range restored {
		if got := c.sh(second, strings.ReplaceAll(digest, "V", v.Name)); got != want {
			t.Errorf("%s has %.200q, the source had %.200q", v.Name, got, want)
		}
		if v.Size != 128<<20 {
			t.Errorf("%s has %d bytes", v.Name, v.Size)
		}
	}
	must(t, second.Stop(c.ctx()), first.Stop(c.ctx()))
	c.deleteAll()
}

// scenarios applies the document's manifests, with one format, and returns the volumes that are restored.
func (c *cluster) scenarios(format string, golden *node.Volume) (restored []*node.Volume) {
	t := c.t
	volumes := map[string]*node.Volume{"golden": golden}
	apply := func(m manifests, section string) {
		for _, o := range m[section] {
			switch {
			case o.Kind == "VolumeSnapshot":
				c.snapshot(m, o, volumes)
			case o.Kind == "PersistentVolumeClaim" && o.Metadata.Name != "golden":
				restored = append(restored, c.provision(m, o))
			}
		}
	}
	// Before there is anything to download: scenarios 1 and 2.
	inFormat := []string{"export-type: qcow2", "export-type: " + format, "export-type=qcow2", "export-type=" + format, "golden.qcow2", map[string]string{"qcow2": "golden.qcow2", "raw": "golden.img"}[format]}
	names := []string{"name: from-", "name: " + format + "-from-", "name: golden-v1", "name: " + format + "-golden-v1", "backingImage=", "backingImage=" + format + "-"}
	m := readManifests(t, strings.NewReplacer(append(inFormat, names...)...))
	apply(m, "Scenario 1")
	img := c.image("snapshot-" + format + "-golden-v1")
	if img.GetState() != "ready" || img.GetSource() != "export-from-volume" || img.GetVolumeId() != golden.ID || img.GetFormat() != format || img.GetConsistency() != "filesystem" {
		t.Errorf("the image of scenario 1 is %v", img)
	}
	apply(m, "Scenario 2")

	// The image that is served is the one that was exported.
	file := c.exportedFile(img.GetExportPath(), restored[0])
	server := backingtest.Serve(t, func(n int, w http.ResponseWriter, r *http.Request) { backingtest.File(file)(n, w, r) })
	sum := sha512.Sum512(file)
	others := []string{"name: debian", "name: " + format + "-debian", "name: exported", "name: " + format + "-exported", "name: on-demand", "name: " + format + "-on-demand",
		"name: export-on-demand", "name: " + format + "-export-on-demand", "volumeSnapshotContentName: ", "volumeSnapshotContentName: " + format + "-",
		"https%3A%2F%2Fimages.example.com", url.QueryEscape(server.URL), "CHECKSUM", hex.EncodeToString(sum[:]), "VOLUME", golden.Name}
	m = readManifests(t, strings.NewReplacer(append(append(inFormat, names...), others...)...))
	for _, name := range []string{"debian", "exported"} {
		c.prepare(format+"-"+name, m.find(t, "VolumeSnapshotContent", format+"-"+name).Spec.Source.Handle)
	}
	requests := len(server.Requests())
	apply(m, "Scenario 3")
	if len(server.Requests()) != requests {
		t.Error("scenario 3 has downloaded what was there")
	}
	if c.image(format+"-on-demand") != nil {
		t.Error("what is for scenario 4 is there already")
	}
	apply(m, "Scenario 4")
	if list := c.crustctl("images"); !strings.Contains(list, format+"-on-demand") || !strings.Contains(list, format+"-export-on-demand") {
		t.Errorf("crustctl does not list what was prepared on demand:\n%s", list)
	}
	return restored
}

// exportedFile is what can be downloaded: the file of an export, or the data of a volume that was restored from a raw one.
func (c *cluster) exportedFile(path string, v *node.Volume) []byte {
	c.t.Helper()
	if path == "" {
		found, err := filepath.Glob(c.Path("pool", "mnt", "objects", v.ID))
		if err != nil || len(found) != 1 {
			found = []string{c.Path("pool", "objects", v.ID)}
		}
		path = found[0]
	}
	raw, err := os.ReadFile(path)
	must(c.t, err)
	return raw
}

// deleteAll deletes the snapshots; what is left are the operator's images.
func (c *cluster) deleteAll() {
	c.t.Helper()
	for name := range c.handles {
		c.deleteSnapshot(name)
	}
	list := c.crustctl("images", "-o", "json")
	for _, format := range []string{"raw", "qcow2"} {
		for name, stays := range map[string]bool{
			"snapshot-" + format + "-golden-v1": false, format + "-on-demand": false, format + "-export-on-demand": false, format + "-debian": true, format + "-exported": true,
		} {
			if there := strings.Contains(list, `"name": "`+name+`"`); there != stays {
				c.t.Errorf("after deleting the snapshots, image %s is there: %t", name, there)
			}
			if stays {
				c.crustctl("images", "delete", name)
			}
		}
	}
	if list := c.crustctl("images"); !strings.HasPrefix(list, "There are no backing images") {
		c.t.Errorf("left are\n%s", list)
	}
}

// TestTheDocumentsCommandsPrepareWhatItsManifestsName: the commands have the handles of the manifests.
func TestTheDocumentsCommandsPrepareWhatItsManifestsName(t *testing.T) {
	raw, err := os.ReadFile("../../docs/backing-images.md")
	must(t, err)
	for _, name := range []string{"debian", "exported"} {
		handle := readManifests(t, strings.NewReplacer()).find(t, "VolumeSnapshotContent", name).Spec.Source.Handle
		if !bytes.Contains(raw, []byte("crustctl images prepare '"+handle+"'")) {
			t.Errorf("nothing prepares the image of content %s", name)
		}
	}
}
