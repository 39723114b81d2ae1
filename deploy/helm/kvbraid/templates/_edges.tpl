{{/* Who calls whom. Takes root and role. */}}

{{/* Role -> last port that it calls here, as JSON. KV rows go to every rank, all else to rank 0. */}}
{{- define "kvbraid.callers" -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
{{- $workers := include "kvbraid.workers" .root | fromJsonArray -}}
{{- $callers := dict -}}
{{- if eq .role "prefill" -}}
{{- $_ := set $callers "coordinator" $facts.port -}}
{{- else if eq .role "decode" -}}
{{- $_ := set $callers "coordinator" $facts.port -}}
{{- if has "prefill" $workers -}}
{{- $_ := set $callers "prefill" $facts.last_port -}}
{{- end -}}
{{- else if eq .role "draft" -}}
{{- range $caller := list "prefill" "decode" -}}
{{- if has $caller $workers -}}
{{- $_ := set $callers $caller $facts.port -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $callers | toJson -}}
{{- end -}}

{{/* Ports of the role that `caller` calls, as policies write them. Decode workers, whose steps are
     in a hurry, have a second one. */}}
{{- define "kvbraid.called_ports" -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
- {{ include "kvbraid.port_range" (dict "first" $facts.port "last" (index (include "kvbraid.callers" . | fromJson) .caller)) }}
{{- if and (eq .caller "decode") $facts.step_port }}
- {{ include "kvbraid.port_range" (dict "first" $facts.step_port "last" $facts.step_port) }}
{{- end -}}
{{- end -}}

{{- define "kvbraid.callees" -}}
{{- $role := .role -}}
{{- $root := .root -}}
{{- $callees := list -}}
{{- range $callee := include "kvbraid.workers" $root | fromJsonArray -}}
{{- if hasKey (include "kvbraid.callers" (dict "root" $root "role" $callee) | fromJson) $role -}}
{{- $callees = append $callees $callee -}}
{{- end -}}
{{- end -}}
{{- $callees | toJson -}}
{{- end -}}

{{- define "kvbraid.port_range" -}}
{protocol: TCP, port: {{ int .first }}{{ if gt (int .last) (int .first) }}, endPort: {{ int .last }}{{ end }}}
{{- end -}}
