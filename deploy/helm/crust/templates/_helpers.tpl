{{/* Labels of every object; the argument is a dict of root and component. */}}
{{- define "crust.labels" -}}
{{ include "crust.selector" . }}
app.kubernetes.io/part-of: crust
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- end }}

{{- define "crust.selector" -}}
app.kubernetes.io/name: {{ .root.Values.name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "crust.image" -}}
{{- with .Values.image -}}
{{- if .registry }}{{ .registry }}/{{ end }}{{ .repository }}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end -}}
{{- end }}

{{/* The image of a sidecar; the argument is a dict of root and image. */}}
{{- define "crust.sidecarImage" -}}
{{- with .root.Values.sidecars.registry }}{{ . }}/{{ end }}{{ .image }}
{{- end }}

{{- define "crust.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Not empty if a handler is for Kata Containers. */}}
{{- define "crust.kata" -}}
{{- range .Values.crustd.handlers }}{{ if eq .kind "kata" }}kata{{ end }}{{ end }}
{{- end }}

{{/* Where csi-snapshotter runs: controller, node, or nothing if it does not run. What cannot work is refused. */}}
{{- define "crust.snapshotter" -}}
{{- with .Values.snapshots }}
{{- if .enabled }}
{{- if and (eq .sidecar "controller") (not $.Values.controller.enabled) }}
{{- fail "snapshots.sidecar is controller, and controller.enabled is false: csi-snapshotter reaches the nodes through the controller's router; set controller.enabled=true, or snapshots.sidecar=node with a snapshot-controller that runs with --enable-distributed-snapshotting" }}
{{- end }}
{{- if and .groups (eq .sidecar "node") }}
{{- fail "snapshots.groups is true, and snapshots.sidecar is node: the snapshot-controller does not label the contents of group snapshots with a node (external-snapshotter v8.7.0), so no sidecar takes them up and no VolumeGroupSnapshot becomes ready; set snapshots.sidecar=controller, or snapshots.groups=false" }}
{{- end }}
{{- .sidecar }}
{{- end }}
{{- end }}
{{- end }}

{{/* What csi-snapshotter is started with wherever it runs. Without the types of groups, or the rights to read them, it takes them for
not there, so it is told what to do. */}}
{{- define "crust.snapshotterArgs" -}}
- --timeout=300s
- --feature-gates=CSIVolumeGroupSnapshot={{ .Values.snapshots.groups }}
{{- range .Values.sidecars.snapshotter.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{/* The rights of csi-snapshotter. */}}
{{- define "crust.snapshotterRole" -}}
# csi-snapshotter
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ .root.Values.name }}-snapshotter
  labels:
    {{- include "crust.labels" . | nindent 4 }}
rules:
  {{- include "crust.eventRules" .root | nindent 2 }}
  - apiGroups: [snapshot.storage.k8s.io]
    resources: [volumesnapshotclasses]
    verbs: [get, list, watch]
  - apiGroups: [snapshot.storage.k8s.io]
    resources: [volumesnapshotcontents]
    verbs: [get, list, watch, update, patch]
  - apiGroups: [snapshot.storage.k8s.io]
    resources: [volumesnapshotcontents/status]
    verbs: [update, patch]
  {{- if .root.Values.snapshots.groups }}
  - apiGroups: [groupsnapshot.storage.k8s.io]
    resources: [volumegroupsnapshotclasses]
    verbs: [get, list, watch]
  - apiGroups: [groupsnapshot.storage.k8s.io]
    resources: [volumegroupsnapshotcontents]
    verbs: [get, list, watch, update, patch]
  - apiGroups: [groupsnapshot.storage.k8s.io]
    resources: [volumegroupsnapshotcontents/status]
    verbs: [update, patch]
  {{- end }}
{{- end }}

{{/* The rights of sidecars to tell what they have done. */}}
{{- define "crust.eventRules" -}}
- apiGroups: [""]
  resources: [events]
  verbs: [list, watch, create, update, patch]
{{- end }}

{{/* The network of all pods. */}}
{{- define "crust.network" -}}
{{- if .Values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- end }}

{{/* The environment of containers that talk to the API server, for those that have no other. */}}
{{- define "crust.apiServerEnv" -}}
{{- if .Values.apiServer.host }}
env:
  {{- include "crust.apiServer" . | trim | nindent 2 }}
{{- end }}
{{- end }}

{{- define "crust.apiServer" -}}
{{- with .Values.apiServer }}
{{- if .host }}
- name: KUBERNETES_SERVICE_HOST
  value: {{ .host | quote }}
- name: KUBERNETES_SERVICE_PORT
  value: {{ .port | toString | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "crust.nodeSecret" -}}
{{ .Values.controller.tls.nodeSecret | default (printf "%s-route-node" .Values.name) }}
{{- end }}

{{- define "crust.routerSecret" -}}
{{ .Values.controller.tls.routerSecret | default (printf "%s-route-router" .Values.name) }}
{{- end }}

{{- define "crust.metadataSecret" -}}
{{ .Values.snapshotMetadata.tls.secret | default (printf "%s-snapshot-metadata-tls" .Values.name) }}
{{- end }}
