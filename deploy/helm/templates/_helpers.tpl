{{/* Of an object with pods, and of its pods. "." is its name. */}}
{{- define "kvpool.labels" -}}
{app.kubernetes.io/name: kvpool-{{ . }}, app.kubernetes.io/component: {{ . }}, app.kubernetes.io/part-of: kvpool}
{{- end }}

{{- define "kvpool.selector" -}}
{app.kubernetes.io/name: kvpool-{{ . }}}
{{- end }}

{{/* (list $ NAME): an image of deploy/Dockerfile. */}}
{{- define "kvpool.image" -}}
{{- $images := (index . 0).Values.images -}}
{{- $name := index . 1 -}}
{{- $tag := $images.tag | default (index . 0).Chart.AppVersion -}}
{{ $images.registry }}/kvpool-{{ $name }}{{ with index $images.digests $name }}@{{ . }}{{ else }}:{{ $tag }}{{ end }}
{{- end }}

{{- define "kvpool.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- end }}

{{- define "kvpool.user" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kvpool.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Of a shard, by its CPUs: three quarters of them, 8 at most; empty: one, which is every server's default. */}}
{{- define "kvpool.ioThreads" -}}
{{- $cpu := .Values.valkey.cpu -}}
{{- $milli := hasSuffix "m" $cpu | ternary (trimSuffix "m" $cpu | int) (mul 1000 (int $cpu)) -}}
{{- $threads := min 8 (div (mul 3 $milli) 4000) -}}
{{- if gt $threads 1 }}{{ $threads }}{{ end -}}
{{- end }}

{{- define "kvpool.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector: {matchLabels: {{ include "kvpool.selector" . }}}
{{- end }}

{{- define "kvpool.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ . }}
  labels: {app.kubernetes.io/part-of: kvpool}
spec:
  maxUnavailable: 1
  selector: {matchLabels: {{ include "kvpool.selector" . }}}
{{- end }}

{{/* The URL of the fleet's pool, for a container: not an argument, since every user of the node reads those. */}}
{{- define "kvpool.pool" -}}
{{- if or .Values.secure (eq .Values.pool "secret") -}}
valueFrom: {secretKeyRef: {name: kvpool-pool, key: url}}
{{- else -}}
valueFrom: {configMapKeyRef: {name: kvpool-pool, key: url}}
{{- end }}
{{- end }}

{{/* What the init container of the front makes of deploy/envoy.yaml. */}}
{{- define "kvpool.endpoints" -}}
# deploy/envoy.yaml names two workers and two indexes; here are the headless Services, whose names stand for all ready pods.
s/address: worker-1, port_value: 8000/address: worker, port_value: 8000/
/address: worker-2, port_value: 8000/d
s/address: index-1, port_value: 50052/address: index-pods, port_value: 50052/
/address: index-2, port_value: 50052/d
{{- end }}
