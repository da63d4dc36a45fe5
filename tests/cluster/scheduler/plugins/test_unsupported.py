"""Pods that ask for what is not decided here are refused with the field."""

from __future__ import annotations

import json

import pytest

from apis.scheduling_pod import decode_scheduling_pod
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.plugins.unsupported import Unsupported
from cluster.scheduler.tables.shapes import PodShape, Shapes
from cluster.scheduler.tables.tables import Tables


def shape(shapes: Shapes, **spec: object) -> PodShape:
    pod = {"metadata": {"namespace": "default", "name": "p", "uid": "u"}, "spec": spec}
    return shapes.of(decode_scheduling_pod(json.dumps(pod).encode()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("resourceClaims", [{"name": "v", "resourceClaimName": "c"}]),
        ("schedulingGroup", {"podGroupName": "g"}),
        ("workloadRef", {"name": "w", "podGroup": "g"}),
    ],
)
def test_a_pod_is_refused_with_the_field_and_its_replica_without_it_is_not(
    field: str, value: object
) -> None:
    shapes, tables = Shapes(), Tables()
    asks, plain = shape(shapes, **{field: value}), shape(shapes)
    assert asks is not plain
    with pytest.raises(Refusal, match=rf"does not support spec\.{field} "):
        Unsupported().check(asks, tables)
    Unsupported().check(plain, tables)
