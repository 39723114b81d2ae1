{{/* Certificates. Most templates take root and role. Whoever calls or serves over TLS is decided by
     settings, so that those of a role outweigh what follows from `tls`. */}}

{{- define "kvbraid.tls_path" -}}
/etc/kvbraid-tls
{{- end -}}

{{- define "kvbraid.front_tls_path" -}}
/etc/kvbraid-front-tls
{{- end -}}

{{/* Settings that follow from the Secrets, as JSON. */}}
{{- define "kvbraid.tls_settings" -}}
{{- $tls := .root.Values.tls -}}
{{- $inner := include "kvbraid.tls_path" . -}}
{{- $own := $inner -}}
{{- $found := dict -}}
{{- if $tls.secret_name -}}
{{- $_ := set $found "tls_server_ca" (printf "%s/ca.crt" $inner) -}}
{{- $_ := set $found "tls_server_name" (include "kvbraid.server_name" .root) -}}
{{- end -}}
{{- if and (eq .role "coordinator") $tls.front_secret_name -}}
{{- $own = include "kvbraid.front_tls_path" . -}}
{{- if $tls.secret_name -}}
{{- $_ := set $found "tls_client_certificate" (printf "%s/tls.crt" $inner) -}}
{{- $_ := set $found "tls_client_private_key" (printf "%s/tls.key" $inner) -}}
{{- end -}}
{{- end -}}
{{- if or $tls.secret_name (ne $own $inner) -}}
{{- $_ := set $found "tls_certificate" (printf "%s/tls.crt" $own) -}}
{{- $_ := set $found "tls_private_key" (printf "%s/tls.key" $own) -}}
{{- if or (ne .role "coordinator") $tls.client_certificates -}}
{{- $_ := set $found "tls_client_ca" (printf "%s/ca.crt" $own) -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* The same with the settings of values above them, as JSON. */}}
{{- define "kvbraid.tls" -}}
{{- $found := include "kvbraid.tls_settings" . | fromJson -}}
{{- range $name, $value := include "kvbraid.settings" . | fromJson -}}
{{- if hasPrefix "tls_" $name -}}
{{- $_ := set $found $name $value -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* What every certificate of the Secret carries: pods are called by address. */}}
{{- define "kvbraid.server_name" -}}
{{ .Values.tls.server_name | default (printf "%s.%s.svc" (include "kvbraid.fullname" .) .Release.Namespace) }}
{{- end -}}

{{- define "kvbraid.tls_mounts" -}}
{{- if .root.Values.tls.secret_name }}
- {name: tls, mountPath: {{ include "kvbraid.tls_path" . }}, readOnly: true}
{{- end }}
{{- if and (eq .role "coordinator") .root.Values.tls.front_secret_name }}
- {name: front-tls, mountPath: {{ include "kvbraid.front_tls_path" . }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvbraid.tls_volumes" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.secret_name }}
- name: tls
  secret:
    secretName: {{ $tls.secret_name }}
    {{- include "kvbraid.tls_files" true | nindent 4 }}
{{- end }}
{{- if and (eq .role "coordinator") $tls.front_secret_name }}
- name: front-tls
  secret:
    secretName: {{ $tls.front_secret_name }}
    {{- include "kvbraid.tls_files" $tls.client_certificates | nindent 4 }}
{{- end }}
{{- end -}}

{{/* By name, so that a Secret without one of them keeps the pod from starting and says so. Readable
     for the pod's group, which is the volume's. Takes whether there is a ca.crt. */}}
{{- define "kvbraid.tls_files" -}}
defaultMode: 0440
items:
  - {key: tls.crt, path: tls.crt}
  - {key: tls.key, path: tls.key}
  {{- if . }}
  - {key: ca.crt, path: ca.crt}
  {{- end }}
{{- end -}}

{{/* appProtocol of a role's gRPC port: what a mesh or a gateway may expect there. */}}
{{- define "kvbraid.grpc_protocol" -}}
{{- $tls := include "kvbraid.tls" . | fromJson -}}
{{ empty $tls.tls_certificate | ternary "kubernetes.io/h2c" "https" }}
{{- end -}}

{{/* Of a coordinator's HTTP port. */}}
{{- define "kvbraid.http_protocol" -}}
{{- $tls := include "kvbraid.tls" . | fromJson -}}
{{ empty $tls.tls_certificate | ternary "http" "https" }}
{{- end -}}
