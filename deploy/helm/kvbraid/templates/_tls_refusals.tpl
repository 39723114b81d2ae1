{{/* What cannot work of `tls` and of settings about certificates. */}}

{{- define "kvbraid.refuse_tls" -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.server_name (not $tls.secret_name) -}}
{{- fail (printf "tls.server_name is %s, but tls.secret_name is empty: calls between roles are plaintext and have no use for a name" $tls.server_name) -}}
{{- end -}}
{{- if and $tls.cert_manager.issuer_name (not $tls.secret_name) -}}
{{- fail (printf "tls.cert_manager.issuer_name is %s, but tls.secret_name is empty: name the Secret that cert-manager writes" $tls.cert_manager.issuer_name) -}}
{{- end -}}
{{- if and $tls.front_secret_name (eq $tls.front_secret_name $tls.secret_name) -}}
{{- fail (printf "tls.front_secret_name and tls.secret_name are both %s: leave front_secret_name empty, coordinators then serve with secret_name" $tls.secret_name) -}}
{{- end -}}
{{- end -}}

{{/* Of one role. Takes root and role. */}}
{{- define "kvbraid.refuse_role_tls" -}}
{{- $role := .role -}}
{{- $tls := include "kvbraid.tls" . | fromJson -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
{{- if and $tls.tls_certificate (not $facts.health_port) -}}
{{- fail (printf "%s.settings.tls_certificate is set, but health_port is not: Kubernetes' probes speak no TLS and need one" $role) -}}
{{- end -}}
{{- range $callee := include "kvbraid.callees" . | fromJsonArray -}}
{{- $there := include "kvbraid.tls" (dict "root" $.root "role" $callee) | fromJson -}}
{{- if and $tls.tls_server_ca (not $there.tls_certificate) -}}
{{- fail (printf "%s calls %s over TLS, but %s serves in plaintext: give %s a tls_certificate or %s no tls_server_ca" $role $callee $callee $callee $role) -}}
{{- end -}}
{{- if and (not $tls.tls_server_ca) $there.tls_certificate -}}
{{- fail (printf "%s serves over TLS, but %s calls it in plaintext: give %s a tls_server_ca" $callee $role $role) -}}
{{- end -}}
{{- if and $there.tls_client_ca (not (or $tls.tls_client_certificate $tls.tls_certificate)) -}}
{{- fail (printf "%s asks callers for a certificate, but %s has none: give %s a tls_certificate or a tls_client_certificate" $callee $role $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The health port is of rank 0, beside the ports of all ranks. Takes root and role. */}}
{{- define "kvbraid.refuse_health_port" -}}
{{- $role := .role -}}
{{- $settings := include "kvbraid.settings" . | fromJson -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
{{- $port := int $facts.health_port -}}
{{- $last := add (int $facts.metrics_port) (mul (int $facts.hosts) (int $facts.ranks)) -1 | int -}}
{{- if and $port (ge $port (int $facts.port)) (le $port (int $facts.last_port)) -}}
{{- fail (printf "%s.settings.health_port %d is one of the ports %d to %d that the ranks take for calls" $role $port (int $facts.port) (int $facts.last_port)) -}}
{{- end -}}
{{- if and $port (ge $port (int $facts.metrics_port)) (le $port $last) -}}
{{- fail (printf "%s.settings.health_port %d is one of the ports %d to %d that the ranks take for metrics" $role $port (int $facts.metrics_port) $last) -}}
{{- end -}}
{{- if and $port (eq $port (int $settings.http_port)) -}}
{{- fail (printf "%s.settings.health_port and http_port are both %d" $role $port) -}}
{{- end -}}
{{- end -}}
