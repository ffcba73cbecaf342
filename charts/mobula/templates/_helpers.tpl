{{/* KubeRay refuses names of RayJobs above 47 characters, and makes names of services of them. */}}
{{- define "mobula.name" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" .Release.Name) -}}
{{- fail (printf "release name %q: KubeRay wants lower-case letters, digits and '-', and a letter in front" .Release.Name) -}}
{{- end -}}
{{- if gt (len .Release.Name) 47 -}}
{{- fail (printf "release name %q has %d characters: KubeRay takes 47 for a RayJob" .Release.Name (len .Release.Name)) -}}
{{- end -}}
{{- .Release.Name -}}
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

{{/* `exec` leaves no shell between KubeRay's job and the driver. */}}
{{- define "mobula.entrypoint" -}}
{{- $v := .Values -}}
{{- if not $v.entrypoint -}}
{{- fail "entrypoint is empty: say what the gang runs, for example entrypoint: [python, pretrain_gpt.py, --train-iters, \"100\"]" -}}
{{- end -}}
{{- $gpus := int $v.workers.resources.gpu -}}
{{- $cmd := list "exec" "mobula" $v.verb "--num-nodes" (toString (int $v.workers.replicas)) -}}
{{- if eq $v.verb "train" -}}{{ $cmd = concat $cmd (list "--gpus-per-node" (toString (max 1 $gpus))) }}
{{- else -}}{{ $cmd = concat $cmd (list "--ranks-per-node" (toString (max 1 $gpus))) }}
{{- end -}}
{{- if $v.job.maxRestarts }}{{ $cmd = concat $cmd (list "--max-restarts" (toString (int $v.job.maxRestarts))) }}{{ end -}}
{{- if $v.checkpoint.url }}{{ $cmd = concat $cmd (list "--checkpoint-url" $v.checkpoint.url) }}
{{- if eq $v.verb "run" }}{{ $cmd = concat $cmd (list "--save" $v.checkpoint.save) }}{{ end -}}
{{- end -}}
{{- if kindIs "string" $v.entrypoint -}}
{{- if eq $v.verb "train" }}{{ fail "verb train takes Megatron arguments as a list; a string is a shell command, which needs verb: run" }}{{ end -}}
{{- include "mobula.words" (concat $cmd (list "--" "/bin/sh" "-c" $v.entrypoint)) -}}
{{- else if eq $v.verb "train" -}}
{{- include "mobula.words" (concat $cmd $v.entrypoint) -}}
{{- else -}}
{{- include "mobula.words" (concat $cmd (list "--") $v.entrypoint) -}}
{{- end -}}
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

{{/* Labels by which a scheduler takes the job as one: of the RayJob. */}}
{{- define "mobula.queue.labels" -}}
{{- $q := .Values.queue -}}
{{- if and $q.scheduler (not $q.name) }}{{ fail (printf "queue.scheduler is %s and queue.name is empty: name the queue" $q.scheduler) }}{{ end -}}
{{- if and $q.name (not $q.scheduler) }}{{ fail "queue.name is set and queue.scheduler is not: kueue or volcano" }}{{ end -}}
{{- if eq $q.scheduler "kueue" }}
kueue.x-k8s.io/queue-name: {{ $q.name | quote }}
{{- with $q.priorityClass }}
kueue.x-k8s.io/priority-class: {{ . | quote }}
{{- end }}
{{- else if eq $q.scheduler "volcano" }}
ray.io/scheduler-name: volcano
volcano.sh/queue-name: {{ $q.name | quote }}
{{- with $q.priorityClass }}
ray.io/priority-class-name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* One node of the gang. The same for the head and the others: each trains. */}}
{{- define "mobula.pod" -}}
{{- $v := .root.Values -}}
{{- $topology := $v.queue.topology -}}
metadata:
  labels:
    {{- include "mobula.labels" .root | nindent 4 }}
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
  terminationGracePeriodSeconds: {{ int $v.job.terminationGracePeriodSeconds }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
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
  containers:
    - name: {{ .container }}
      image: "{{ $v.image.repository }}:{{ $v.image.tag | default .root.Chart.AppVersion }}"
      imagePullPolicy: {{ $v.image.pullPolicy }}
      env:
        {{- if eq $v.auth.mode "disabled" }}
        # KubeRay says nothing to a pod without a token, and then a head makes one of its own.
        - {name: RAY_AUTH_MODE, value: disabled}
        {{- end }}
        {{- include "mobula.env" $v.checkpoint.env | nindent 8 }}
        {{- include "mobula.env" $v.workers.env | nindent 8 }}
      # A head that names one port must name all: KubeRay then takes no default.
      ports:
        {{- if eq .container "head" }}
        - {containerPort: 6379, name: gcs-server}
        - {containerPort: 8265, name: dashboard}
        {{- end }}
        - {containerPort: 52365, name: agent}
        - {containerPort: 8080, name: metrics}
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
      resources:
        {{- $r := dict "cpu" (toString $v.workers.resources.cpu) "memory" (toString $v.workers.resources.memory) }}
        {{- if $v.workers.resources.gpu }}{{ $_ := set $r $v.workers.resources.gpuResourceName (toString (int $v.workers.resources.gpu)) }}{{ end }}
        {{- range $k, $q := $v.workers.resources.extra }}{{ $_ := set $r $k (toString $q) }}{{ end }}
        requests: {{- toYaml $r | nindent 10 }}
        limits: {{- toYaml $r | nindent 10 }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
  volumes:
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $v.storage.shm | quote }}}
{{- end -}}

{{- define "mobula.labels" -}}
app.kubernetes.io/name: mobula
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
