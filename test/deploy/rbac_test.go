package deploy_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	rbacv1 "k8s.io/api/rbac/v1"
)

// rights are what each service account may do in the cluster and in its namespace, as "verb group/resource". The namespace's
// begin with "here: ".
func rights(t *testing.T, objects []object) map[string][]string {
	t.Helper()
	clusterRoles, roles := map[string][]rbacv1.PolicyRule{}, map[string][]rbacv1.PolicyRule{}
	for _, r := range of[*rbacv1.ClusterRole](objects) {
		clusterRoles[r.Name] = r.Rules
	}
	for _, r := range of[*rbacv1.Role](objects) {
		roles[r.Name] = r.Rules
	}
	list, bound := map[string][]string{}, map[string]bool{}
	grant := func(ref rbacv1.RoleRef, subjects []rbacv1.Subject, here string) {
		t.Helper()
		rules, ok := clusterRoles[ref.Name]
		if ref.Kind == "Role" {
			rules, ok = roles[ref.Name]
		}
		if !ok {
			t.Errorf("a binding refers to the %s %s, which is not there", ref.Kind, ref.Name)
		}
		bound[ref.Kind+" "+ref.Name] = true
		for _, s := range subjects {
			if s.Kind != "ServiceAccount" || s.Namespace != "crust-system" {
				t.Errorf("%s %s is given to %+v", ref.Kind, ref.Name, s)
			}
			for _, rule := range rules {
				list[s.Name] = append(list[s.Name], flatten(rule, here)...)
			}
		}
	}
	for _, b := range of[*rbacv1.ClusterRoleBinding](objects) {
		grant(b.RoleRef, b.Subjects, "")
	}
	for _, b := range of[*rbacv1.RoleBinding](objects) {
		grant(b.RoleRef, b.Subjects, "here: ")
	}
	for name := range clusterRoles {
		if !bound["ClusterRole "+name] && !strings.HasSuffix(name, "-snapshot-metadata-client") {
			t.Errorf("nobody is given the ClusterRole %s", name)
		}
	}
	for account := range list {
		slices.Sort(list[account])
		list[account] = slices.Compact(list[account])
	}
	return list
}

func flatten(r rbacv1.PolicyRule, here string) (list []string) {
	for _, group := range r.APIGroups {
		for _, resource := range r.Resources {
			for _, verb := range r.Verbs {
				names := ""
				if len(r.ResourceNames) > 0 {
					names = fmt.Sprint(" ", r.ResourceNames)
				}
				list = append(list, fmt.Sprintf("%s%s %s/%s%s", here, verb, group, resource, names))
			}
		}
	}
	return append(list, r.NonResourceURLs...)
}

// TestRights: least of all those that would let a node that was broken into have the whole cluster.
func TestRights(t *testing.T) {
	never := []string{
		"secrets", "csidrivers", "clusterroles", "clusterrolebindings", "roles", "rolebindings", "serviceaccounts/token", "nodes/proxy", "pods/exec",
		"pods/attach", "mutatingwebhookconfigurations", "validatingwebhookconfigurations", "customresourcedefinitions", "daemonsets", "deployments",
	}
	mayWrite := []string{
		"persistentvolumes", "persistentvolumeclaims", "persistentvolumeclaims/status", "events", "csistoragecapacities", "leases", "volumesnapshots",
		"volumesnapshotcontents", "volumesnapshotcontents/status", "volumegroupsnapshotcontents", "volumegroupsnapshotcontents/status",
		"tokenreviews", "subjectaccessreviews", // questions, which leave nothing
	}
	for name, values := range valueSets {
		t.Run(name, func(t *testing.T) {
			for account, list := range rights(t, render(t, values)) {
				for _, right := range list {
					verb, resource, _ := strings.Cut(strings.TrimPrefix(right, "here: "), " ")
					_, resource, _ = strings.Cut(resource, "/")
					if right == "here: get /secrets [credentials]" && account == "storage-controller" {
						continue // these are named in the values
					}
					switch {
					case strings.Contains(right, "*"):
						t.Errorf("%s: a wildcard: %s", account, right)
					case slices.Contains(never, resource):
						t.Errorf("%s may %s", account, right)
					case !slices.Contains([]string{"get", "list", "watch"}, verb) && !slices.Contains(mayWrite, resource):
						t.Errorf("%s may %s", account, right)
					case verb == "delete" && !slices.Contains([]string{"persistentvolumes", "csistoragecapacities", "leases"}, resource):
						t.Errorf("%s may %s", account, right)
					}
				}
			}
		})
	}
}

