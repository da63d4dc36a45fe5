"""Classes of a pod: from its labels, from the band of its priority, from its Kubernetes QoS."""

from __future__ import annotations

import pytest

from apis.keys import LABEL_PRIORITY_CLASS, LABEL_QOS_CLASS
from apis.qos import (
    KubeQoS,
    PriorityClass,
    QoSClass,
    priority_class,
    priority_class_of_value,
    priority_class_with_default,
    qos_class,
    qos_class_with_default,
)


@pytest.mark.parametrize(
    ("low", "high", "cls"),
    [
        (9000, 9999, PriorityClass.PROD),
        (7000, 7999, PriorityClass.MID),
        (5000, 5999, PriorityClass.BATCH),
        (3000, 3999, PriorityClass.FREE),
    ],
)
def test_a_band_holds_both_its_edges_and_nothing_beside_them(
    low: int, high: int, cls: PriorityClass
) -> None:
    assert priority_class_of_value(low) is priority_class_of_value(high) is cls
    assert priority_class_of_value(low - 1) is PriorityClass.NONE
    assert priority_class_of_value(high + 1) is PriorityClass.NONE


@pytest.mark.parametrize("priority", [None, 0, -1, 2999, 10000, 2_000_001_000])
def test_priorities_outside_of_the_bands_have_no_class(priority: int | None) -> None:
    assert priority_class_of_value(priority) is PriorityClass.NONE


def test_the_label_wins_over_the_priority_even_when_it_is_unknown() -> None:
    assert priority_class({LABEL_PRIORITY_CLASS: "koord-mid"}, 9000) is PriorityClass.MID
    assert priority_class({LABEL_PRIORITY_CLASS: "gold"}, 9000) is PriorityClass.NONE
    assert priority_class({LABEL_PRIORITY_CLASS: ""}, 9000) is PriorityClass.NONE
    assert priority_class({}, 9000) is PriorityClass.PROD


@pytest.mark.parametrize(
    ("kube_qos", "qos", "cls"),
    [
        (KubeQoS.GUARANTEED, QoSClass.LSR, PriorityClass.PROD),
        (KubeQoS.BURSTABLE, QoSClass.LS, PriorityClass.PROD),
        (KubeQoS.BESTEFFORT, QoSClass.BE, PriorityClass.BATCH),
    ],
)
def test_without_labels_the_kubernetes_qos_decides(
    kube_qos: KubeQoS, qos: QoSClass, cls: PriorityClass
) -> None:
    assert qos_class({}) is QoSClass.NONE
    assert qos_class_with_default({}, kube_qos) is qos
    assert priority_class_with_default({}, None, kube_qos) is cls
    assert qos_class_with_default({LABEL_QOS_CLASS: "LSE"}, kube_qos) is QoSClass.LSE
    assert qos_class_with_default({LABEL_QOS_CLASS: "lse"}, kube_qos) is qos
