package deploy_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	metadatav1 "github.com/kubernetes-csi/external-snapshot-metadata/client/apis/snapshotmetadataservice/v1beta1"
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	k8syaml "k8s.io/apimachinery/pkg/util/yaml"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

// object is one of Kubernetes' in its own type.
type object struct {
	from string
	runtime.Object
}

func (o object) meta() metaObject {
	accessor, err := meta.Accessor(o.Object)
	if err != nil {
		panic(err) // every type that is decoded here has metadata
	}
	return accessor
}

type metaObject interface {
	GetName() string
	GetNamespace() string
	GetLabels() map[string]string
	GetAnnotations() map[string]string
}

func (o object) kind() string { return o.GetObjectKind().GroupVersionKind().Kind }

func (o object) String() string { return o.from + ": " + o.kind() + " " + o.meta().GetName() }

// podMonitors is a type whose module is not among ours; its fields are checked by hand.
var podMonitors = schema.GroupVersionKind{Group: "monitoring.coreos.com", Version: "v1", Kind: "PodMonitor"}

// decoder refuses fields that a type does not have, and keys that are there twice.
func decoder(t *testing.T) runtime.Decoder {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientscheme.AddToScheme, snapshotv1.AddToScheme, metadatav1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	return json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, json.SerializerOptions{Yaml: true, Strict: true})
}

// decode decodes all documents of a text of YAML strictly.
func decode(t *testing.T, from, text string) []object {
	t.Helper()
	var list []object
	strict := decoder(t)
	for r := k8syaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text))); ; {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return list
		}
		if err != nil {
			t.Fatalf("%s: %v", from, err)
		}
		if len(bytes.TrimSpace(withoutComments(doc))) == 0 {
			continue
		}
		obj, gvk, err := strict.Decode(doc, nil, nil)
		if gvk != nil && *gvk == podMonitors {
			obj, err = decodePodMonitor(doc)
		}
		if err != nil {
			t.Fatalf("%s: %v in\n%s", from, err, doc)
		}
		list = append(list, object{from, obj})
	}
}

func withoutComments(doc []byte) []byte {
	var kept [][]byte
	for line := range bytes.Lines(doc) {
		if !bytes.HasPrefix(bytes.TrimSpace(line), []byte("#")) && !bytes.HasPrefix(line, []byte("---")) {
			kept = append(kept, line)
		}
	}
	return bytes.Join(kept, nil)
}

// podMonitor is as much of a PodMonitor as we use.
type podMonitor struct {
	APIVersion string         `json:"apiVersion"`
	Kind       string         `json:"kind"`
	Metadata   map[string]any `json:"metadata"`
	Spec       struct {
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		PodMetricsEndpoints []struct {
			Port     string `json:"port"`
			Path     string `json:"path"`
			Interval string `json:"interval"`
		} `json:"podMetricsEndpoints"`
	} `json:"spec"`
}

func decodePodMonitor(doc []byte) (runtime.Object, error) {
	var m podMonitor
	if err := yaml.UnmarshalStrict(doc, &m); err != nil {
		return nil, err
	}
	if len(m.Spec.Selector.MatchLabels) == 0 || len(m.Spec.PodMetricsEndpoints) == 0 {
		return nil, errors.New("a PodMonitor that monitors nothing")
	}
	u := &unstructured.Unstructured{}
	return u, yaml.Unmarshal(doc, &u.Object)
}

// of returns the objects of a type.
func of[T runtime.Object](objects []object) []T {
	var list []T
	for _, o := range objects {
		if v, ok := o.Object.(T); ok {
			list = append(list, v)
		}
	}
	return list
}

// pods returns the pods that objects make, by the name of their maker.
func pods(objects []object) map[string]corev1.PodTemplateSpec {
	list := map[string]corev1.PodTemplateSpec{}
	for _, o := range objects {
		switch v := o.Object.(type) {
		case *appsv1.DaemonSet:
			list[v.Name] = v.Spec.Template
		case *appsv1.Deployment:
			list[v.Name] = v.Spec.Template
		default:
			if job, ok := jobTemplate(o); ok {
				list[o.meta().GetName()] = job
			}
		}
	}
	return list
}
