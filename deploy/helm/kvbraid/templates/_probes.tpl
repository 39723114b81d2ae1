{{/* Probes. gRPC health tells readiness: NOT_SERVING while loading, draining and, on a coordinator,
     without a decode worker. Liveness must not follow it there: a coordinator without workers is
     alive. It asks for an answer of the event loop, and the kubelet ends it when the pod ends. */}}

{{/* Takes root, role, place: "first" has rank 0, "other" is another host of a group. */}}
{{- define "kvbraid.probes" -}}
{{- $values := index .root.Values .role -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
{{- if eq .role "coordinator" -}}
startupProbe:
  httpGet: {path: /v1/models, port: http}
  {{- include "kvbraid.startup_budget" $values | nindent 2 }}
readinessProbe:
  grpc: {port: {{ int $facts.port }}, service: coordinator}
  {{- include "kvbraid.readiness_pace" . | nindent 2 }}
livenessProbe:
  httpGet: {path: /v1/models, port: http}
  {{- include "kvbraid.liveness_pace" . | nindent 2 }}
{{- else if eq .place "first" -}}
startupProbe:
  grpc: {port: {{ int $facts.port }}, service: {{ .role }}}
  {{- include "kvbraid.startup_budget" $values | nindent 2 }}
readinessProbe:
  grpc: {port: {{ int $facts.port }}, service: {{ .role }}}
  {{- include "kvbraid.readiness_pace" . | nindent 2 }}
livenessProbe:
  grpc: {port: {{ int $facts.port }}}
  {{- include "kvbraid.liveness_pace" . | nindent 2 }}
{{- else -}}
{{- /* Ranks above 0 listen once they have loaded; their heartbeats find those that are stuck. */ -}}
startupProbe:
  tcpSocket: {port: grpc}
  {{- include "kvbraid.startup_budget" $values | nindent 2 }}
readinessProbe:
  tcpSocket: {port: grpc}
  {{- include "kvbraid.readiness_pace" . | nindent 2 }}
{{- end -}}
{{- end -}}

{{- define "kvbraid.startup_budget" -}}
periodSeconds: 2
timeoutSeconds: 2
failureThreshold: {{ div (add (int .startup_seconds) 1) 2 }}
{{- end -}}

{{- define "kvbraid.readiness_pace" -}}
periodSeconds: 2
timeoutSeconds: 2
failureThreshold: 2
{{- end -}}

{{- define "kvbraid.liveness_pace" -}}
periodSeconds: 10
timeoutSeconds: 5
failureThreshold: 6
{{- end -}}
