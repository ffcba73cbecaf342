{{/* KubeRay refuses names of RayJobs above 47 characters, and makes names of services of them. Two runs of
`helm template` without a name must not be one job. */}}
{{- define "mobula.name" -}}
{{- $name := .Release.Name -}}
{{- if eq $name "release-name" }}{{ $name = printf "mobula-%s" (randAlphaNum 6 | lower) }}{{ end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "release name %q: KubeRay wants lower-case letters, digits and '-', and a letter in front" $name) -}}
{{- end -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "release name %q has %d characters: KubeRay takes 47 for a RayJob" $name (len $name)) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* `key:` with nothing behind it where a map or a list may be empty: so it is, before anything is rendered. */}}
{{- define "mobula.empty" -}}
{{- $v := .Values -}}
{{- range $in, $keys := dict "" (list "files" "metadata" "workload") "workers" (list "env" "nodeSelector" "securityContext" "startParams") -}}
{{- $map := $v -}}
{{- if $in }}{{ $map = get $v $in }}{{ end -}}
{{- range $keys }}{{ if not (get $map .) }}{{ $_ := set $map . dict }}{{ end }}{{ end -}}
{{- end -}}
{{- if not $v.workers.resources.extra }}{{ $_ := set $v.workers.resources "extra" dict }}{{ end -}}
{{- if not $v.workers.sidecars }}{{ $_ := set $v.workers "sidecars" list }}{{ end -}}
{{- if and (kindIs "map" $v.queue) (not $v.queue.topology) }}{{ $_ := set $v.queue "topology" dict }}{{ end -}}
{{- range list "extraVolumes" "extraVolumeMounts" }}{{ if not (get $v.storage .) }}{{ $_ := set $v.storage . list }}{{ end }}{{ end -}}
{{- end -}}

{{/* One word of a shell command. */}}
{{- define "mobula.quote" -}}
{{- if regexMatch "^[-A-Za-z0-9_./:=,@%+]+$" . -}}{{ . }}{{- else -}}'{{ replace "'" "'\\''" . }}'{{- end -}}
{{- end -}}

{{- define "mobula.words" -}}
{{- $words := list -}}
{{- range . }}{{ $words = append $words (include "mobula.quote" .) }}{{ end -}}
{{- join " " $words -}}
{{- end -}}

{{- define "mobula.gpus" -}}
{{- $w := .Values.workers -}}
{{- if and (int $w.resources.gpu) (not (has $w.gpuResourceName (list "amd.com/gpu" "nvidia.com/gpu"))) -}}
{{- fail (printf "workers.gpuResourceName %s: mobula runs on amd.com/gpu and nvidia.com/gpu" $w.gpuResourceName) -}}
{{- end -}}
{{- int $w.resources.gpu -}}
{{- end -}}

{{/* Of a node: one for each GPU. */}}
{{- define "mobula.ranks" -}}
{{- $w := .Values.workers -}}
{{- if and (gt (int $w.cpuRanks) 1) (int $w.resources.gpu) }}{{ fail (printf "workers.cpuRanks %d with %d GPUs a node: each GPU has one rank; it is for nodes without" (int $w.cpuRanks) (int $w.resources.gpu)) }}{{ end -}}
{{- int $w.resources.gpu | default (int $w.cpuRanks) -}}
{{- end -}}

{{- define "mobula.checkpoint.url" -}}
{{- $v := .Values -}}
{{- if $v.checkpoint.url }}{{ $v.checkpoint.url }}{{ else if $v.remoteCheckpointsPath }}{{ include "mobula.url" $v.remoteCheckpointsPath }}{{ end -}}
{{- end -}}

