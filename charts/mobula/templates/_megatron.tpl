{{/* .arguments as words, as JSON: templates of .root filled in, "--flag value" split, "--flag=value" too. */}}
{{- define "mobula.split" -}}
{{- $words := list -}}
{{- $root := .root -}}
{{- $what := .what -}}
{{- range .arguments -}}
  {{- if kindIs "slice" . -}}
    {{- range . }}{{ $words = append $words (tpl (toString .) $root) }}{{ end -}}
  {{- else -}}
    {{- $text := tpl . $root -}}
    {{- if regexMatch "[\"'`$\\\\]" $text -}}
    {{- fail (printf "%s: %s: no shell reads it; write a list of words, [--flag, \"a value\"]" $what $text) -}}
    {{- end -}}
    {{- $words = concat $words (regexSplit "\\s+" (trim $text) -1) -}}
  {{- end -}}
{{- end -}}
{{- $split := list -}}
{{- range $words -}}
  {{- if regexMatch "^--[A-Za-z0-9_-]+=" . -}}
  {{- $pair := splitn "=" 2 . -}}
  {{- $split = append (append $split $pair._0) $pair._1 -}}
  {{- else }}{{ $split = append $split . }}{{ end -}}
{{- end -}}
{{- dict "words" $split | toJson -}}
{{- end -}}

{{/*
megatronArguments as words, as JSON: templates filled in, split, what the values say about data and base model added, and
what lies in the bucket named by its URL. save: the directory of --save; loads: whether --load is the base model; goesOn: whether
it is the directory of --save.
*/}}
{{- define "mobula.megatron" -}}
{{- $v := .Values -}}
{{- $words := (include "mobula.split" (dict "root" $ "arguments" $v.megatronArguments "what" "megatronArguments") | fromJson).words -}}
{{- $scratch := "/local_resources" -}}
{{- $has := dict -}}
{{- $flag := "" -}}
{{- range $words -}}
  {{- if hasPrefix "--" . }}{{ $flag = . }}{{ $_ := set $has $flag "" }}{{ else }}{{ $_ := set $has $flag . }}{{ end -}}
{{- end -}}
{{- if and $v.remoteDataNamePrefix (not $v.remoteDataDirPath) }}{{ fail "remoteDataNamePrefix is set and remoteDataDirPath is not: name the bucket and the folder of the data" }}{{ end -}}
{{- if not (or (hasKey $has "--data-path") (hasKey $has "--train-data-path") (hasKey $has "--mock-data")) -}}
  {{- if $v.remoteDataNamePrefix -}}
  {{- $words = concat $words (list "--data-path" (printf "%s/data/%s" $scratch $v.remoteDataNamePrefix)) -}}
  {{- else -}}
  {{- $words = append $words "--mock-data" -}}
  {{- end -}}
{{- end -}}
{{- if and $v.runTensorboard (not (hasKey $has "--tensorboard-dir")) -}}
{{- $words = concat $words (list "--tensorboard-dir" $v.tensorboardDir) -}}
{{- end -}}
{{- if and $v.runTensorboard (hasKey $has "--tensorboard-dir") (ne (trimSuffix "/" (get $has "--tensorboard-dir")) (trimSuffix "/" $v.tensorboardDir)) -}}
{{- fail (printf "runTensorboard shows tensorboardDir %s, and --tensorboard-dir is %s: say the same directory" $v.tensorboardDir (get $has "--tensorboard-dir")) -}}
{{- end -}}
{{- if not (hasKey $has "--load") -}}
  {{- if $v.remoteBaseModelPath -}}
  {{- $words = concat $words (list "--load" (printf "%s/basemodel" $scratch)) -}}
  {{- else if not (hasKey $has "--pretrained-checkpoint") -}}
  {{- /* Nothing is loaded whose arguments could be used. */ -}}
  {{- $words = without $words "--use-checkpoint-args" -}}
  {{- end -}}
{{- end -}}
{{- $out := list -}}
{{- $loads := false -}}
{{- $flag = "" -}}
{{- range $words -}}
  {{- $word := . -}}
  {{- if hasPrefix "--" . }}{{ $flag = . }}{{ end -}}
  {{- if and (regexMatch "^--((train|valid|test)-)?data-path$" $flag) (hasPrefix (printf "%s/data/" $scratch) .) -}}
    {{- if not $v.remoteDataDirPath }}{{ fail (printf "%s %s: remoteDataDirPath is empty: say which folder of a bucket the data is in" $flag .) }}{{ end -}}
    {{- $word = printf "%s/%s" (include "mobula.url" $v.remoteDataDirPath) (trimPrefix (printf "%s/data/" $scratch) .) -}}
  {{- else if and (eq $flag "--tokenizer-model") (eq . (printf "%s/tokenizer" $scratch)) -}}
    {{- if not $v.remoteTokenizerPath }}{{ fail (printf "%s %s: remoteTokenizerPath is empty: say which folder of a bucket the tokenizer is in" $flag .) }}{{ end -}}
    {{- $word = include "mobula.url" $v.remoteTokenizerPath -}}
  {{- else if and (has $flag (list "--load" "--pretrained-checkpoint")) (eq . (printf "%s/basemodel" $scratch)) -}}
    {{- if not $v.remoteBaseModelPath }}{{ fail (printf "%s %s: remoteBaseModelPath is empty: say which folder of a bucket the base model is in" $flag .) }}{{ end -}}
    {{- $word = include "mobula.url" $v.remoteBaseModelPath -}}
    {{- if eq $flag "--load" }}{{ $loads = true }}{{ end -}}
  {{- end -}}
  {{- $out = append $out $word -}}
{{- end -}}
{{- include "mobula.megatron.sizes" (dict "v" $v "has" $has) -}}
{{- $save := get $has "--save" -}}
{{- dict "words" $out "save" $save "loads" $loads "goesOn" (and $save (eq (trimSuffix "/" (get $has "--load")) (trimSuffix "/" $save))) | toJson -}}
{{- end -}}

