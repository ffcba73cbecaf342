{{/*
Data for training: a batch Job NAME-data, of one pod, so that its preprocessing begins when its download has ended.
A container that fails is started again in its place, where mobula preprocess goes on with what it had made.
*/}}
{{- define "mobula.prepare.container" -}}
{{- $v := .root.Values -}}
name: {{ .name }}
image: {{ .step.image | default (include "mobula.image" .root) | quote }}
imagePullPolicy: {{ $v.image.pullPolicy }}
command: {{ .command }}
{{- $r := dict }}
{{- range $k, $q := .step.resources }}{{ $_ := set $r $k (include "mobula.quantity" $q) }}{{ end }}
resources:
  requests: {{- toYaml $r | nindent 4 }}
  limits: {{- toYaml $r | nindent 4 }}
env:
  {{- $env := include "mobula.env.all" .root | fromJson }}
  {{- $own := include "mobula.env.name" . }}
  {{- if not (hasKey $env "TMPDIR") }}{{ $own = printf "%s\n- {name: TMPDIR, value: %s}" $own (quote $v.storage.ephemeral.mountPath) }}{{ end }}
  {{- include "mobula.env.behind" (dict "own" $own "env" $env) | nindent 2 }}
volumeMounts:
  {{- include "mobula.scratch.mount" . | nindent 2 }}
  {{- with $v.storage.extraVolumeMounts }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end -}}

{{- define "mobula.prepare.words" -}}
{{- $words := (include "mobula.split" (dict "root" . "arguments" .Values.prepare.prepdata.arguments "what" "prepare.prepdata.arguments") | fromJson).words -}}
{{- range list "--input" "--output-prefix" "--tokenizer-type" -}}
{{- if not (has . $words) }}{{ fail (printf "prepare.prepdata.arguments have no %s: they are what `mobula preprocess` gets" .) }}{{ end -}}
{{- end -}}
{{- concat (list "mobula" "preprocess") $words | toJson -}}
{{- end -}}

{{- define "mobula.prepare" -}}
{{- $v := .root.Values -}}
{{- $p := $v.prepare -}}
{{- include "mobula.volumes.check" (dict "root" .root "taken" (list "scratch")) -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ .name }}-data
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "mobula.labels" .root | nindent 4 }}
    {{- with $v.metadata.labels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with $v.metadata.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  backoffLimit: {{ int $p.backoffLimit }}
  ttlSecondsAfterFinished: {{ int $p.ttlSecondsAfterFinished }}
  template:
    metadata:
      labels: {{- include "mobula.labels" .root | nindent 8 }}
    spec:
      restartPolicy: OnFailure
      serviceAccountName: {{ $p.serviceAccountName }}
      automountServiceAccountToken: false
      {{- with $v.image.pullSecrets }}
      imagePullSecrets:
        {{- range . }}
        - name: {{ . | quote }}
        {{- end }}
      {{- end }}
      {{- with $p.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $p.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $p.getdata.command }}
      initContainers:
        - {{ include "mobula.prepare.container" (dict "root" $.root "name" "getdata" "step" $p.getdata "command" (ternary (list "/bin/sh" "-c" .) . (kindIs "string" .) | toJson)) | nindent 10 | trim }}
      {{- end }}
      containers:
        - {{ include "mobula.prepare.container" (dict "root" .root "name" "prepdata" "step" $p.prepdata "command" (include "mobula.prepare.words" .root)) | nindent 10 | trim }}
      volumes:
        {{- include "mobula.scratch" . | nindent 8 }}
        {{- with $v.storage.extraVolumes }}{{ toYaml . | nindent 8 }}{{ end }}
{{- end -}}
