{{/*
TensorBoard. The last rank writes the events, on a node that nobody knows before: with a store every node sends what it
has to URL/tensorboard, where it stays, and the head shows what lies there. Without one each pod shows its own, and where
tensorboardDir is on a volume that all pods share (storage.extraVolumeMounts) the head shows it as it is.
*/}}
{{- define "mobula.tensorboard.place" -}}
{{- $v := .root.Values -}}
{{- $dir := $v.tensorboardDir -}}
{{- $place := "" -}}
{{- range $v.storage.extraVolumeMounts }}{{ if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" $dir) }}{{ $place = "shared" }}{{ end }}{{ end -}}
{{- if not $place -}}
  {{- if not (hasPrefix (printf "%s/" (trimSuffix "/" $v.storage.ephemeral.mountPath)) (printf "%s/" $dir)) -}}
  {{- fail (printf "runTensorboard: tensorboardDir %s is on no volume, so no other container sees it: put it below %s or a path of storage.extraVolumeMounts" $dir $v.storage.ephemeral.mountPath) -}}
  {{- end -}}
  {{- $place = ternary "store" "pod" (not (empty (include "mobula.checkpoint.url" .root))) -}}
{{- end -}}
{{- $place -}}
{{- end -}}

{{- define "mobula.tensorboard.url" -}}
{{ trimSuffix "/" (include "mobula.checkpoint.url" .) }}/tensorboard
{{- end -}}

{{/* Which pod the Service is for. Pods that are all alike have none. */}}
{{- define "mobula.tensorboard.service" -}}
{{- if .root.Values.runTensorboard -}}
{{- if or (ne (include "mobula.tensorboard.place" .) "pod") (eq (int .root.Values.workers.replicas) 1) }}{{ .name }}-tensorboard{{ end -}}
{{- end -}}
{{- end -}}

{{/* Once a minute, and when the agent has ended, since ranks write until then. bash is there: KubeRay needs it, too. */}}
{{- define "mobula.tensorboard.upload" -}}
{{- $dir := include "mobula.quote" .Values.tensorboardDir -}}
trap 'ending=1' TERM
push() { [ -z "$(ls -A {{ $dir }} 2>/dev/null)" ] || mobula checkpoint push --plain --retry-for 50s {{ $dir }} {{ include "mobula.tensorboard.url" . | include "mobula.quote" }} >/dev/null; }
until [ "$ending" ]; do push; sleep 60 & wait $!; done
while (: </dev/tcp/127.0.0.1/52365) 2>/dev/null; do sleep 1; done
push
{{- end -}}

{{- define "mobula.tensorboard.fetch" -}}
trap 'exit 0' TERM
while :; do why=$(mobula checkpoint pull --plain {{ include "mobula.tensorboard.url" . | include "mobula.quote" }} /tensorboard 2>&1 >/dev/null) || [ $? = 66 ] || echo "$why" >&2; sleep 60 & wait $!; done
{{- end -}}

{{/* Containers of one pod; .isRay and .container as of mobula.pod. */}}
{{- define "mobula.tensorboard" -}}
{{- $v := .root.Values -}}
{{- $place := include "mobula.tensorboard.place" . -}}
{{- $isHead := eq .container "head" -}}
{{- $own := include "mobula.scratch.mount" . -}}
{{- if and (eq $place "store") (not .isRay) }}
{{ include "mobula.step" (dict "root" .root "name" "tensorboard-upload" "command" (list "/bin/bash" "-c" (include "mobula.tensorboard.upload" .root)) "mounts" $own) }}
{{- end }}
{{- if and (eq $place "store") $isHead }}
{{ include "mobula.step" (dict "root" .root "name" "tensorboard-fetch" "command" (list "/bin/bash" "-c" (include "mobula.tensorboard.fetch" .root)) "mounts" "- {name: tensorboard, mountPath: /tensorboard}") }}
{{- end }}
{{- if or $isHead (and (eq $place "pod") (not .isRay)) }}
- name: tensorboard
  image: {{ include "mobula.image" .root | quote }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  command: [tensorboard, --logdir, {{ ternary "/tensorboard" $v.tensorboardDir (eq $place "store") | quote }}, --bind_all, --port, "6006"]
  ports:
    - {containerPort: 6006, name: tensorboard}
  resources:
    requests: {cpu: 500m, memory: 2Gi}
    limits: {cpu: "1", memory: 2Gi}
  env:
    - name: POD_NAME
      valueFrom: {fieldRef: {fieldPath: metadata.name}}
  volumeMounts:
    {{- if eq $place "store" }}
    - {name: tensorboard, mountPath: /tensorboard}
    {{- else if eq $place "shared" }}
    {{- toYaml $v.storage.extraVolumeMounts | nindent 4 }}
    {{- else }}
    {{- $own | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}
