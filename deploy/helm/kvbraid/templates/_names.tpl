{{/* Names and labels. Most templates take a role: dict "root" $ "role" "decode". */}}

{{- define "kvbraid.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvbraid.role_name" -}}
{{ include "kvbraid.fullname" .root }}-{{ .role }}
{{- end -}}

{{/* Of the headless Service. A LeaderWorkerSet makes one of its own name, so this one differs. */}}
{{- define "kvbraid.pods_service" -}}
{{ include "kvbraid.role_name" . }}-pods
{{- end -}}

{{- define "kvbraid.release_labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "kvbraid.role_labels" -}}
{{ include "kvbraid.release_labels" .root }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{/* For objects; pods get fewer, so that a new chart version alone restarts nothing. */}}
{{- define "kvbraid.object_labels" -}}
{{ include "kvbraid.release_labels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{/* metadata of an object. Takes root, name and, where it belongs to one, role. */}}
{{- define "kvbraid.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "kvbraid.object_labels" .root | nindent 2 }}
  {{- with .role }}
  app.kubernetes.io/component: {{ . }}
  {{- end }}
{{- end -}}

{{/* Takes root and variant. */}}
{{- define "kvbraid.image" -}}
{{- $image := .root.Values.image -}}
{{- $digest := index $image.digests .variant -}}
{{- if $digest -}}
{{ $image.repository }}@{{ $digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}-{{ .variant }}
{{- end -}}
{{- end -}}

{{/* The roles that run, as JSON list; coordinator first. */}}
{{- define "kvbraid.workers" -}}
{{- $found := list -}}
{{- range $role := list "prefill" "decode" "draft" -}}
{{- $values := index $.Values $role -}}
{{- if or (gt (int $values.replicas) 0) (ne $values.autoscaling.kind "none") -}}
{{- $found = append $found $role -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}
