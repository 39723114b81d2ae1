{{/* Probes ask gRPC health. The role's name tells readiness: NOT_SERVING while loading, draining and,
     on a coordinator, without a decode worker. `live` tells liveness: a coordinator without workers
     is alive. They ask the health port where there is one, which is plaintext: the kubelet speaks
     no TLS. Without one, a coordinator's liveness is an answer of its HTTP API. */}}

{{/* Takes root, role, place: "first" has rank 0, "other" is another host of a group. */}}
{{- define "kvbraid.probes" -}}
{{- $values := index .root.Values .role -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
{{- $port := $facts.health_port | default $facts.port | int -}}
{{- if ne .place "first" -}}
{{- /* Ranks above 0 listen once they have loaded; their heartbeats find those that are stuck. */ -}}
startupProbe:
  tcpSocket: {port: grpc}
  {{- include "kvbraid.startup_budget" $values | nindent 2 }}
readinessProbe:
  tcpSocket: {port: grpc}
  {{- include "kvbraid.readiness_pace" . | nindent 2 }}
{{- else -}}
{{- $live := printf "grpc: {port: %d, service: live}" $port -}}
{{- $ready := printf "grpc: {port: %d, service: %s}" $port .role -}}
{{- $started := $ready -}}
{{- if eq .role "coordinator" -}}
{{- if not $facts.health_port -}}
{{- $live = "httpGet: {path: /v1/models, port: http}" -}}
{{- end -}}
{{- $started = $live -}}
{{- end -}}
startupProbe:
  {{ $started }}
  {{- include "kvbraid.startup_budget" $values | nindent 2 }}
readinessProbe:
  {{ $ready }}
  {{- include "kvbraid.readiness_pace" . | nindent 2 }}
livenessProbe:
  {{ $live }}
  {{- include "kvbraid.liveness_pace" . | nindent 2 }}
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
