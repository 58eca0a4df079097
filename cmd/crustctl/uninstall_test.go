package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

func TestUninstallCheck(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "db-0"}, Spec: corev1.PodSpec{NodeName: "worker-1", Volumes: []corev1.Volume{
		{Name: "data", VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: "csi.crust.dev"}}}}}}
	for _, row := range []struct {
		driver, out, err string
	}{
		{"csi.crust.dev", "shop", "1 volumes of csi.crust.dev are in use"},
		{"other.example.com", "No pod uses a volume of other.example.com.", ""},
	} {
		cmd, out := &cobra.Command{}, &bytes.Buffer{}
		cmd.SetContext(t.Context())
		cmd.SetOut(out)
		err := uninstallCheck(cmd, &options{timeout: time.Minute}, fake.NewClientset(pod), row.driver)
		if !strings.Contains(out.String(), row.out) {
			t.Errorf("%s: %q is not in\n%s", row.driver, row.out, out)
		}
		if row.err == "" && err != nil || row.err != "" && (err == nil || !strings.Contains(err.Error(), row.err)) {
			t.Errorf("%s: the error is %v", row.driver, err)
		}
	}
}

func TestUninstallCheckNeedsACluster(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	cmd := newCommand(&options{})
	cmd.SetArgs([]string{"uninstall-check"})
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Errorf("the error is %v", err)
	}
}
