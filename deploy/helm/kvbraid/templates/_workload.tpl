{{/* spec of a Deployment. Takes root, role and place. */}}
{{- define "kvbraid.deployment_spec" -}}
{{- $values := index .root.Values .role -}}
{{- if not (include "kvbraid.is_autoscaled" .) -}}
replicas: {{ int $values.replicas }}
{{ end -}}
selector:
  matchLabels:
    {{- include "kvbraid.role_labels" . | nindent 4 }}
strategy:
  rollingUpdate: {maxSurge: {{ int $values.max_surge }}, maxUnavailable: {{ int $values.max_unavailable }}}
# Loading counts as no progress.
progressDeadlineSeconds: {{ add (int $values.startup_seconds) 600 }}
template:
  {{- include "kvbraid.pod" . | nindent 2 }}
{{- end -}}

{{/* spec of a LeaderWorkerSet: one worker is one group, rank 0 is in the leader pod. */}}
{{- define "kvbraid.group_spec" -}}
{{- $values := index .root.Values .role -}}
{{- if not (include "kvbraid.is_autoscaled" .) -}}
replicas: {{ int $values.replicas }}
{{ end -}}
rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration: {maxSurge: {{ int $values.max_surge }}, maxUnavailable: {{ int $values.max_unavailable }}}
# The leader is ready only with its workers.
startupPolicy: LeaderCreated
networkConfig: {subdomainPolicy: Shared}
leaderWorkerTemplate:
  size: {{ int $values.hosts_per_worker }}
  restartPolicy: RecreateGroupOnPodRestart
  leaderTemplate:
    {{- include "kvbraid.pod" . | nindent 4 }}
  workerTemplate:
    {{- include "kvbraid.pod" (dict "root" .root "role" .role "place" "other") | nindent 4 }}
{{- end -}}

{{/* "true" or nothing. */}}
{{- define "kvbraid.is_autoscaled" -}}
{{- $scaling := (index .root.Values .role).autoscaling | default dict -}}
{{- if ne ($scaling.kind | default "none") "none" }}true{{ end -}}
{{- end -}}

{{/* apiVersion, kind and name of what runs a role's workers. */}}
{{- define "kvbraid.scale_target" -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
apiVersion: {{ $facts.is_group | ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" }}
kind: {{ $facts.is_group | ternary "LeaderWorkerSet" "Deployment" }}
name: {{ include "kvbraid.role_name" . }}
{{- end -}}
