{{/*
What a cloud's fast network needs in every pod, by network.preset. Values that say the same win. Each fills in .Values,
before anything is rendered.
*/}}
{{- define "mobula.network" -}}
{{- $v := .Values -}}
{{- $preset := $v.network.preset -}}
{{- if eq $preset "efa" }}{{ include "mobula.network.efa" . }}{{ end -}}
{{- if eq $preset "tcpx" }}{{ include "mobula.network.tcpx" . }}{{ end -}}
{{- if eq $preset "rdma" -}}
{{- /* Memory that the cards reach is locked. */ -}}
{{- $c := $v.workers.securityContext.capabilities | default dict -}}
{{- $_ := set $v.workers.securityContext "capabilities" (merge (dict "add" (append ($c.add | default list) "IPC_LOCK" | uniq)) $c) -}}
{{- end -}}
{{- $_ := set $v.workers "sidecars" (concat ($v.workers.sidecars | default list) ($v.network.sidecars | default list)) -}}
{{- end -}}

{{/* Interfaces of a whole machine: a pod of the gang has all of its GPUs. */}}
{{- define "mobula.network.efa" -}}
{{- $w := .Values.workers -}}
{{- $counts := dict "p4d.24xlarge" 4 "p5.48xlarge" 32 "p5e.48xlarge" 32 "p5en.48xlarge" 16 "p6-b200.48xlarge" 8 -}}
{{- $type := get $w.nodeSelector "node.kubernetes.io/instance-type" -}}
{{- if not (hasKey $w.resources.extra "vpc.amazonaws.com/efa") -}}
{{- if not (hasKey $counts $type) }}{{ fail (printf "network.preset efa: how many interfaces has a node? Say workers.resources.extra.\"vpc.amazonaws.com/efa\", or a nodeSelector node.kubernetes.io/instance-type of %s" (keys $counts | sortAlpha | join ", ")) }}{{ end -}}
{{- $_ := set $w.resources.extra "vpc.amazonaws.com/efa" (get $counts $type) -}}
{{- end -}}
{{- $_ := set $w "env" (merge (dict) $w.env (dict "FI_PROVIDER" "efa")) -}}
{{- end -}}

{{/* GPUDirect-TCPx of GKE's A3: Google's daemon beside the ranks, on the host's network. */}}
{{- define "mobula.network.tcpx" -}}
{{- $w := .Values.workers -}}
{{- $s := .Values.storage -}}
{{- $nvidia := dict "name" "nvidia" "mountPath" "/usr/local/nvidia/lib64" -}}
{{- $tcpx := dict "name" "tcpx" "mountPath" "/run/tcpx" -}}
{{- $_ := set $w "hostNetwork" true -}}
{{- $_ := set $s "extraVolumes" (concat $s.extraVolumes (list (dict "name" "nvidia" "hostPath" (dict "path" "/home/kubernetes/bin/nvidia/lib64")) (dict "name" "tcpx" "emptyDir" dict))) -}}
{{- $_ := set $s "extraVolumeMounts" (concat $s.extraVolumeMounts (list $nvidia $tcpx)) -}}
{{- $_ := set $w "env" (merge (dict) $w.env (dict "LD_LIBRARY_PATH" "/usr/local/nvidia/lib64" "NCCL_SOCKET_IFNAME" "eth0" "NCCL_GPUDIRECTTCPX_CTRL_DEV" "eth0" "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME" "eth1,eth2,eth3,eth4" "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX" "/run/tcpx" "NCCL_CROSS_NIC" "0")) -}}
{{- $r := dict "cpu" "2" "memory" "1Gi" -}}
{{- $daemon := dict "name" "tcpx-daemon" "image" .Values.network.tcpxImage "command" (list "/tcpgpudmarxd/build/app/tcpgpudmarxd" "--gpu_nic_preset" "a3vm" "--gpu_shmem_type" "fd" "--uds_path" "/run/tcpx" "--setup_param" "--verbose 128 2 0") -}}
{{- $_ := merge $daemon (dict "securityContext" (dict "privileged" true) "env" (list (dict "name" "LD_LIBRARY_PATH" "value" "/usr/local/nvidia/lib64")) "resources" (dict "requests" $r "limits" $r) "volumeMounts" (list $nvidia $tcpx)) -}}
{{- $_ := set $w "sidecars" (append $w.sidecars $daemon) -}}
{{- end -}}
