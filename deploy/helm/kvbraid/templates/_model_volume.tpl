{{/* Where the checkpoint comes from. */}}

{{- define "kvbraid.claim_name" -}}
{{ .Values.model_volume.claim_name | default (printf "%s-models" (include "kvbraid.fullname" .)) }}
{{- end -}}

{{- define "kvbraid.pulled_path" -}}
{{ .Values.model_volume.mount_path }}/{{ .Values.model_volume.pull }}
{{- end -}}

{{- define "kvbraid.model_volume" -}}
{{- $volume := .Values.model_volume -}}
{{- if eq $volume.kind "pvc" -}}
- name: models
  persistentVolumeClaim: {claimName: {{ include "kvbraid.claim_name" . }}, readOnly: {{ not $volume.pull }}}
{{- else if eq $volume.kind "host_path" -}}
- name: models
  hostPath: {path: {{ $volume.host_path }}, type: Directory}
{{- else if eq $volume.kind "image" -}}
- name: models
  image: {reference: {{ $volume.image }}, pullPolicy: {{ .Values.image.pull_policy }}}
{{- end -}}
{{- end -}}
