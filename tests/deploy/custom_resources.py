"""The shape of the custom resources that deploy/kubernetes has, as JSON schemas of the fields that are used there.

Kubernetes' own schemas do not have these kinds. A field that is misspelled, misplaced or of another type is found; a
rule that an operator has beyond that is not.

Source:
    The custom resource definitions of the Prometheus Operator (monitoring.coreos.com/v1) and of KEDA
    (keda.sh/v1alpha1).
"""

from typing import Any

Schema = dict[str, Any]

_DURATION = {"type": "string", "pattern": "^(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?$"}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _resource(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object(["name", "namespace"], name={"type": "string"}, namespace={"type": "string"}, labels=_TEXTS)
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


_POD_MONITOR = _object(
    ["selector", "podMetricsEndpoints"],
    jobLabel={"type": "string"},
    selector=_object(["matchLabels"], matchLabels=_TEXTS),
    podMetricsEndpoints=_list(_object(["port"], port={"type": "string"}, interval=_DURATION, path={"type": "string"})),
)

_RECORDING_RULE = _object(["record", "expr"], record={"type": "string"}, expr={"type": "string"}, labels=_TEXTS)
_ALERTING_RULE = _object(
    ["alert", "expr"],
    alert={"type": "string"},
    expr={"type": "string"},
    **{"for": _DURATION},
    keep_firing_for=_DURATION,
    labels=_TEXTS,
    annotations=_TEXTS,
)
_PROMETHEUS_RULE = _object(
    ["groups"],
    groups=_list(
        _object(
            ["name", "rules"],
            name={"type": "string"},
            interval=_DURATION,
            rules=_list({"oneOf": [_RECORDING_RULE, _ALERTING_RULE]}),
        )
    ),
)

_SCALING_RULES = _object(
    [],
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    selectPolicy={"enum": ["Max", "Min", "Disabled"]},
    policies=_list(
        _object(
            ["type", "value", "periodSeconds"],
            type={"enum": ["Pods", "Percent"]},
            value={"type": "integer", "minimum": 1},
            periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
        )
    ),
)
_SCALED_OBJECT = _object(
    ["scaleTargetRef", "triggers"],
    scaleTargetRef=_object(["name"], apiVersion={"type": "string"}, kind={"type": "string"}, name={"type": "string"}),
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    pollingInterval=_COUNT,
    cooldownPeriod=_COUNT,
    fallback=_object(["failureThreshold", "replicas"], failureThreshold=_COUNT, replicas=_COUNT),
    advanced=_object(
        [],
        horizontalPodAutoscalerConfig=_object(
            [], behavior=_object([], scaleUp=_SCALING_RULES, scaleDown=_SCALING_RULES)
        ),
    ),
    triggers=_list(
        _object(
            ["type", "metadata"],
            type={"const": "prometheus"},
            metricType={"enum": ["AverageValue", "Value"]},
            metadata=_object(
                ["serverAddress", "query", "threshold"],
                **{name: {"type": "string"} for name in ("serverAddress", "query", "threshold", "activationThreshold")},
            ),
        )
    ),
)

SCHEMAS = {
    "PodMonitor": _resource("monitoring.coreos.com/v1", "PodMonitor", _POD_MONITOR),
    "PrometheusRule": _resource("monitoring.coreos.com/v1", "PrometheusRule", _PROMETHEUS_RULE),
    "ScaledObject": _resource("keda.sh/v1alpha1", "ScaledObject", _SCALED_OBJECT),
}