{{/* `exec` leaves no shell between KubeRay's job and the driver. */}}
{{- define "mobula.entrypoint" -}}
{{- $v := .Values -}}
{{- if and (not $v.entrypoint) (not $v.megatronArguments) -}}
{{- fail "entrypoint is empty, and megatronArguments too: say what the gang runs, for example entrypoint: [python, pretrain_gpt.py, --train-iters, \"100\"]" -}}
{{- end -}}
{{- if and $v.entrypoint $v.megatronArguments }}{{ fail "entrypoint and megatronArguments are both set: the gang runs one of them" }}{{ end -}}
{{- $gpus := int (include "mobula.gpus" .) -}}
{{- $amd := and (gt $gpus 0) (eq $v.workers.gpuResourceName "amd.com/gpu") -}}
{{- $verb := $v.verb | default (ternary "run" "train" (or (not $v.megatronArguments) $amd)) -}}
{{- if and (eq $verb "train") $amd }}{{ fail "verb train on amd.com/gpu: mobula's own trainer has no AMD backend; verb: run starts Megatron-LM" }}{{ end -}}
{{- if and (eq $verb "train") (kindIs "string" $v.entrypoint) }}{{ fail "verb train takes Megatron arguments as a list; a string is a shell command, which needs verb: run" }}{{ end -}}
{{- $megatron := dict -}}
{{- if $v.megatronArguments }}{{ $megatron = include "mobula.megatron" . | fromJson }}{{ end -}}
{{- $cmd := list "exec" "mobula" $verb "--num-nodes" (toString (int $v.workers.replicas)) -}}
{{- $ranks := include "mobula.ranks" . -}}
{{- if or $gpus (eq $verb "train") }}{{ $cmd = concat $cmd (list "--gpus-per-node" $ranks) }}
{{- else }}{{ $cmd = concat $cmd (list "--ranks-per-node" $ranks) }}
{{- end -}}
{{- if $v.job.maxRestarts -}}
{{- if and (eq $verb "run") $megatron.loads }}{{ fail "job.maxRestarts with a base model behind --load: another attempt would begin with it again; give it as \"--pretrained-checkpoint /local_resources/basemodel\", and --load the directory of --save" }}{{ end -}}
{{- $cmd = concat $cmd (list "--max-restarts" (toString (int $v.job.maxRestarts))) -}}
{{- end -}}
{{- $url := include "mobula.checkpoint.url" . -}}
{{- if and $url $v.megatronArguments (not $megatron.save) }}{{ fail (printf "checkpoints go to %s, and megatronArguments have no --save: say in which directory they are written" $url) }}{{ end -}}
{{- range $key := list "keepLast" "keepLastLocal" -}}
{{- if and (get $v.checkpoint $key) (not $url) }}{{ fail (printf "checkpoint.%s without a bucket: nothing goes before it is durable; set checkpoint.url or remoteCheckpointsPath" $key) }}{{ end -}}
{{- end -}}
{{- $begins := and (eq $verb "run") $v.megatronArguments (not $megatron.goesOn) -}}
{{- if and $begins (eq $v.checkpoint.resume "required") }}{{ fail "checkpoint.resume required, and --load of megatronArguments is not the directory of --save: the program would begin anew whatever is there; --load the directory of --save" }}{{ end -}}
{{- if and (not $url) (eq $v.checkpoint.resume "required") }}{{ fail "checkpoint.resume required without a bucket: there is nothing to go on from; set checkpoint.url or remoteCheckpointsPath" }}{{ end -}}
{{- if $url -}}
{{- $cmd = concat $cmd (list "--checkpoint-url" $url) -}}
{{- if and (ne $v.checkpoint.resume "never") (not $begins) }}{{ $cmd = concat $cmd (list "--resume" $v.checkpoint.resume) }}{{ end -}}
{{- with int $v.checkpoint.keepLast }}{{ $cmd = concat $cmd (list "--checkpoint-keep-last" (toString .)) }}{{ end -}}
{{- with int $v.checkpoint.keepLastLocal }}{{ $cmd = concat $cmd (list "--keep-last-k" (toString .)) }}{{ end -}}
{{- if eq $verb "run" }}{{ $cmd = concat $cmd (list "--save" ($v.checkpoint.save | default $megatron.save | default "/tmp/checkpoints")) }}{{ end -}}
{{- end -}}
{{- if eq $verb "train" }}{{ $cmd = concat $cmd ($megatron.words | default $v.entrypoint) }}
{{- else if $v.megatronArguments -}}
{{- $cmd = concat $cmd (list "--fetch-inputs" "--") $v.megatronProgram $megatron.words -}}
{{- /* A rank sees the one device that is its own; Megatron-LM would take number LOCAL_RANK. */ -}}
{{- if $gpus }}{{ $cmd = concat $cmd (list "--local-rank" "0") }}{{ end -}}
{{- else if kindIs "string" $v.entrypoint }}{{ $cmd = concat $cmd (list "--" "/bin/sh" "-c" $v.entrypoint) }}
{{- else }}{{ $cmd = concat $cmd (list "--") $v.entrypoint }}
{{- end -}}
{{- include "mobula.words" $cmd -}}
{{- end -}}

