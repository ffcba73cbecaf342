"""The fields of a PodMonitor that the chart uses, as its definition has them: those of the Prometheus operator 0.91,
https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PodMonitor and
example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml of its repository. All others are refused here."""

DURATION = "^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?(([0-9]+)ms)?)$"
TEXT = {"type": "string"}


def fields(**properties):
    return {"type": "object", "properties": properties}


ENDPOINT = fields(
    port=TEXT, path=TEXT, interval={"type": "string", "pattern": DURATION},
    authorization=fields(type=TEXT, credentials={**fields(name=TEXT, key=TEXT), "required": ["key"]}),
    relabelings={"type": "array", "items": fields(
        action={"type": "string", "enum": ["replace", "keep", "drop"]}, regex=TEXT,
        sourceLabels={"type": "array", "items": TEXT})})

SCHEMA = {**fields(
    apiVersion=TEXT, kind=TEXT, metadata={"type": "object"},
    spec={**fields(
        selector=fields(matchLabels={"type": "object", "additionalProperties": TEXT}),
        podMetricsEndpoints={"type": "array", "items": ENDPOINT}), "required": ["selector"]}), "required": ["spec"]}

CRD = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced",
             "names": {"kind": "PodMonitor", "listKind": "PodMonitorList", "plural": "podmonitors", "singular": "podmonitor"},
             "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": SCHEMA}}]}}
