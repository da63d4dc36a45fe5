"""Pods for the tests of prediction."""

from __future__ import annotations

from apis.keys import LABEL_PRIORITY_CLASS, LABEL_QOS_CLASS
from apis.qos import KubeQoS, PriorityClass, QoSClass
from hooks.subject import Amounts, ContainerSpec, Pod, make_pod

GIB = 2**30
HOUR = 3600.0
NOW = 1_700_000_000.0


def pod(
    uid: str,
    *,
    priority: PriorityClass = PriorityClass.PROD,
    cpu_milli: int = 1000,
    memory_bytes: int = GIB,
    age_s: float = 72 * HOUR,
    phase: str = "Running",
    qos: QoSClass = QoSClass.LS,
) -> Pod:
    amounts = Amounts(cpu_request_milli=cpu_milli, memory_request_bytes=memory_bytes)
    return make_pod(
        namespace="default",
        name=uid,
        uid=uid,
        labels={LABEL_PRIORITY_CLASS: priority.value, LABEL_QOS_CLASS: qos.value},
        annotations={},
        kube_qos=KubeQoS.BURSTABLE,
        phase=phase,
        created_at=NOW - age_s,
        specs=(ContainerSpec("main", amounts=amounts),),
    )
