package sanity

import (
	"context"
	"fmt"
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

// Run runs the suite for each of the sockets, for mounts and for block devices, one after the other: its own parts share
// directories, which are made below dir. Volumes are made with parameters. It can be called once in a process, because of ginkgo.
func Run(t testing.TB, dir string, parameters map[string]string, sockets ...string) {
	t.Helper()
	gomega.RegisterFailHandler(ginkgo.Fail)
	ways := 0
	for _, socket := range sockets {
		for _, access := range []string{"mount", "block"} {
			ways++
			config := sanity.NewTestConfig()
			config.Address = "unix://" + socket
			config.DialOptions = append(config.DialOptions, grpc.WithUnaryInterceptor(reflected))
			config.ControllerDialOptions = append(config.ControllerDialOptions, grpc.WithUnaryInterceptor(reflected))
			config.TargetPath, config.StagingPath = filepath.Join(dir, "target"), filepath.Join(dir, "stage")
			config.TestVolumeSize, config.TestVolumeExpandSize = 512<<20, 640<<20
			config.TestVolumeAccessType = access
			config.TestVolumeParameters = parameters
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

// count says how the specs ended, and fails for one that was left out for no good reason.
func count(t testing.TB, report ginkgo.Report, ways int) {
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
