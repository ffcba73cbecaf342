{{- define "mobula.metadata" -}}
{{- $m := .root.Values.metadata -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "mobula.labels" .root | nindent 2 }}
  {{- include "mobula.queue.labels" .root | nindent 2 }}
  {{- with $m.labels }}{{ toYaml . | nindent 2 }}{{ end }}
{{- with $m.annotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Who goes when. */}}
{{- define "mobula.end" -}}
{{- $v := .Values -}}
{{- $isQueued := or (eq $v.queue.scheduler "kueue") $v.kaiwo.enabled -}}
{{- if and $isQueued $v.job.deletionRules }}{{ fail "job.deletionRules under Kueue: it refuses them; job.ttlSecondsAfterFinished deletes the RayCluster" }}{{ end -}}
{{- if $isQueued -}}
{{- if eq $v.queue.scheduler "kueue" }}
# Kueue starts the job by this field.
suspend: true
{{- end }}
# Kueue, which Kaiwo uses too, refuses deletion rules.
shutdownAfterJobFinishes: true
{{- if $v.job.agentDeletes }}
# The head's agent deletes the RayJob first; this takes the RayCluster where that could not be done.
ttlSecondsAfterFinished: {{ add (int $v.job.ttlSecondsAfterFinished) 60 }}
{{- else }}
ttlSecondsAfterFinished: {{ int $v.job.ttlSecondsAfterFinished }}
{{- end }}
{{- else -}}
# The TTL of a RayJob deletes its RayCluster alone; these rules delete it too, with all it owns.
deletionStrategy:
  deletionRules:
    {{- with $v.job.deletionRules }}{{ toYaml . | nindent 4 }}
    {{- else }}
    {{- range $status := list "SUCCEEDED" "FAILED" }}
    - policy: DeleteSelf
      condition: {jobStatus: {{ $status }}, ttlSeconds: {{ int $v.job.ttlSecondsAfterFinished }}}
    {{- end }}
    - policy: DeleteSelf
      condition: {jobDeploymentStatus: Failed, ttlSeconds: {{ int $v.job.ttlSecondsAfterFinished }}}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Who posts the job. HTTPMode: the operator asks the head itself, so no pod that a gang scheduler must count. */}}
{{- define "mobula.submission" -}}
{{- $v := .Values -}}
{{- $mode := $v.job.submissionMode -}}
{{- if and (eq $mode "SidecarMode") (ne $v.head.kind "ray") }}{{ fail "job.submissionMode SidecarMode needs head.kind: ray, for its container runs Ray's own client in the head's image" }}{{ end -}}
{{- if and (eq $v.head.kind "ray") (ne $mode "HTTPMode") (regexMatch "[$`]" (toJson $v.job.runtimeEnv)) }}{{ fail (printf "job.runtimeEnv with $ or ` in submissionMode %s of a real Ray head: the shell of KubeRay's submitter would replace it; HTTPMode leaves it as it is" $mode) }}{{ end -}}
submissionMode: {{ $mode }}
{{- if and (eq $mode "K8sJobMode") (eq $v.head.kind "mobula") }}
# Ray's own line needs python in the image. Started again, the pod follows the job that is there.
submitterPodTemplate:
  spec:
    restartPolicy: Never
    {{- with $v.image.pullSecrets }}
    imagePullSecrets:
      {{- range . }}
      - name: {{ . | quote }}
      {{- end }}
    {{- end }}
    containers:
      - name: submitter
        image: {{ include "mobula.image" . | quote }}
        imagePullPolicy: {{ $v.image.pullPolicy }}
        command:
          - mobula
          - job
          - submit
          - --address
          - http://$(RAY_DASHBOARD_ADDRESS)
          - --submission-id
          - $(RAY_JOB_SUBMISSION_ID)
          - --metadata-json
          - '{"mobula_submission_key": "$(RAY_JOB_SUBMISSION_ID)"}'
          {{- with $v.job.runtimeEnv }}
          - --runtime-env-json
          - {{ toJson . | replace "$(" "$$(" | toJson }}
          {{- end }}
          - --
          - /bin/sh
          - -c
          - {{ include "mobula.entrypoint" . | replace "$(" "$$(" | toJson }}
        resources:
          requests: {cpu: 200m, memory: 256Mi}
          limits: {cpu: "1", memory: 256Mi}
{{- end }}
{{- end -}}

{{/* .name: of the RayJob. */}}
{{- define "mobula.spec" -}}
{{- $v := .root.Values -}}
{{- $isRay := eq $v.head.kind "ray" -}}
{{- if and $isRay (not $v.head.image) }}{{ fail "head.kind ray needs head.image: Ray's image with the program mobula in it" }}{{ end -}}
{{- $others := ternary (int $v.workers.replicas) (sub (int $v.workers.replicas) 1 | int) $isRay -}}
{{ include "mobula.submission" .root }}
entrypoint: {{ include "mobula.entrypoint" .root | toJson }}
{{- with $v.job.runtimeEnv }}
runtimeEnvYAML: {{ toYaml . | toJson }}
{{- end }}
backoffLimit: {{ int $v.job.backoffLimit }}
{{- $margin := int $v.checkpoint.deadlineMarginSeconds }}
{{- $active := int $v.job.activeDeadlineSeconds }}
{{- if and $margin (not $active) }}{{ fail (printf "checkpoint.deadlineMarginSeconds %d without job.activeDeadlineSeconds: there is no deadline to be before" $margin) }}{{ end }}
{{- if gt (mul 2 $margin) (int64 $active) }}{{ fail (printf "checkpoint.deadlineMarginSeconds %d of job.activeDeadlineSeconds %d: half of them is left to work in, so it is %d at most" $margin $active (div $active 2)) }}{{ end }}
{{- if $v.job.activeDeadlineSeconds }}
activeDeadlineSeconds: {{ int $v.job.activeDeadlineSeconds }}
{{- end }}
{{- if $v.job.preRunningDeadlineSeconds }}
preRunningDeadlineSeconds: {{ int $v.job.preRunningDeadlineSeconds }}
{{- end }}
{{ include "mobula.end" .root }}
rayClusterSpec:
  rayVersion: {{ $v.head.rayVersion | quote }}
  authOptions:
    mode: {{ $v.auth.mode }}
    {{- with $v.auth.secretName }}
    secretName: {{ . | quote }}
    {{- end }}
  headGroupSpec:
    rayStartParams: {{- toYaml $v.workers.startParams | nindent 6 }}
    template:
      {{- include "mobula.pod" (dict "root" .root "name" .name "container" "head" "isRay" $isRay) | nindent 6 }}
  {{- if $others }}
  workerGroupSpecs:
    - groupName: {{ $v.workers.groupName }}
      replicas: {{ $others }}
      minReplicas: {{ $others }}
      maxReplicas: {{ $others }}
      rayStartParams: {{- toYaml $v.workers.startParams | nindent 8 }}
      template:
        {{- include "mobula.pod" (dict "root" .root "name" .name "container" "worker" "isRay" false) | nindent 8 }}
  {{- end }}
{{- end -}}
