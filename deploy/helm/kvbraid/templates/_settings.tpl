{{/* From values to what a process reads, and facts that templates derive from settings. */}}

{{/* A role's settings with the shared ones below them, as JSON. `merge` would skip false and 0. */}}
{{- define "kvbraid.settings" -}}
{{- $merged := deepCopy .root.Values.settings -}}
{{- range $name, $value := (index .root.Values .role).settings -}}
{{- $_ := set $merged $name $value -}}
{{- end -}}
{{- $merged | toJson -}}
{{- end -}}

{{/* What follows from a role's values, as JSON. */}}
{{- define "kvbraid.facts" -}}
{{- $values := index .root.Values .role -}}
{{- $settings := include "kvbraid.settings" . | fromJson -}}
{{- $hosts := $values.hosts_per_worker | default 1 | int -}}
{{- $ranks := div ($settings.tp_size | default 1 | int) $hosts | int -}}
{{- $drain := $settings.drain_seconds | default 0 | float64 | ceil | int -}}
{{- $facts := dict
  "hosts" $hosts
  "ranks" $ranks
  "is_group" (gt $hosts 1)
  "port" (int $settings.port)
  "last_port" (sub (add (int $settings.port) $ranks) 1)
  "metrics_port" (int $settings.metrics_port)
  "step_port" ($settings.step_port | default 0 | int)
  "health_port" ($settings.health_port | default (include "kvbraid.default_health_port" .) | int)
  "grace_seconds" (add $drain (int $values.pre_stop_seconds) (include "kvbraid.stop_seconds" . | int))
-}}
{{- $facts | toJson -}}
{{- end -}}

{{/* After the drain a process unwinds its calls, then its engine and its ranks end: 5 s each. */}}
{{- define "kvbraid.stop_seconds" -}}
20
{{- end -}}

{{/* With certificates out of `tls`, since probes speak no TLS; 0 without. */}}
{{- define "kvbraid.default_health_port" -}}
{{- $tls := include "kvbraid.tls_settings" . | fromJson -}}
{{ hasKey $tls "tls_certificate" | ternary 8081 0 }}
{{- end -}}

{{/* A quantity of CPU as a whole number of cores, at least 1. */}}
{{- define "kvbraid.cores" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}
{{ max 1 (div (trimSuffix "m" $text | int) 1000) }}
{{- else -}}
{{ max 1 ($text | float64 | floor | int) }}
{{- end -}}
{{- end -}}

{{/* Settings that the chart knows better than a default and that values outweigh, as JSON. */}}
{{- define "kvbraid.derived_settings" -}}
{{- $values := index .root.Values .role -}}
{{- $derived := dict -}}
{{- if eq .role "coordinator" -}}
{{- range $pool := list "prefill" "decode" -}}
{{- $workers := list -}}
{{- if has $pool (include "kvbraid.workers" $.root | fromJsonArray) -}}
{{- $workers = list (printf "dns:%s" (include "kvbraid.workers_address" (dict "root" $.root "role" $pool))) -}}
{{- end -}}
{{- $_ := set $derived (printf "%s_workers" $pool) $workers -}}
{{- end -}}
{{- else if not $values.accelerator -}}
{{- /* A container sees all cores of its node, whatever its limit. */ -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
{{- $cores := include "kvbraid.cores" $values.resources.limits.cpu | int -}}
{{- $_ := set $derived (eq .role "draft" | ternary "compute_threads" "threads_per_rank") (max 1 (div $cores (int $facts.ranks))) -}}
{{- end -}}
{{- if and (has .role (list "prefill" "decode")) (has "draft" (include "kvbraid.workers" .root | fromJsonArray)) -}}
{{- $of := dict "root" .root "role" "draft" -}}
{{- $facts := include "kvbraid.facts" $of | fromJson -}}
{{- $_ := set $derived "draft_worker" (printf "%s.%s.svc:%d" (include "kvbraid.role_name" $of) .root.Release.Namespace (int $facts.port)) -}}
{{- $_ := set $derived "tap_fusion" (include "kvbraid.settings" $of | fromJson).drafter -}}
{{- end -}}
{{- range $name, $value := include "kvbraid.tls_settings" . | fromJson -}}
{{- $_ := set $derived $name $value -}}
{{- end -}}
{{- with include "kvbraid.default_health_port" . | int -}}
{{- $_ := set $derived "health_port" . -}}
{{- end -}}
{{- $derived | toJson -}}
{{- end -}}

{{- define "kvbraid.workers_address" -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
{{ include "kvbraid.pods_service" . }}.{{ .root.Release.Namespace }}.svc:{{ int $facts.port }}
{{- end -}}

{{/* The TOML file of a role. JSON strings, numbers, booleans and lists are TOML too. */}}
{{- define "kvbraid.toml" -}}
{{- range $name, $value := .root.Values.settings -}}
{{ $name }} = {{ toJson $value }}
{{ end }}
[{{ .role }}]
{{ $own := include "kvbraid.derived_settings" . | fromJson -}}
{{- range $name, $_ := .root.Values.settings -}}
{{- $_ := unset $own $name -}}
{{- end -}}
{{- range $name, $value := (index .root.Values .role).settings -}}
{{- $_ := set $own $name $value -}}
{{- end -}}
{{- range $name, $value := $own -}}
{{ $name }} = {{ toJson $value }}
{{ end -}}
{{- end -}}