// TestRightsOfDefaults has all of them, so that nobody adds one without a reviewer's eye on it.
func TestRightsOfDefaults(t *testing.T) {
	want := map[string][]string{
		"crust-node": {
			"create /events", "create /persistentvolumes", "delete /persistentvolumes",
			"get /nodes", "get /persistentvolumeclaims", "get /persistentvolumes",
			"get node.k8s.io/runtimeclasses", "get storage.k8s.io/csinodes", "get storage.k8s.io/storageclasses", "get storage.k8s.io/volumeattributesclasses",
			"here: create storage.k8s.io/csistoragecapacities", "here: delete storage.k8s.io/csistoragecapacities", "here: get /pods",
			"here: get storage.k8s.io/csistoragecapacities", "here: list storage.k8s.io/csistoragecapacities", "here: patch storage.k8s.io/csistoragecapacities",
			"here: update storage.k8s.io/csistoragecapacities", "here: watch storage.k8s.io/csistoragecapacities",
			"list /events", "list /nodes", "list /persistentvolumeclaims", "list /persistentvolumes", "list /pods",
			"list node.k8s.io/runtimeclasses", "list storage.k8s.io/csinodes", "list storage.k8s.io/storageclasses", "list storage.k8s.io/volumeattributesclasses",
			"patch /events", "patch /persistentvolumes", "update /events", "update /persistentvolumeclaims",
			"watch /events", "watch /nodes", "watch /persistentvolumeclaims", "watch /persistentvolumes", "watch /pods",
			"watch node.k8s.io/runtimeclasses", "watch storage.k8s.io/csinodes", "watch storage.k8s.io/storageclasses", "watch storage.k8s.io/volumeattributesclasses",
		},
		"crust-controller": {
			"create /events", "get /persistentvolumeclaims", "get /persistentvolumes", "get storage.k8s.io/volumeattributesclasses",
			"here: create coordination.k8s.io/leases", "here: get coordination.k8s.io/leases", "here: update coordination.k8s.io/leases",
			"list /events", "list /nodes", "list /persistentvolumeclaims", "list /persistentvolumes", "list storage.k8s.io/volumeattributesclasses",
			"patch /events", "patch /persistentvolumeclaims/status", "patch /persistentvolumes",
			"update /events", "watch /events", "watch /persistentvolumeclaims", "watch /persistentvolumes", "watch storage.k8s.io/volumeattributesclasses",
		},
		"crust-uninstall-check": {"list /persistentvolumes", "list /pods"},
	}
	is := rights(t, render(t, `{}`))
	for _, account := range slices.Sorted(maps.Keys(is)) {
		if diff := gocmp.Diff(want[account], is[account]); diff != "" {
			t.Errorf("%s: -want +is\n%s", account, diff)
		}
	}
	for account := range want {
		if is[account] == nil {
			t.Errorf("%s has no rights", account)
		}
	}
}

// TestRightsOfTheSnapshotter are those of the place where it runs: a node that was broken into cannot change the snapshots of others.
func TestRightsOfTheSnapshotter(t *testing.T) {
	group := []string{"update groupsnapshot.storage.k8s.io/volumegroupsnapshotcontents/status", "watch groupsnapshot.storage.k8s.io/volumegroupsnapshotclasses"}
	own := []string{"update snapshot.storage.k8s.io/volumesnapshotcontents/status", "patch snapshot.storage.k8s.io/volumesnapshotcontents", "watch snapshot.storage.k8s.io/volumesnapshotclasses"}
	for name, row := range map[string]struct {
		values     string
		has, lacks map[string][]string
	}{
		"none":           {`{}`, nil, map[string][]string{"crust-node": own, "crust-controller": own}},
		"central":        {`snapshots: {enabled: true}`, map[string][]string{"crust-controller": own}, map[string][]string{"crust-node": own, "crust-controller": group}},
		"central groups": {`snapshots: {enabled: true, groups: true}`, map[string][]string{"crust-controller": append(group, own...)}, map[string][]string{"crust-node": append(group, own...)}},
		"of the nodes":   {`snapshots: {enabled: true, sidecar: node}`, map[string][]string{"crust-node": own}, map[string][]string{"crust-controller": own, "crust-node": group}},
	} {
		t.Run(name, func(t *testing.T) {
			is := rights(t, render(t, row.values))
			for account, list := range row.has {
				for _, right := range list {
					if !slices.Contains(is[account], right) {
						t.Errorf("%s may not %s", account, right)
					}
				}
			}
			for account, list := range row.lacks {
				for _, right := range list {
					if slices.Contains(is[account], right) {
						t.Errorf("%s may %s", account, right)
					}
				}
			}
		})
	}
}
