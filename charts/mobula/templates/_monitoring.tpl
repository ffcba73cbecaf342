{{/*
What the Prometheus operator scrapes: https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PodMonitor
Our agents answer /metrics at their own port, agent, and nothing at the one that KubeRay calls metrics; a real Ray head
does at that one. Which container a port is of tells them apart.
*/}}
{{- define "mobula.podmonitor" -}}
{{- $v := .root.Values -}}
{{- $isToken := eq $v.auth.mode "token" -}}
{{- if and $isToken (not $v.auth.secretName) }}{{ fail "podMonitor.enabled with auth.mode token needs auth.secretName: the name of a secret that KubeRay makes is not known before" }}{{ end -}}
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata: {{- include "mobula.object" . | nindent 2 }}
    {{- with $v.podMonitor.labels }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  selector:
    matchLabels: {app.kubernetes.io/part-of: {{ .name }}}
  podMetricsEndpoints:
    - port: agent
      path: /metrics
      {{- with $v.podMonitor.interval }}
      interval: {{ . }}
      {{- end }}
      {{- if $isToken }}
      authorization:
        credentials: {name: {{ $v.auth.secretName | quote }}, key: auth_token}
      {{- end }}
      {{- if eq $v.head.kind "ray" }}
      relabelings:
        - {action: keep, sourceLabels: [__meta_kubernetes_pod_container_name], regex: worker}
    - port: metrics
      path: /metrics
      {{- with $v.podMonitor.interval }}
      interval: {{ . }}
      {{- end }}
      relabelings:
        - {action: keep, sourceLabels: [__meta_kubernetes_pod_container_name], regex: head}
      {{- end }}
{{- end -}}
