{{/* What each role scales on: its own queue, never CPU, which says nothing of either. */}}

{{/* One pod at a time down: a worker that goes takes its prefix cache with it. */}}
{{- define "kvbraid.scale_behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
scaleDown:
  stabilizationWindowSeconds: {{ int .scale_down_seconds }}
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}

{{/* pods metric of a HorizontalPodAutoscaler, each worker's own. */}}
{{- define "kvbraid.pod_metric" -}}
{{- $scaling := (index .root.Values .role).autoscaling -}}
{{- if eq .role "prefill" -}}
metric: {name: kvbraid_engine_waiting_prompt_tokens}
target: {type: AverageValue, averageValue: {{ int $scaling.waiting_prompt_tokens | quote }}}
{{- else if eq .role "decode" -}}
metric:
  name: kvbraid_kv_pages
  selector: {matchExpressions: [{key: state, operator: In, values: [active, leased]}]}
target: {type: AverageValue, averageValue: {{ int $scaling.reserved_pages | quote }}}
{{- else -}}
metric: {name: kvbraid_draft_queued_sequences}
target: {type: AverageValue, averageValue: {{ int $scaling.queued_sequences | quote }}}
{{- end -}}
{{- end -}}

{{/* KEDA's Prometheus trigger. AverageValue divides the result by the replicas, Value does not. */}}
{{- define "kvbraid.prometheus_trigger" -}}
{{- $scaling := (index .root.Values .role).autoscaling -}}
{{- $labels := printf "namespace=%q,service=%q" .root.Release.Namespace (include "kvbraid.pods_service" .) -}}
{{- $type := "AverageValue" -}}
{{- $query := "" -}}
{{- $threshold := 0 -}}
{{- if eq .role "prefill" -}}
{{- $query = printf "sum(kvbraid_engine_waiting_prompt_tokens{%s})" $labels -}}
{{- $threshold = $scaling.waiting_prompt_tokens -}}
{{- else if eq .role "decode" -}}
{{- $type = "Value" -}}
{{- $query = printf "sum(kvbraid_kv_pages{%s,state=~\"active|leased\"}) / sum(kvbraid_kv_pages{%s})" $labels $labels -}}
{{- $threshold = $scaling.reserved_pages_fraction -}}
{{- else -}}
{{- $query = printf "sum(kvbraid_draft_queued_sequences{%s})" $labels -}}
{{- $threshold = $scaling.queued_sequences -}}
{{- end -}}
metricType: {{ $type }}
metadata:
  serverAddress: {{ .root.Values.autoscaling.prometheus_address }}
  query: {{ $query | squote }}
  threshold: {{ toJson $threshold | quote }}
  # Without data the number of workers stays.
  ignoreNullValues: "false"
{{- end -}}
