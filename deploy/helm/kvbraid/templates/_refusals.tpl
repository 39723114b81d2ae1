{{/* Refusals of one role. Takes root and role. */}}

{{- define "kvbraid.refuse_role" -}}
{{- $role := .role -}}
{{- $values := index .root.Values $role -}}
{{- $settings := include "kvbraid.settings" . | fromJson -}}
{{- $volume := .root.Values.model_volume -}}
{{- if not $settings.model -}}
{{- fail (printf "settings.model is empty: name the folder or GGUF file that %s loads, e.g. %s/NAME" $role $volume.mount_path) -}}
{{- end -}}
{{- if and (ne $volume.kind "none") (not (hasPrefix (printf "%s/" $volume.mount_path) $settings.model)) -}}
{{- fail (printf "%s loads %s, which is not below model_volume.mount_path %s" $role $settings.model $volume.mount_path) -}}
{{- end -}}
{{- if and (eq (int $values.max_surge) 0) (eq (int $values.max_unavailable) 0) -}}
{{- fail (printf "%s.max_surge and %s.max_unavailable are both 0: no pod could ever be replaced" $role $role) -}}
{{- end -}}
{{- if and $settings.advertise_host (or (gt (int $values.replicas) 1) (gt ($values.hosts_per_worker | default 1 | int) 1) (include "kvbraid.is_autoscaled" .)) -}}
{{- fail (printf "%s.settings.advertise_host is one name for several pods: leave it empty, every pod then gives its own address" $role) -}}
{{- end -}}
{{- include "kvbraid.refuse_ports" . -}}
{{- include "kvbraid.refuse_health_port" . -}}
{{- include "kvbraid.refuse_role_tls" . -}}
{{- end -}}

{{/* Rank r of a pod listens on settings.port + r; rank r of a worker has metrics on metrics_port + r. */}}
{{- define "kvbraid.refuse_ports" -}}
{{- $role := .role -}}
{{- $settings := include "kvbraid.settings" . | fromJson -}}
{{- $facts := include "kvbraid.facts" . | fromJson -}}
{{- $last := add (int $facts.metrics_port) (mul (int $facts.hosts) (int $facts.ranks)) -1 | int -}}
{{- if and (le (int $facts.metrics_port) (int $facts.last_port)) (ge $last (int $facts.port)) -}}
{{- fail (printf "%s.settings.metrics_port %d is too near to port %d: the ranks take %d to %d for metrics and %d to %d for calls" $role (int $facts.metrics_port) (int $facts.port) (int $facts.metrics_port) $last (int $facts.port) (int $facts.last_port)) -}}
{{- end -}}
{{- if eq (int $settings.http_port) (int $facts.port) -}}
{{- fail (printf "%s.settings.http_port and port are both %d" $role (int $facts.port)) -}}
{{- end -}}
{{- if eq (int $settings.http_port) (int $settings.metrics_port) -}}
{{- fail (printf "%s.settings.http_port and metrics_port are both %d" $role (int $settings.http_port)) -}}
{{- end -}}
{{- if and $facts.step_port (has (int $facts.step_port) (list (int $facts.port) (int $facts.metrics_port) (int $facts.health_port))) -}}
{{- fail (printf "%s.settings.step_port %d is port, metrics_port or health_port too" $role (int $facts.step_port)) -}}
{{- end -}}
{{- if and $facts.is_group (le (int $facts.port) (mul (sub (int $facts.hosts) 1) (int $facts.ranks) | int)) -}}
{{- fail (printf "%s.settings.port %d is too low: it must be above the number of a worker's last host's first rank" $role (int $facts.port)) -}}
{{- end -}}
{{- end -}}

