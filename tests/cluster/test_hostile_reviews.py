"""Reviews that no API server sends: they are refused and cause no internal error."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.core import Pod
from apis.slo_config import SLOConfig
from cluster.gates import parse_gates
from cluster.metrics import ManagerMetrics
from cluster.quota_tree import QuotaTree
from cluster.webhook.binding import BindingAdmission, BindingRules
from cluster.webhook.configmap import ConfigMapAdmission
from cluster.webhook.elastic_quota import QuotaAdmission, by_quota, unlabelled
from cluster.webhook.node import NodeValidation, mutate_node_status
from cluster.webhook.reservation import ReservationAdmission
from kube.resources import PODS
from kube.webhook import Handler, answer_review
from tests.cluster.admission import admission, filled

PROFILE = {
    "metadata": {"name": "batch"},
    "spec": {
        "labels": {"a": "b"},
        "labelKeysMapping": {"x": "y"},
        "annotations": {"c": "d"},
        "qosClass": "BE",
        "priorityClassName": "koord-batch",
        "schedulerName": "koord-scheduler",
        "patch": {"spec": {"containers": [{"name": "main", "image": "i"}]}},
    },
}
TREE_PROFILE = {
    "metadata": {
        "name": "t",
        "namespace": "default",
        "labels": {"quota.scheduling.koordinator.sh/tree-id": "t"},
    },
    "spec": {"nodeSelector": {"matchLabels": {"pool": "x"}}},
}
QUOTA = {
    "metadata": {
        "name": "team",
        "namespace": "default",
        "labels": {
            "quota.scheduling.koordinator.sh/tree-id": "t",
            "quota.scheduling.koordinator.sh/parent": "koordinator-root-quota",
        },
        "annotations": {"quota.scheduling.koordinator.sh/shared-weight": '{"cpu":"1"}'},
    },
    "spec": {"min": {"cpu": "1"}, "max": {"cpu": "2"}},
}
POD = {
    "metadata": {
        "name": "web",
        "labels": {"quota.scheduling.koordinator.sh/name": "team"},
        "annotations": {"node.koordinator.sh/extended-resource-spec": '{"containers":{}}'},
    },
    "spec": {
        "initContainers": [{"name": "init", "resources": {"limits": {"memory": "1Gi"}}}],
        "containers": [
            {
                "name": "main",
                "image": "i",
                "resources": {
                    "requests": {"cpu": "500m", "memory": "1Gi", "koordinator.sh/gpu": "100"},
                    "limits": {"cpu": 1, "memory": "1Gi"},
                },
            }
        ],
        "overhead": {"cpu": "10m"},
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "k"}]}]
                }
            }
        },
        "priority": 5000,
    },
}
NODE = {
    "metadata": {
        "name": "n1",
        "labels": {"pool": "x"},
        "annotations": {
            "node.koordinator.sh/resource-amplification-ratio": '{"cpu":2}',
            "node.koordinator.sh/raw-allocatable": '{"cpu":"1"}',
        },
    },
    "status": {"allocatable": {"cpu": "2", "memory": "1Gi"}},
}
RESERVATION = {
    "metadata": {"name": "r", "labels": {"a": "b"}},
    "spec": {"template": {"metadata": {"namespace": "ml"}, "spec": {"containers": []}}},
}
CONFIG = {
    "metadata": {"name": "slo-controller-config", "namespace": "default"},
    "data": {"colocation-config": '{"enable":true}'},
}


def handlers() -> dict[str, tuple[str, str, dict[str, Any], Handler]]:
    """Return title -> (resource, kind, a good object, the handler)."""
    gates = "MultiQuotaTree=true,ValidatePodDeviceResource=true,EnablePodEnhancedValidator=true"
    pods = admission(profiles=[PROFILE], quotas=[QUOTA], quota_profiles=[TREE_PROFILE], gates=gates)
    stored = filled(PODS, Pod)
    quotas = QuotaAdmission(
        lambda: QuotaTree(()),
        stored.index(by_quota),
        stored.index(unlabelled),
        parse_gates(""),
        ManagerMetrics(),
    )
    config = ConfigMapAdmission(
        namespace="default", name="slo-controller-config", nodes=lambda: (), names_required=False
    )
    binding = BindingAdmission(BindingRules(user_names=("x",)), stored, lambda _: None)
    return {
        "pods are mutated": ("pods", "Pod", POD, pods.mutate),
        "pods are validated": ("pods", "Pod", POD, pods.validate),
        "quotas are mutated": ("elasticquotas", "ElasticQuota", QUOTA, quotas.mutate),
        "quotas are validated": ("elasticquotas", "ElasticQuota", QUOTA, quotas.validate),
        "nodes are mutated": ("nodes/status", "Node", NODE, mutate_node_status),
        "nodes are validated": ("nodes", "Node", NODE, NodeValidation(SLOConfig).validate),
        "reservations": (
            "reservations",
            "Reservation",
            RESERVATION,
            ReservationAdmission(pods.caches).mutate,
        ),
        "config maps": ("configmaps", "ConfigMap", CONFIG, config.validate),
        "bindings": ("pods/binding", "Binding", {"metadata": {"name": "web"}}, binding.validate),
    }


HANDLERS = handlers()


def reviewed(title: str, new: bytes, old: bytes = b"null", operation: str = "CREATE") -> int:
    """Return 200 for an allowed review, otherwise the code of the refusal or of HTTP."""
    resource, kind, _, handler = HANDLERS[title]
    name, _, sub = resource.partition("/")
    head = {
        "uid": "u",
        "operation": operation,
        "kind": {"kind": kind},
        "resource": {"resource": name},
        "subResource": sub,
        "namespace": "default",
        "name": "slo-controller-config" if kind == "ConfigMap" else "web",
    }
    request = msgspec.json.encode(head)[:-1] + b',"object":' + new + b',"oldObject":' + old + b"}"
    answer = answer_review(
        b'{"apiVersion":"admission.k8s.io/v1","request":' + request + b"}", handler
    )
    if answer.status != 200:
        return answer.status
    response = msgspec.json.decode(answer.body)["response"]
    return 200 if response["allowed"] else int(response["status"]["code"])


@pytest.mark.parametrize("title", HANDLERS)
def test_a_valid_object_is_reviewed(title: str) -> None:
    good = msgspec.json.encode(HANDLERS[title][2])
    assert reviewed(title, good) == 200
    assert reviewed(title, good, good, "UPDATE") == 200


DEEP = b'{"a":' * 600 + b"1" + b"}" * 600
BAD: dict[str, bytes] = {
    "a list": b"[]",
    "a text": b'"x"',
    "nothing": b"null",
    "deep lists": b"[" * 600 + b"]" * 600,
    "deep objects": DEEP,
    "a deep member": b'{"metadata":{"name":"web"},"spec":' + DEEP + b',"status":' + DEEP + b"}",
    "bytes that are not UTF-8": b'{"metadata":{"name":"\xff"}}',
    "half a surrogate pair": b'{"metadata":{"name":"\\ud800"}}',
    "metadata twice, the last a list": b'{"metadata":{"name":"web"},"metadata":[]}',
    "a number out of range": b'{"metadata":{"generation":1e999}}',
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("title", ["pods are mutated", "quotas are mutated", "pods are validated"])
def test_a_bad_object_is_refused(title: str, bad: str) -> None:
    assert reviewed(title, BAD[bad]) == 400


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("title", HANDLERS)
def test_an_invalid_object_causes_no_internal_error(title: str, bad: str) -> None:
    good = msgspec.json.encode(HANDLERS[title][2])
    for operation in ("CREATE", "UPDATE", "DELETE"):
        assert reviewed(title, BAD[bad], good, operation) in (200, 400)
        assert reviewed(title, good, BAD[bad], operation) in (200, 400)


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "x", "1Gi", "-1", "9" * 400, "1e9999", "{", "[]", "null", "\x00"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every member."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, member in value.items():
            found += places(member, (*path, key))
    elif isinstance(value, list):
        for index, member in enumerate(value):
            found += places(member, (*path, index))
    return found


@settings(max_examples=40)
@given(st.data())
@pytest.mark.parametrize("title", HANDLERS)
def test_no_value_of_any_member_causes_an_internal_error(title: str, data: st.DataObject) -> None:
    good = HANDLERS[title][2]
    odd = copy.deepcopy(good)
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(places(odd)))
        inside: Any = odd
        for step in path[:-1]:
            inside = inside[step]
        inside[path[-1]] = data.draw(ODD)
    old = data.draw(st.sampled_from([good, odd, None]))
    operation = data.draw(st.sampled_from(["CREATE", "UPDATE", "DELETE"]))
    code = reviewed(title, msgspec.json.encode(odd), msgspec.json.encode(old), operation)
    # 403: a binding by a stranger.
    assert code in (200, 400, 403)


@pytest.mark.parametrize(
    "body",
    [
        b'{"apiVersion":"x"}',
        b'{"request":null}',
        b'{"request":[]}',
        b'{"request":{"uid":1}}',
        b'{"request":{"uid":"u","object":' + b"[" * 5000 + b"]" * 5000 + b"}}",
        b'{"request":{"uid":"\xff"}}',
        b'\xef\xbb\xbf{"request":{"uid":"u"}}',
        b'{"request":{"uid":"u"}} more',
    ],
)
def test_what_is_no_review_gets_400(body: bytes) -> None:
    assert answer_review(body, HANDLERS["pods are mutated"][3]).status == 400
