{{/*
Values of the GKE NeMo chart: a queue's name alone, volumes, workload, gcsDownload. They become values of this one,
before anything is rendered.
*/}}
{{- define "mobula.nemo" -}}
{{- $v := .Values -}}
{{- $queue := dict "scheduler" "" "name" "" "priorityClass" "" "maxExecSeconds" 0 "topology" (dict "required" "" "preferred" "") -}}
{{- if kindIs "string" $v.queue -}}
{{- $_ := set $v "queue" (mergeOverwrite $queue (ternary (dict "scheduler" "kueue" "name" $v.queue) dict (ne $v.queue ""))) -}}
{{- else if not $v.queue -}}
{{- $_ := set $v "queue" $queue -}}
{{- end -}}
{{- $w := $v.workload -}}
{{- if $w.torchDistributedTarget }}{{ include "mobula.nemo.workload" . }}{{ end -}}
{{- include "mobula.nemo.volumes" . -}}
{{- end -}}

{{/* Each rank sees its one GPU alone: to the trainer it is a machine of its own with that one. */}}
{{- define "mobula.nemo.workload" -}}
{{- $v := .Values -}}
{{- $w := $v.workload -}}
{{- if or $v.entrypoint $v.megatronArguments }}{{ fail "workload.torchDistributedTarget, and entrypoint or megatronArguments too: the gang runs one of them" }}{{ end -}}
{{- $gpus := int $w.gpus -}}
{{- $nodes := int ($w.nodes | default (div (add $gpus 7) 8)) -}}
{{- if or (lt $gpus 1) (mod $gpus $nodes) (gt (div $gpus $nodes) 8) -}}
{{- fail (printf "workload.gpus %d on %d nodes: each has the same number, from 1 to 8" $gpus $nodes) -}}
{{- end -}}
{{- $_ := set $v.workers "replicas" $nodes -}}
{{- $_ := set $v.workers.resources "gpu" (div $gpus $nodes) -}}
{{- $_ := set $v.workers "gpuResourceName" "nvidia.com/gpu" -}}
{{- if $w.image }}{{ $_ := set $v "mainWorkloadImage" $w.image }}{{ end -}}
{{- $words := list "env" "LOCAL_RANK=0" "python" $w.torchDistributedTarget -}}
{{- if hasKey $v.files "nemo-configuration.yaml" }}{{ $words = concat $words (list "--config-path=/etc/mobula/files" "--config-name=nemo-configuration.yaml") }}{{ end -}}
{{- $words = concat $words (list (printf "++trainer.num_nodes=%d" $gpus) "++trainer.devices=1") -}}
{{- range $w.arguments -}}
{{- $name := .name -}}
{{- if not (regexMatch "^[+~]" $name) }}{{ $name = printf "+%s" $name }}{{ end -}}
{{- $words = append $words (printf "%s=%s" $name (ternary .value (toJson .value) (kindIs "string" .value))) -}}
{{- end -}}
{{- $_ := set $v "entrypoint" $words -}}
{{- $_ := set $v "verb" "run" -}}
{{- if $w.embeddedTensorboardTarget -}}
{{- $_ := set $v "runTensorboard" true -}}
{{- $_ := set $v "tensorboardDir" $w.embeddedTensorboardTarget -}}
{{- end -}}
{{- end -}}

{{/* The claims have the names of Google's guides. */}}
{{- define "mobula.nemo.volumes" -}}
{{- $v := .Values -}}
{{- $o := $v.volumes -}}
{{- $s := $v.storage -}}
{{- $claims := $o.pvcMounts | default list -}}
{{- if $o.nfsMountPath }}{{ $claims = append $claims (dict "name" "cluster-filestore" "mountPath" $o.nfsMountPath) }}{{ end -}}
{{- range $claims -}}
{{- $name := .name | replace "." "-" -}}
{{- $_ := set $s "extraVolumes" (append $s.extraVolumes (dict "name" $name "persistentVolumeClaim" (dict "claimName" .name))) -}}
{{- $_ := set $s "extraVolumeMounts" (append $s.extraVolumeMounts (dict "name" $name "mountPath" .mountPath)) -}}
{{- end -}}
{{- if $o.ssdMountPath -}}
{{- $e := $s.ephemeral -}}
{{- $_ := set $e "mountPath" $o.ssdMountPath -}}
{{- if not (or $e.hostPath $e.existingClaim $e.storageClassName) }}{{ $_ := set $e "hostPath" "/mnt/stateful_partition/kube-ephemeral-ssd" }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* What a pod fetches before it starts, if anything. .root */}}
{{- define "mobula.download" -}}
{{- $v := .root.Values -}}
{{- $d := $v.gcsDownload | default $v.volumes.gcsDownload | default dict -}}
{{- if and $d.source (not $d.target) }}{{ fail (printf "gcsDownload: %s has no target: say where it goes" $d.source) }}{{ end -}}
{{- if $d.source }}
{{- $env := ternary (dict "BUCKET_STORAGE_HOST" "https://storage.googleapis.com") dict (hasPrefix "gs://" $d.source) }}
{{ include "mobula.step" (dict "root" .root "name" "download" "env" $env "command" (list "mobula" "checkpoint" "pull" "--plain" (include "mobula.url" $d.source) $d.target) "mounts" (include "mobula.own.mounts" .)) }}
{{- end }}
{{- end -}}
