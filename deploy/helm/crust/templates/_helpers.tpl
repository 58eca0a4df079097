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
