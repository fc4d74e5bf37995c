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

{{/* Not the operator's name: its Service, Deployment and policies select by that. */}}
{{- define "paddock.devicePluginSelectorLabels" -}}
app.kubernetes.io/name: {{ include "paddock.name" . | trunc 49 | trimSuffix "-" }}-device-plugin
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "paddock.devicePluginLabels" -}}
{{ merge (include "paddock.devicePluginSelectorLabels" . | fromYaml) (include "paddock.labels" . | fromYaml) | toYaml }}
{{- end }}

{{- define "paddock.image" -}}
{{- include "paddock.imageOf" (list .Values.image .) }}
{{- end }}

{{- define "paddock.imageOf" -}}
{{- $root := index . 1 }}
{{- with index . 0 -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $root.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{- define "paddock.subjects" -}}
subjects:
  - kind: ServiceAccount
    name: {{ .Values.serviceAccount.name | quote }}
    namespace: {{ .Release.Namespace }}
{{- end }}