{{- define "kvbraid.refuse_layout" -}}
{{- $role := .role -}}
{{- $values := index .root.Values $role -}}
{{- $settings := include "kvbraid.settings" . | fromJson -}}
{{- $tp := $settings.tp_size | default 1 | int -}}
{{- $dcp := $settings.dcp_size | default 1 | int -}}
{{- $hosts := $values.hosts_per_worker | default 1 | int -}}
{{- if mod $tp $hosts -}}
{{- fail (printf "%s.settings.tp_size %d cannot be spread evenly over %s.hosts_per_worker %d" $role $tp $role $hosts) -}}
{{- end -}}
{{- if mod $tp $dcp -}}
{{- fail (printf "%s.settings.dcp_size %d must divide tp_size %d" $role $dcp $tp) -}}
{{- end -}}
{{- $page := $settings.page_size | default 16 | int -}}
{{- if mod $page ($settings.interleave | default 1 | int) -}}
{{- fail (printf "%s.settings.interleave %d must divide page_size %d" $role (int $settings.interleave) $page) -}}
{{- end -}}
{{- if and (gt $hosts 1) (eq (toString $settings.communicator) "shared_memory") -}}
{{- fail (printf "%s.settings.communicator is shared_memory, but its ranks are on %d hosts: use auto, gloo or nccl" $role $hosts) -}}
{{- end -}}
{{- if and (gt $hosts 1) (eq (toString $settings.exchange) "fused") -}}
{{- fail (printf "%s.settings.exchange is fused, which writes into GPUs of one host, but its ranks are on %d hosts: use ag_rs or a2a" $role $hosts) -}}
{{- end -}}
{{- if eq (toString $settings.kv_mover) "shared_memory" -}}
{{- fail (printf "%s.settings.kv_mover is shared_memory, but pods share no memory: use auto or grpc_push" $role) -}}
{{- end -}}
{{- if eq (toString $settings.draft_wire) "local_socket" -}}
{{- fail (printf "%s.settings.draft_wire is local_socket, but pods share no sockets: use auto, tcp or grpc" $role) -}}
{{- end -}}
{{- if and $settings.kv_cache_tokens $settings.max_model_len (lt (int $settings.kv_cache_tokens) (int $settings.max_model_len)) -}}
{{- fail (printf "%s.settings.max_model_len %d does not fit into kv_cache_tokens %d" $role (int $settings.max_model_len) (int $settings.kv_cache_tokens)) -}}
{{- end -}}
{{- end -}}

{{- define "kvbraid.refuse_device" -}}
{{- $role := .role -}}
{{- $values := index .root.Values $role -}}
{{- $settings := include "kvbraid.settings" . | fromJson -}}
{{- $vendor := dict "nvidia.com" "cuda" "amd.com" "rocm" -}}
{{- $variant := index $vendor (splitList "/" $values.accelerator | first) | default $values.image_variant -}}
{{- if and $values.accelerator (or (eq $values.image_variant "cpu") (ne $variant $values.image_variant)) -}}
{{- fail (printf "%s.accelerator is %s, but %s.image_variant is %s" $role $values.accelerator $role $values.image_variant) -}}
{{- end -}}
{{- $device := $settings.device | default "auto" -}}
{{- if and $values.accelerator (eq $device "cpu") -}}
{{- fail (printf "%s.settings.device is cpu, but %s.accelerator asks for GPUs" $role $role) -}}
{{- end -}}
{{- if and (not $values.accelerator) (hasPrefix "cuda" $device) -}}
{{- fail (printf "%s.settings.device is %s, but %s.accelerator is empty" $role $device $role) -}}
{{- end -}}
{{- if and (not $values.accelerator) (eq (toString $settings.communicator) "nccl") -}}
{{- fail (printf "%s.settings.communicator is nccl, which needs GPUs, but %s.accelerator is empty" $role $role) -}}
{{- end -}}
{{- end -}}

{{/* Drafts come from the draft workers of this release or from a drafter inside, not from both. */}}
{{- define "kvbraid.refuse_drafting" -}}
{{- $draft := include "kvbraid.settings" (dict "root" . "role" "draft") | fromJson -}}
{{- if not $draft.drafter -}}
{{- fail "draft.replicas is above 0, but draft.settings.drafter is empty: name the drafter's checkpoint" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $settings := include "kvbraid.settings" (dict "root" $ "role" $role) | fromJson -}}
{{- if $settings.drafter -}}
{{- fail (printf "%s has settings.drafter %s, but draft.replicas is above 0: set drafter below draft.settings only, or replicas to 0" $role $settings.drafter) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvbraid.refuse_scaling" -}}
{{- $role := .role -}}
{{- $scaling := (index .root.Values $role).autoscaling -}}
{{- if and (ne $scaling.kind "none") (lt (int $scaling.max_replicas) (int $scaling.min_replicas)) -}}
{{- fail (printf "%s.autoscaling.max_replicas %d is below min_replicas %d" $role (int $scaling.max_replicas) (int $scaling.min_replicas)) -}}
{{- end -}}
{{- if and (eq $role "decode") (eq $scaling.kind "hpa") (not $scaling.reserved_pages) -}}
{{- fail "decode.autoscaling.kind is hpa: reserved_pages must say how many pages one worker may hold (kvbraid_kv_pages shows how many it has); keda can work with a fraction" -}}
{{- end -}}
{{- end -}}
