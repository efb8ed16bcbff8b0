{{- define "modelpool.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "modelpool.labels" -}}
app.kubernetes.io/name: modelpool
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "modelpool.image" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end -}}

{{- define "modelpool.resources" -}}
limits: {{- toYaml . | nindent 2 }}
requests: {{- toYaml . | nindent 2 }}
{{- end -}}

{{- define "modelpool.claim" -}}
{{- $claim := index .root.Values.persistence .volume -}}
{{- $claim.existingClaim | default (printf "%s-%s" (include "modelpool.name" .root) .volume) -}}
{{- end -}}

{{/* What every process of the head sees: the configuration, the state, the weights, and Ray's sockets and memory. */}}
{{- define "modelpool.headMounts" -}}
- { name: config, mountPath: /etc/modelpool, readOnly: true }
- { name: state, mountPath: /state }
- { name: models, mountPath: /models, readOnly: true }
- { name: ray, mountPath: /tmp/ray }
- { name: shm, mountPath: /dev/shm }
{{- end -}}

{{/* Ray's token, for processes that KubeRay does not know. */}}
{{- define "modelpool.auth" -}}
{{- if .Values.auth.enabled -}}
- { name: RAY_AUTH_MODE, value: token }
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef: { name: {{ include "modelpool.name" . }}, key: auth_token }
{{- else -}}
- { name: RAY_AUTH_MODE, value: disabled }
{{- end -}}
{{- end -}}

{{/* The complete configuration. */}}
{{- define "modelpool.config" -}}
{{ .Values.config | trim }}
{{- if .Values.serve.enabled }}
{{- if not .Values.serve.keys }}
{{- fail "serve.keys: found none, expected a user and a key: the HTTP interfaces are reached by other machines" }}
{{- end }}

[serve]
host = "0.0.0.0"
port = {{ int .Values.serve.port }}
folder = "/state/outputs"
{{- with .Values.serve.extra }}
{{ . | trim }}
{{- end }}

[serve.keys]
{{- range $user, $key := .Values.serve.keys }}
{{ $user | quote }} = {{ $key | quote }}
{{- end }}
{{- end }}
{{- if .Values.autoscaling.enabled }}
{{- range .Values.groups }}

[groups.{{ .name }}]
gpu_type = {{ .gpuType | quote }}
gpus_per_node = {{ int .gpus }}
min = {{ int .min }}
max = {{ int .max }}
price_per_hour = {{ .pricePerHour }}
spot = {{ .spot | default false }}
labels = { modelpool-group = {{ .name | quote }} }
start_seconds = {{ int .startSeconds }}
{{- end }}
{{- end }}
{{- end -}}
