package cbt

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"

	"crust.dev/crust/deploy"
)

// token is the only one that the API server takes.
const token = "the backup program's"

// apiServer is as much of one as the sidecar asks for. It allows what the shipped RBAC objects allow, and nothing else.
type apiServer struct {
	*httptest.Server
	rules map[string][]rbacv1.PolicyRule // by namespace; "" is everywhere

	mu      sync.Mutex
	objects map[string]any // by path
	asked   []string
}

// newAPIServer has the rights that the chart gives the sidecar if classes name the secret s.
func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	s := &apiServer{rules: map[string][]rbacv1.PolicyRule{}, objects: map[string]any{}}
	templates, err := deploy.Render("crust-system", map[string]any{"snapshotMetadata": map[string]any{"enabled": true, "secrets": []any{"s"}}})
	must(t, err)
	for _, template := range templates {
		if template.Name != "snapshot-metadata-rbac.yaml" {
			continue
		}
		for d := yaml.NewYAMLOrJSONDecoder(strings.NewReader(template.Text), 4096); ; {
			var role rbacv1.Role // a ClusterRole has the same fields, and a binding has no rules
			if err := d.Decode(&role); err != nil {
				break
			}
			if !strings.HasSuffix(role.Name, "-client") { // that is for backup programs
				s.rules[role.Namespace] = append(s.rules[role.Namespace], role.Rules...)
			}
		}
	}
	if len(s.rules[""]) == 0 || len(s.rules["crust-system"]) == 0 {
		t.Fatal("the chart gives the sidecar no rights")
	}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

// request is what a request is about, in RBAC's terms.
type request struct{ verb, group, resource, namespace, name string }

func parseRequest(r *http.Request) (q request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	if parts[0] == "apis" {
		q.group, parts = parts[1], parts[3:]
	} else {
		parts = parts[2:]
	}
	if len(parts) > 2 && parts[0] == "namespaces" {
		q.namespace, parts = parts[1], parts[2:]
	}
	q.resource = parts[0]
	if len(parts) > 1 {
		q.name = parts[1]
	}
	switch {
	case r.Method == http.MethodPost:
		q.verb = "create"
	case q.name != "":
		q.verb = "get"
	default:
		q.verb = "list"
	}
	return q
}

func (s *apiServer) allows(q request) bool {
	for _, rule := range slices.Concat(s.rules[""], s.rules[q.namespace]) {
		if slices.Contains(rule.APIGroups, q.group) && slices.Contains(rule.Resources, q.resource) && slices.Contains(rule.Verbs, q.verb) {
			return true
		}
	}
	return false
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := parseRequest(r)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, q.verb+" "+q.resource)
	w.Header().Set("Content-Type", "application/json")
	if !s.allows(q) {
		w.WriteHeader(http.StatusForbidden)
		fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403,"message":"%s %s"}`, q.verb, q.resource)
		return
	}
	answer, ok := s.objects[r.URL.Path]
	switch q.resource {
	case "tokenreviews":
		var review authenticationv1.TokenReview
		if err := receive(r, &review); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		review.Status.Authenticated, review.Status.Audiences = review.Spec.Token == token, review.Spec.Audiences
		answer, ok = review, true
	case "subjectaccessreviews":
		var review authorizationv1.SubjectAccessReview
		if err := receive(r, &review); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		review.Status.Allowed = review.Spec.ResourceAttributes != nil && review.Spec.ResourceAttributes.Namespace == "app"
		answer, ok = review, true
	}
	if !ok {
		w.WriteHeader(http.StatusNotFound)
		answer = map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
	}
	_ = json.NewEncoder(w).Encode(answer)
}

// receive decodes the object that is in a request. Clients of Kubernetes' own kinds send them as protobuf.
func receive(r *http.Request, into runtime.Object) error {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	_, _, err = scheme.Codecs.UniversalDeserializer().Decode(raw, nil, into)
	return err
}

// did says whether something was asked for, as a verb and a resource.
func (s *apiServer) did(what string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.asked, what)
}

// put adds an object.
func (s *apiServer) put(path string, object any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.objects[path] = object
}

// snapshotObjects adds a VolumeSnapshot of namespace app, and its content.
func (s *apiServer) snapshotObjects(name, handle string) {
	kind := func(kind string, metadata, spec, status map[string]any) map[string]any {
		return map[string]any{"apiVersion": "snapshot.storage.k8s.io/v1", "kind": kind, "metadata": metadata, "spec": spec, "status": status}
	}
	s.put("/apis/snapshot.storage.k8s.io/v1/namespaces/app/volumesnapshots/"+name, kind("VolumeSnapshot",
		map[string]any{"name": name, "namespace": "app"},
		map[string]any{"volumeSnapshotClassName": "crust-backup", "source": map[string]any{"persistentVolumeClaimName": "data"}},
		map[string]any{"readyToUse": true, "boundVolumeSnapshotContentName": name}))
	s.put("/apis/snapshot.storage.k8s.io/v1/volumesnapshotcontents/"+name, kind("VolumeSnapshotContent",
		map[string]any{"name": name},
		map[string]any{"driver": "csi.crust.dev", "deletionPolicy": "Delete", "source": map[string]any{"volumeHandle": "v"}},
		map[string]any{"readyToUse": true, "snapshotHandle": handle}))
}