{{- define "mobula.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
{{- if kindIs "map" $value }}
  valueFrom:
    secretKeyRef: {name: {{ $value.name | quote }}, key: {{ $value.key | quote }}}
{{- else }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of all containers that work with the store; what stands further left wins. As JSON. */}}
{{- define "mobula.env.all" -}}
{{- $v := .Values -}}
{{- $transfers := dict -}}
{{- range $key, $name := dict "partSizeMiB" "BUCKET_STORAGE_PART_MIB" "concurrency" "BUCKET_STORAGE_CONCURRENCY" -}}
{{- with get $v.checkpoint $key }}{{ $_ := set $transfers $name (toString (int .)) }}{{ end -}}
{{- end -}}
{{- merge (dict) ($v.workerEnvVars | default dict) ($v.workers.env | default dict) ($v.checkpoint.env | default dict) ($v.logistics.envVars | default dict) $transfers | toJson -}}
{{- end -}}

{{/* .own, which the chart writes into a container, and .env behind it: where it writes none of a name, users may. */}}
{{- define "mobula.env.behind" -}}
{{- $env := .env -}}
{{- range .own | fromYamlArray -}}
{{- if hasKey $env .name }}{{ fail (printf "%s is set by the chart: a pod with two of it is refused. What it says comes from job, checkpoint.deadlineMarginSeconds, storage and auth" .name) }}{{ end -}}
{{- end -}}
{{ .own }}
{{ include "mobula.env" $env }}
{{- end -}}

{{- define "mobula.env.name" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end -}}

{{/* Of the container of a node, as the chart has them; of mobula.pod all. */}}
{{- define "mobula.env.own" -}}
{{- $v := .root.Values -}}
{{- if eq $v.auth.mode "disabled" }}
# KubeRay says nothing to a pod without a token, and then a head makes one of its own.
- {name: RAY_AUTH_MODE, value: disabled}
{{- end }}
# The clocks that a pod cannot ask for: agents plan the last checkpoint with them.
- {name: MOBULA_GRACE_SECONDS, value: {{ int $v.job.terminationGracePeriodSeconds | quote }}}
{{- if $v.job.activeDeadlineSeconds }}
- {name: MOBULA_ACTIVE_DEADLINE_SECONDS, value: {{ int $v.job.activeDeadlineSeconds | quote }}}
- {name: MOBULA_START_ALLOWANCE_SECONDS, value: {{ int $v.job.startAllowanceSeconds | quote }}}
{{- with int $v.checkpoint.deadlineMarginSeconds }}
- {name: MOBULA_DEADLINE_MARGIN_SECONDS, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- if not .isRay }}
- {name: MOBULA_RAYJOB, value: {{ .name }}}
{{- end }}
{{- if .asks }}
{{- if eq $v.head.kind "ray" }}
- {name: MOBULA_RAYJOB_ASKS, value: "1"}
{{- end }}
{{- with include "mobula.owns" . }}
- {name: MOBULA_RAYJOB_OWNS, value: {{ . | quote }}}
{{- end }}
{{- if and $v.job.agentDeletes (not $v.job.deletionRules) }}
- {name: MOBULA_RAYJOB_DELETE_AFTER_SECONDS, value: {{ int $v.job.ttlSecondsAfterFinished | quote }}}
{{- end }}
{{- end }}
{{- with $v.job.noticeUrl }}
- {name: MOBULA_NOTICE_URL, value: {{ . | quote }}}
{{- end }}
{{- if not .isRay }}
{{ include "mobula.env.name" . }}
- {name: MOBULA_INPUT_DIR, value: {{ printf "%s/inputs" $v.storage.ephemeral.mountPath | quote }}}
{{- end }}
{{- end -}}

