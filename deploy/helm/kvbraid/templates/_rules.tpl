{{/* A rule file with its placeholders filled. Takes root and path. slo.json names those that are
     numbers; @SELECTOR@ narrows every series to this namespace. */}}
{{- define "kvbraid.filled_rules" -}}
{{- $monitoring := .root.Values.monitoring -}}
{{- $selector := printf "namespace=%q" .root.Release.Namespace | replace "\"" "\\\"" -}}
{{- $text := .root.Files.Get .path -}}
{{- $text = $text | replace "@RUNBOOK_URL@" $monitoring.runbook_url | replace "@SELECTOR@" $selector -}}
{{- range $key, $slo := .root.Files.Get "files/alerts/slo.json" | fromJson -}}
{{- $text = $text | replace $slo.placeholder (index $monitoring.slo $key | toJson) -}}
{{- end -}}
{{- $text -}}
{{- end -}}
