{{/* Pod templates of all roles. Takes root, role and place: "first" has rank 0 and is what the
     role's headless Service finds; "other" is another host of a LeaderWorkerSet group. */}}

{{- define "kvbraid.pod" -}}
{{- $values := index .root.Values .role -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
metadata:
  labels:
    {{- include "kvbraid.role_labels" . | nindent 4 }}
    {{- if eq .place "first" }}
    kvbraid/rank-zero: "true"
    {{- end }}
  annotations:
    checksum/settings: {{ include "kvbraid.toml" . | sha256sum }}
    {{- with $values.pod_annotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- include "kvbraid.pod_identity" .root | nindent 2 }}
  {{- with $values.priority_class_name }}
  priorityClassName: {{ quote . }}
  {{- end }}
  {{- with $values.runtime_class_name }}
  runtimeClassName: {{ quote . }}
  {{- end }}
  terminationGracePeriodSeconds: {{ int $facts.grace_seconds }}
  {{- with (include "kvbraid.placement" . | trim) }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if .root.Values.model_volume.pull }}
  initContainers:
    - name: wait-for-model
      image: {{ include "kvbraid.image" (dict "root" .root "variant" $values.image_variant) }}
      imagePullPolicy: {{ .root.Values.image.pull_policy }}
      command: [sh, -c, 'until [ -e "$1" ]; do sleep 2; done', sh, {{ include "kvbraid.pulled_path" .root | quote }}]
      securityContext:
        {{- include "kvbraid.container_security" . | nindent 8 }}
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {cpu: 100m, memory: 64Mi}
      volumeMounts:
        - {name: models, mountPath: {{ .root.Values.model_volume.mount_path }}, readOnly: true}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "kvbraid.image" (dict "root" .root "variant" $values.image_variant) }}
      imagePullPolicy: {{ .root.Values.image.pull_policy }}
      command: {{ include "kvbraid.command" . }}
      env:
        {{- include "kvbraid.environment" . | nindent 8 }}
      ports:
        - {name: grpc, containerPort: {{ int $facts.port }}}
        {{- if eq .role "coordinator" }}
        - {name: http, containerPort: {{ int $values.settings.http_port }}}
        {{- end }}
        {{- if $facts.step_port }}
        - {name: steps, containerPort: {{ int $facts.step_port }}}
        {{- end }}
        {{- if eq .place "first" }}
        - {name: metrics, containerPort: {{ int $facts.metrics_port }}}
        {{- if $facts.health_port }}
        - {name: health, containerPort: {{ int $facts.health_port }}}
        {{- end }}
        {{- end }}
      {{- include "kvbraid.probes" . | nindent 6 }}
      {{- if $values.pre_stop_seconds }}
      lifecycle:
        preStop:
          sleep: {seconds: {{ int $values.pre_stop_seconds }}}
      {{- end }}
      securityContext:
        {{- include "kvbraid.container_security" . | nindent 8 }}
      resources:
        {{- include "kvbraid.resources" . | nindent 8 }}
      volumeMounts:
        - {name: settings, mountPath: /etc/kvbraid, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if ne .role "coordinator" }}
        - {name: shared-memory, mountPath: /dev/shm}
        {{- end }}
        {{- if ne .root.Values.model_volume.kind "none" }}
        - {name: models, mountPath: {{ .root.Values.model_volume.mount_path }}, readOnly: true}
        {{- end }}
        {{- with (include "kvbraid.tls_mounts" . | trim) }}
        {{- . | nindent 8 }}
        {{- end }}
  volumes:
    - name: settings
      configMap: {name: {{ include "kvbraid.role_name" . }}}
    - name: tmp
      emptyDir: {}
    {{- if ne .role "coordinator" }}
    - name: shared-memory
      emptyDir: {medium: Memory, sizeLimit: {{ $values.shared_memory }}}
    {{- end }}
    {{- include "kvbraid.model_volume" .root | nindent 4 }}
    {{- with (include "kvbraid.tls_volumes" . | trim) }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* What every pod has in common. */}}
{{- define "kvbraid.pod_identity" -}}
serviceAccountName: {{ include "kvbraid.fullname" . }}
automountServiceAccountToken: false
# Links would set KVBRAID_DECODE_PORT=tcp://... for a Service of that name, which is a setting.
enableServiceLinks: false
# The process is not PID 1 then: one that still loads ends at SIGTERM instead of ignoring it.
shareProcessNamespace: true
{{- with .Values.image.pull_secrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int .Values.pod_security.run_as_user }}
  runAsGroup: {{ int .Values.pod_security.run_as_group }}
  fsGroup: {{ int .Values.pod_security.fs_group }}
  fsGroupChangePolicy: OnRootMismatch
  {{- with .Values.pod_security.supplemental_groups }}
  supplementalGroups: {{ toJson . }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvbraid.container_security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "kvbraid.command" -}}
{{- $module := eq .role "coordinator" | ternary "coordinator" (printf "%s_service" .role) -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
{{- if $facts.is_group -}}
{{- $values := index .root.Values .role -}}
{{- list "python" "-m" "kvbraid.worker.host_ranks" "--host-index=$(LWS_WORKER_INDEX)" "--leader=$(LWS_LEADER_ADDRESS)"
  (printf "--num-hosts=%d" (int $facts.hosts)) (printf "--ranks-per-host=%d" (int $facts.ranks))
  (printf "--port=%d" (int $facts.port)) (printf "--meeting-seconds=%d" (int $values.startup_seconds)) $module | toJson -}}
{{- else -}}
{{- list "python" "-m" $module | toJson -}}
{{- end -}}
{{- end -}}

{{- define "kvbraid.environment" -}}
{{- $settings := include "kvbraid.settings" . | fromJson -}}
- {name: KVBRAID_CONFIG, value: /etc/kvbraid/kvbraid.toml}
{{- if not $settings.advertise_host }}
- name: KVBRAID_ADVERTISE_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- with $settings.ready_file }}
# The image has one for its own health check, and the environment outweighs the file.
- {name: KVBRAID_READY_FILE, value: {{ . }}}
{{- end }}
# Kernel caches go below it.
- {name: HOME, value: /tmp}
{{- with (index .root.Values .role).extra_env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "kvbraid.resources" -}}
{{- $values := index .root.Values .role -}}
{{- $devices := $values.extra_resources | default dict | deepCopy -}}
{{- if $values.accelerator -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
{{- $_ := set $devices $values.accelerator (int $facts.ranks) -}}
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{ $kind }}: {{ merge (index $values.resources $kind | deepCopy) $devices | toJson }}
{{ end -}}
{{- end -}}

{{- define "kvbraid.placement" -}}
{{- $values := index .root.Values .role -}}
{{- with $values.node_selector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and $values.spread_topology_key (eq .place "first") }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ $values.spread_topology_key }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "kvbraid.role_labels" . | nindent 8 }}
        kvbraid/rank-zero: "true"
{{- end }}
{{- end -}}