{{/* .taken: the names of the chart's own volumes in this pod. */}}
{{- define "mobula.volumes.check" -}}
{{- $s := .root.Values.storage -}}
{{- $names := .taken -}}
{{- range $s.extraVolumes -}}
{{- if has .name $names }}{{ fail (printf "storage.extraVolumes: the name %s is taken: a pod with two volumes of it is refused. volumes and network.preset have some, too" .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range $s.extraVolumeMounts }}{{ if not (has .name $names) }}{{ fail (printf "storage.extraVolumeMounts names the volume %s, and storage.extraVolumes has none of that name: no pod of the job could be made" .name) }}{{ end }}{{ end -}}
{{- end -}}

{{/* A number of values.yaml is a float, which would be written with an exponent. */}}
{{- define "mobula.quantity" -}}
{{- if kindIs "float64" . }}{{ printf "%.0f" . }}{{ else }}{{ toString . }}{{ end -}}
{{- end -}}

{{/* Labels by which a scheduler takes the job as one: of the RayJob. */}}
{{- define "mobula.queue.labels" -}}
{{- $q := .Values.queue -}}
{{- if and $q.scheduler (not $q.name) }}{{ fail (printf "queue.scheduler is %s and queue.name is empty: name the queue" $q.scheduler) }}{{ end -}}
{{- if and $q.name (not $q.scheduler) }}{{ fail "queue.name is set and queue.scheduler is not: kueue or volcano" }}{{ end -}}
{{- if and $q.topology.required $q.topology.preferred }}{{ fail "queue.topology.required and preferred are both set: Kueue takes one of them" }}{{ end -}}
{{- if eq $q.scheduler "kueue" }}
kueue.x-k8s.io/queue-name: {{ $q.name | quote }}
{{- with $q.priorityClass }}
kueue.x-k8s.io/priority-class: {{ . | quote }}
{{- end }}
{{- with $q.maxExecSeconds }}
kueue.x-k8s.io/max-exec-time-seconds: {{ int . | quote }}
{{- end }}
{{- else if eq $q.scheduler "volcano" }}
ray.io/scheduler-name: volcano
volcano.sh/queue-name: {{ $q.name | quote }}
{{- with $q.priorityClass }}
ray.io/priority-class-name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "mobula.image" -}}
{{- $v := .Values -}}
{{- if $v.image.repository -}}
{{- $named := regexMatch "(@|:[^/]*$)" $v.image.repository -}}
{{- if and $named $v.image.tag }}{{ fail (printf "image.repository %s has a tag or a digest already, and image.tag is %s" $v.image.repository $v.image.tag) }}{{ end -}}
{{- if $named }}{{ $v.image.repository }}{{ else }}{{ printf "%s:%s" $v.image.repository ($v.image.tag | default .Chart.AppVersion) }}{{ end -}}
{{- else -}}
{{- $v.mainWorkloadImage | default (printf "mobula:%s" .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* What holds mountPath. */}}
{{- define "mobula.scratch" -}}
{{- $e := .root.Values.storage.ephemeral -}}
{{- $claim := include "mobula.claim" . -}}
{{- if and $e.existingClaim $e.hostPath }}{{ fail "storage.ephemeral: existingClaim and hostPath exclude each other" }}{{ end -}}
- name: scratch
{{- if $e.existingClaim }}
  persistentVolumeClaim: {claimName: {{ $e.existingClaim | quote }}}
{{- else if $e.hostPath }}
  hostPath: {path: {{ $e.hostPath | quote }}, type: DirectoryOrCreate}
{{- else if $claim }}
  persistentVolumeClaim: {claimName: {{ $claim }}}
{{- else if $e.storageClassName }}
  # The pod owns this claim, so it goes with the pod, whatever becomes of the RayJob.
  ephemeral:
    volumeClaimTemplate:
      spec:
        storageClassName: {{ $e.storageClassName | quote }}
        accessModes: {{- toYaml $e.accessModes | nindent 10 }}
        resources: {requests: {storage: {{ $e.quantity | quote }}}}
{{- else }}
  emptyDir: {sizeLimit: {{ $e.quantity | quote }}}
{{- end }}
{{- end -}}

{{/* Where others have access too, each pod has a folder of its own. */}}
{{- define "mobula.scratch.mount" -}}
{{- $e := .root.Values.storage.ephemeral -}}
- name: scratch
  mountPath: {{ $e.mountPath | quote }}
  {{- if or $e.existingClaim $e.hostPath (include "mobula.claim" .) }}
  subPathExpr: $(POD_NAME)
  {{- end }}
{{- end -}}

{{- define "mobula.own.mounts" -}}
{{ include "mobula.scratch.mount" . }}
{{- with .root.Values.storage.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A small container of our image that works with the store: .name, .command, .mounts; .env comes first. */}}
{{- define "mobula.step" -}}
- name: {{ .name }}
  image: {{ include "mobula.image" .root | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: {{ toJson .command }}
  resources:
    requests: {cpu: 100m, memory: 256Mi}
    limits: {cpu: "1", memory: 256Mi}
  env:
    {{- include "mobula.env.behind" (dict "own" (include "mobula.env.name" .) "env" (merge (dict) (.env | default dict) (include "mobula.env.all" .root | fromJson))) | nindent 4 }}
  volumeMounts:
    {{- .mounts | nindent 4 }}
{{- end -}}

{{/* One node: .container is head or worker. Each trains, but for a real Ray head (.isRay). */}}
{{- define "mobula.pod" -}}
{{- $v := .root.Values -}}
{{- $showsEvents := and $v.runTensorboard (eq .container "head") (eq (include "mobula.tensorboard.place" .) "store") -}}
{{- $volumes := list "shm" "scratch" -}}
{{- if $v.files }}{{ $volumes = append $volumes "files" }}{{ end -}}
{{- if $showsEvents }}{{ $volumes = append $volumes "tensorboard" }}{{ end -}}
{{- if not .isRay }}{{ include "mobula.volumes.check" (dict "root" .root "taken" $volumes) }}{{ end -}}
{{- $image := include "mobula.image" .root -}}
{{- $topology := $v.queue.topology -}}
{{- $asks := ternary (not .isRay) (eq .container "head") (eq $v.head.kind "ray") -}}
metadata:
  labels:
    # No app.kubernetes.io/name: KubeRay has one of its own, and its Service finds the head by it.
    app.kubernetes.io/instance: {{ include "mobula.instance" .root }}
    {{- if or (include "mobula.tensorboard.service" .) .root.Values.podMonitor.enabled }}
    app.kubernetes.io/part-of: {{ .name }}
    {{- end }}
    {{- with $v.workers.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- if or $v.workers.podAnnotations $topology.required $topology.preferred }}
  annotations:
    {{- with $v.workers.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- with $topology.required }}
    kueue.x-k8s.io/podset-required-topology: {{ . | quote }}
    {{- end }}
    {{- with $topology.preferred }}
    kueue.x-k8s.io/podset-preferred-topology: {{ . | quote }}
    {{- end }}
  {{- end }}
spec:
  # Only who asks has a token: the head's agent, or all where the head is Ray's.
  serviceAccountName: {{ include "mobula.account" . }}
  automountServiceAccountToken: {{ $asks }}
  terminationGracePeriodSeconds: {{ int $v.job.terminationGracePeriodSeconds }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- if not .isRay }}
  {{- if $v.workers.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $v.workers.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.workers.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.workers.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.workers.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- end }}
  {{- $first := list }}
  {{- if not .isRay }}
  {{- with include "mobula.download" . }}{{ $first = append $first (. | trim) }}{{ end }}
  {{- with $v.network.initContainers }}{{ $first = append $first (toYaml .) }}{{ end }}
  {{- end }}
  {{- with $first }}
  initContainers: {{- join "\n" . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ .container }}
      image: {{ ternary $v.head.image $image .isRay | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      {{- if and $v.workers.securityContext (not .isRay) }}
      securityContext: {{- toYaml $v.workers.securityContext | nindent 8 }}
      {{- end }}
      env:
        {{- include "mobula.env.behind" (dict "own" (include "mobula.env.own" (dict "root" .root "name" .name "isRay" .isRay "asks" $asks) | trim) "env" (include "mobula.env.all" .root | fromJson)) | nindent 8 }}
      # A head that names one port must name all: KubeRay then takes no default.
      ports:
        {{- if eq .container "head" }}
        - {containerPort: 6379, name: gcs-server}
        - {containerPort: 8265, name: dashboard}
        {{- end }}
        - {containerPort: 52365, name: agent}
        - {containerPort: 8080, name: metrics}
        {{- if not .isRay }}
        {{- range $v.workers.ports }}
        {{- if not .name }}{{ fail (printf "workers.ports: %v has no name; KubeRay then no longer finds the dashboard" .containerPort) }}{{ end }}
        - {{ toJson . }}
        {{- end }}
        {{- end }}
      # Our own: KubeRay's need wget, grep and bash in the image.
      readinessProbe:
        httpGet: {path: /api/healthz, port: 52365}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 30
      livenessProbe:
        httpGet: {path: /api/healthz, port: 52365}
        initialDelaySeconds: 30
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 120
      {{- if not .isRay }}
      # Before SIGTERM, in the grace period: also where a shell is PID 1 and would not pass the signal on.
      lifecycle:
        preStop:
          exec:
            command: [mobula, drain, --local, --wait, --deadline, {{ max 1 (sub (int $v.job.terminationGracePeriodSeconds) 6) }}s, --reason, preStop]
      {{- end }}
      resources:
        {{- $has := ternary $v.head.resources $v.workers.resources .isRay }}
        {{- $r := dict "cpu" (include "mobula.quantity" $has.cpu) "memory" (include "mobula.quantity" $has.memory) }}
        {{- if and $has.gpu (not .isRay) }}{{ $_ := set $r $v.workers.gpuResourceName (include "mobula.gpus" .root) }}{{ end }}
        {{- range $k, $q := $has.extra }}{{ $_ := set $r $k (include "mobula.quantity" $q) }}{{ end }}
        requests: {{- toYaml $r | nindent 10 }}
        limits: {{- toYaml $r | nindent 10 }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        {{- if not .isRay }}
        {{- include "mobula.scratch.mount" . | nindent 8 }}
        {{- if $v.files }}
        - {name: files, mountPath: /etc/mobula/files, readOnly: true}
        {{- end }}
        {{- with $v.storage.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
        {{- end }}
    {{- if $v.runTensorboard }}
    {{- include "mobula.tensorboard" . | nindent 4 }}
    {{- end }}
    {{- if not .isRay }}
    {{- with $v.workers.sidecars }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- end }}
  volumes:
    - name: shm
      {{- if and $v.storage.dshm.hostPath (not .isRay) }}
      hostPath: {path: {{ $v.storage.dshm.hostPath | quote }}, type: Directory}
      {{- else }}
      emptyDir: {medium: Memory{{ with $v.storage.dshm.sizeLimit }}, sizeLimit: {{ . | quote }}{{ end }}}
      {{- end }}
    {{- if $showsEvents }}
    - name: tensorboard
      emptyDir: {}
    {{- end }}
    {{- if not .isRay }}
    {{- include "mobula.scratch" . | nindent 4 }}
    {{- with include "mobula.files" . }}
    - name: files
      configMap: {name: {{ . }}}
    {{- end }}
    {{- with $v.storage.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
    {{- end }}
{{- end -}}

{{- define "mobula.labels" -}}
app.kubernetes.io/name: mobula
app.kubernetes.io/instance: {{ include "mobula.instance" . }}
{{- end -}}

{{- define "mobula.instance" -}}
{{ .Release.Name | trunc 63 }}
{{- end -}}
