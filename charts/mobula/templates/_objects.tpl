{{/*
What stands beside the RayJob. Nobody knows its uid before it is there, so the head's agent makes it the owner of these
objects (MOBULA_RAYJOB_OWNS), and a Role lets it: of them, itself and the account that it is bound to too, so nothing
is left behind.
*/}}
{{- define "mobula.account" -}}
{{- $s := .root.Values.serviceAccount -}}
{{- if and $s.create (eq ($s.name | default "") "default") }}{{ fail "serviceAccount.create with the name default: every namespace has that account, and it would be deleted with the RayJob; serviceAccount.create: false takes it as it is" }}{{ end -}}
{{- $s.name | default (ternary .name "default" $s.create) -}}
{{- end -}}

{{/* One claim for all pods: where they can have it together. It goes with the RayJob: data preparation has none of it. */}}
{{- define "mobula.claim" -}}
{{- $e := .root.Values.storage.ephemeral -}}
{{- if and $e.storageClassName (not .root.Values.prepare.enabled) (not $e.existingClaim) (not $e.hostPath) (has "ReadWriteMany" $e.accessModes) }}{{ .name }}{{ end -}}
{{- end -}}

{{- define "mobula.files" -}}
{{- $bytes := 0 -}}
{{- range $name, $text := .root.Values.files }}{{ $bytes = add $bytes (len $name) (len $text) }}{{ end -}}
{{- if gt (int $bytes) 1048576 }}{{ fail (printf "files have %d bytes: a ConfigMap takes 1048576; larger ones belong on a volume, into the bucket or the image" (int $bytes)) }}{{ end -}}
{{- if .root.Values.files }}{{ .name }}-files{{ end -}}
{{- end -}}

{{- define "mobula.owns" -}}
{{- $owns := list -}}
{{- with include "mobula.files" . }}{{ $owns = append $owns (printf "configmaps/%s" .) }}{{ end -}}
{{- with include "mobula.claim" . }}{{ $owns = append $owns (printf "persistentvolumeclaims/%s" .) }}{{ end -}}
{{- with include "mobula.tensorboard.service" . }}{{ $owns = append $owns (printf "services/%s" .) }}{{ end -}}
{{- if .root.Values.podMonitor.enabled }}{{ $owns = append $owns (printf "monitoring.coreos.com/v1/podmonitors/%s" .name) }}{{ end -}}
{{- if .root.Values.serviceAccount.create }}{{ $owns = append $owns (printf "serviceaccounts/%s" (include "mobula.account" .)) }}{{ end -}}
{{- if .root.Values.rbac.create -}}
{{- range list "rolebindings" "roles" }}{{ $owns = append $owns (printf "rbac.authorization.k8s.io/v1/%s/%s" . $.name) }}{{ end -}}
{{- end -}}
{{- join " " $owns -}}
{{- end -}}

{{- define "mobula.object" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "mobula.labels" .root | nindent 2 }}
{{- end -}}

{{- define "mobula.objects" -}}
{{- $v := .root.Values -}}
{{- $account := include "mobula.account" . -}}
{{- if $v.serviceAccount.create }}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{- include "mobula.object" (dict "root" .root "name" $account) | nindent 2 }}
  {{- with $v.serviceAccount.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
{{- if $v.rbac.create }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {{- include "mobula.object" . | nindent 2 }}
rules:
  - apiGroups: [ray.io]
    resources: [rayjobs]
    resourceNames: [{{ .name }}]
    verbs: [get{{ if and $v.job.agentDeletes (not $v.job.deletionRules) }}, delete{{ end }}]
  {{- $verbs := "[patch, delete]" }}
  # OwnerReferencesPermissionEnforcement lets only those who may delete an object change its owner.
  {{- with include "mobula.files" . }}
  - apiGroups: [""]
    resources: [configmaps]
    resourceNames: [{{ . }}]
    verbs: {{ $verbs }}
  {{- end }}
  {{- with include "mobula.claim" . }}
  - apiGroups: [""]
    resources: [persistentvolumeclaims]
    resourceNames: [{{ . }}]
    verbs: {{ $verbs }}
  {{- end }}
  {{- with include "mobula.tensorboard.service" . }}
  - apiGroups: [""]
    resources: [services]
    resourceNames: [{{ . }}]
    verbs: {{ $verbs }}
  {{- end }}
  {{- if $v.podMonitor.enabled }}
  - apiGroups: [monitoring.coreos.com]
    resources: [podmonitors]
    resourceNames: [{{ .name }}]
    verbs: {{ $verbs }}
  {{- end }}
  {{- if $v.serviceAccount.create }}
  - apiGroups: [""]
    resources: [serviceaccounts]
    resourceNames: [{{ $account }}]
    verbs: {{ $verbs }}
  {{- end }}
  # Owners alone: other changes of these need the permissions that they would give.
  - apiGroups: [rbac.authorization.k8s.io]
    resources: [roles, rolebindings]
    resourceNames: [{{ .name }}]
    verbs: {{ $verbs }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {{- include "mobula.object" . | nindent 2 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ .name }}}
subjects:
  - {kind: ServiceAccount, name: {{ $account }}, namespace: {{ .root.Release.Namespace }}}
{{- end }}
{{- with include "mobula.files" . }}
---
apiVersion: v1
kind: ConfigMap
metadata: {{- include "mobula.object" (dict "root" $.root "name" .) | nindent 2 }}
data: {{- toYaml $v.files | nindent 2 }}
{{- end }}
{{- with include "mobula.tensorboard.service" . }}
---
apiVersion: v1
kind: Service
metadata: {{- include "mobula.object" (dict "root" $.root "name" .) | nindent 2 }}
spec:
  selector:
    app.kubernetes.io/part-of: {{ $.name }}
    ray.io/node-type: head
  ports:
    - {name: http, port: 6006, targetPort: tensorboard}
{{- end }}
{{- if $v.podMonitor.enabled }}
---
{{ include "mobula.podmonitor" . }}
{{- end }}
{{- with include "mobula.claim" . }}
{{- $e := $v.storage.ephemeral }}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {{- include "mobula.object" (dict "root" $.root "name" .) | nindent 2 }}
spec:
  storageClassName: {{ $e.storageClassName | quote }}
  accessModes: {{- toYaml $e.accessModes | nindent 4 }}
  resources: {requests: {storage: {{ $e.quantity | quote }}}}
{{- end }}
{{- end -}}
