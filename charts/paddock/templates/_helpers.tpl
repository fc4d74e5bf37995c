{{- define "paddock.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "paddock.fullname" -}}
{{- $name := include "paddock.name" . }}
{{- $unique := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- .Values.fullnameOverride | default $unique | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Cluster-scoped objects carry the namespace, so that one release per namespace can live in one cluster. */}}
{{- define "paddock.clusterName" -}}
{{ include "paddock.fullname" . }}-{{ .Release.Namespace }}
{{- end }}

{{- define "paddock.selectorLabels" -}}
app.kubernetes.io/name: {{ include "paddock.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "paddock.labels" -}}
{{ include "paddock.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "paddock.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "paddock.subjects" -}}
subjects:
  - kind: ServiceAccount
    name: {{ .Values.serviceAccount.name | quote }}
    namespace: {{ .Release.Namespace }}
{{- end }}