{{/* A bucket's path of the values as a URL. Google's buckets speak S3, too. */}}
{{- define "mobula.url" -}}
{{- $path := trimSuffix "/" (toString .) -}}
{{- if hasPrefix "gs://" $path }}s3://{{ trimPrefix "gs://" $path }}{{ else if contains "://" $path }}{{ $path }}{{ else }}s3://{{ $path }}{{ end -}}
{{- end -}}

{{/* Which needs their address: the one in the values is of all buckets. */}}
{{- define "mobula.google" -}}
{{- $v := .Values -}}
{{- $host := get (include "mobula.env.all" . | fromJson) "BUCKET_STORAGE_HOST" -}}
{{- range list "remoteBaseModelPath" "remoteCheckpointsPath" "remoteDataDirPath" "remoteTokenizerPath" -}}
{{- $path := get $v . | default "" -}}
{{- if and (hasPrefix "gs://" $path) (ne (toString $host) "https://storage.googleapis.com") }}{{ fail (printf "%s %s: Google's buckets need logistics.envVars.BUCKET_STORAGE_HOST https://storage.googleapis.com, and an HMAC key in the secret" . $path) }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* What Megatron-LM would find out only after all pods have started. */}}
{{- define "mobula.megatron.sizes" -}}
{{- $n := dict -}}
{{- range $flag, $least := dict "--tensor-model-parallel-size" "1" "--pipeline-model-parallel-size" "1" "--context-parallel-size" "1" "--micro-batch-size" "0" "--global-batch-size" "0" -}}
  {{- if hasKey $.has $flag -}}
    {{- if not (regexMatch "^[1-9][0-9]{0,8}$" (get $.has $flag)) }}{{ fail (printf "megatronArguments: %s %s: it takes a whole number from 1 on" $flag (get $.has $flag)) }}{{ end -}}
    {{- $_ := set $n $flag (atoi (get $.has $flag)) -}}
  {{- else -}}
    {{- $_ := set $n $flag (atoi $least) -}}
  {{- end -}}
{{- end -}}
{{- $ranks := include "mobula.ranks" (dict "Values" .v) | int -}}
{{- $world := mul (int .v.workers.replicas) $ranks -}}
{{- $tp := get $n "--tensor-model-parallel-size" -}}
{{- $pp := get $n "--pipeline-model-parallel-size" -}}
{{- $cp := get $n "--context-parallel-size" -}}
{{- $model := mul $tp $pp $cp -}}
{{- if mod $world $model -}}
{{- fail (printf "%d nodes with %d ranks each are %d ranks, which tensor %d x pipeline %d x context %d parallel = %d does not divide" (int .v.workers.replicas) $ranks $world $tp $pp $cp $model) -}}
{{- end -}}
{{- $data := div $world $model -}}
{{- $micro := get $n "--micro-batch-size" -}}
{{- $global := get $n "--global-batch-size" -}}
{{- if and $micro $global -}}
{{- if mod $global (mul $micro $data) -}}
{{- fail (printf "--global-batch-size %d is no multiple of %d, --micro-batch-size %d x %d ranks that are data parallel" $global (mul $micro $data) $micro $data) -}}
{{- end -}}
{{- end -}}
{{- end -}}
