package sanity

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	sanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	"github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	"github.com/onsi/gomega"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	"crust.dev/crust/csiplugin"
	"crust.dev/crust/test/node"
	"crust.dev/crust/test/priv"
)

// maySkip are the reasons for which the suite may leave out a spec: the driver does not claim what it is about. A volume
// of a node-local pool is attached to nothing, so nothing is published by the controller.
var maySkip = []string{
	"ControllerPublishVolume not supported", "ControllerUnpublishVolume not supported",
	"Controller Publish, UnpublishVolume not supported",
}

// specs is how many the suite has for each way of asking, the pending one included. Fewer would mean that it was not run
// in full.
const specs = 103

// TestCSISanity runs the suite four times. Its own parts share directories and cannot run side by side.
func TestCSISanity(t *testing.T) {
	priv.Root(t)
	n := start(t)
	gomega.RegisterFailHandler(ginkgo.Fail)
	ways := 0
	for _, socket := range []string{"csi.sock", "crustd.sock"} {
		for _, access := range []string{"mount", "block"} {
			ways++
			config := sanity.NewTestConfig()
			config.Address = "unix://" + n.Path(socket)
			config.DialOptions = append(config.DialOptions, grpc.WithUnaryInterceptor(reflected))
			config.ControllerDialOptions = append(config.ControllerDialOptions, grpc.WithUnaryInterceptor(reflected))
			config.TargetPath, config.StagingPath = n.Path("target"), n.Path("stage")
			config.TestVolumeSize, config.TestVolumeExpandSize = 512<<20, 640<<20
			config.TestVolumeAccessType = access
			config.TestVolumeMutableParameters = map[string]string{csiplugin.ParameterDiscard: "online"}
			config.TestSnapshotParameters = map[string]string{csiplugin.ParameterConsistency: "filesystem"}
			config.TestInvalidListVolumesStartingToken = "none"
			ginkgo.Describe(fmt.Sprintf("%s through %s", access, socket), func() { sanity.GinkgoTest(&config) })
		}
	}
	ginkgo.ReportAfterSuite("counts", func(report ginkgo.Report) { count(t, report, ways) })
	suite, reporter := ginkgo.GinkgoConfiguration()
	reporter.Succinct = true
	ginkgo.RunSpecs(t, "csi-sanity", suite, reporter)
}

// reflected looks at every answer by reflection, and encodes it. The suite compares topologies with reflect.DeepEqual, which
// sees whether that was done with a message before: without this, equal topologies differ (CreateSnapshot, "accessibility
// requirements", in v5.6.0).
func reflected(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	err := invoke(ctx, method, req, reply, conn, opts...)
	if m, ok := reply.(proto.Message); ok && err == nil {
		_ = prototext.Format(m)
		_, _ = proto.Marshal(m)
	}
	return err
}

// start builds the commands and starts the driver and the daemon.
func start(t *testing.T) *node.Node {
	t.Helper()
	bin := t.TempDir()
	build := exec.Command("go", "build", "-o", bin+"/", "../../cmd/crust-csi", "../../cmd/crustd")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	n, err := node.New(bin, os.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	n.DriverArgs = []string{"--pool-size", "8Gi"}
	if err := n.StartServices(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("the driver's log:\n%s", n.Driver.Log())
			return
		}
		if err := os.RemoveAll(n.Dir); err != nil {
			t.Error(err)
		}
	})
	return n
}

// count says how the specs ended, and fails for one that was left out for no good reason.
func count(t *testing.T, report ginkgo.Report, ways int) {
	t.Helper()
	counts := map[types.SpecState]int{}
	for _, spec := range report.SpecReports {
		if spec.LeafNodeType != types.NodeTypeIt {
			continue
		}
		counts[spec.State]++
		reason := spec.Failure.Message
		if spec.State == types.SpecStateSkipped && !slices.ContainsFunc(maySkip, func(s string) bool { return strings.Contains(reason, s) }) {
			t.Errorf("%s was skipped: %s", spec.FullText(), reason)
		}
	}
	total := 0
	for _, n := range counts {
		total += n
	}
	t.Logf("%d specs: %d passed, %d failed, %d skipped because of what the driver does not claim, %d pending in the suite",
		total, counts[types.SpecStatePassed], counts[types.SpecStateFailed], counts[types.SpecStateSkipped], counts[types.SpecStatePending])
	if total != ways*specs {
		t.Errorf("there are %d specs, want %d", total, ways*specs)
	}
}

// TestNothingIsLeft looks for what the suite's volumes may have left behind on this machine.
func TestNothingIsLeft(t *testing.T) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if raw, err := os.ReadFile(file); err == nil && strings.Contains(string(raw), "crust-node-") && strings.Contains(string(raw), "-vol-") {
			t.Errorf("%s is still %s", file, raw)
		}
	}
}
