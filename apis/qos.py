"""QoS and priority classes, and the rules that derive them.

Three notions live side by side: Koordinator's QoS class (from the label alone), Kubernetes' own QoS
class, and the priority class (label, else the band of `spec.priority`).
docs/facts/apis.md, "Classes of a pod".
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from apis.keys import LABEL_PRIORITY_CLASS, LABEL_QOS_CLASS


class QoSClass(StrEnum):
    """Koordinator's QoS class; NONE stands for a missing or unknown label."""

    LSE = "LSE"
    LSR = "LSR"
    LS = "LS"
    BE = "BE"
    SYSTEM = "SYSTEM"
    NONE = ""


class KubeQoS(StrEnum):
    """Kubernetes' QoS class as `status.qosClass` spells it."""

    GUARANTEED = "Guaranteed"
    BURSTABLE = "Burstable"
    BESTEFFORT = "BestEffort"


class PriorityClass(StrEnum):
    """Koordinator's priority class; NONE stands for no class."""

    PROD = "koord-prod"
    MID = "koord-mid"
    BATCH = "koord-batch"
    FREE = "koord-free"
    NONE = ""


PRIORITY_BANDS: Final[Mapping[PriorityClass, tuple[int, int]]] = {
    PriorityClass.PROD: (9000, 9999),
    PriorityClass.MID: (7000, 7999),
    PriorityClass.BATCH: (5000, 5999),
    PriorityClass.FREE: (3000, 3999),
}
"""Inclusive range of `spec.priority` for each class."""


_QOS_BY_NAME: Final = {qos.value: qos for qos in QoSClass if qos}
_PRIORITY_BY_NAME: Final = {cls.value: cls for cls in PriorityClass if cls}

_QOS_OF_KUBE_QOS: Final[Mapping[KubeQoS, QoSClass]] = {
    KubeQoS.GUARANTEED: QoSClass.LSR,
    KubeQoS.BURSTABLE: QoSClass.LS,
    KubeQoS.BESTEFFORT: QoSClass.BE,
}


def qos_class(labels: Mapping[str, str]) -> QoSClass:
    """Return the class that the label names exactly; anything else is NONE."""
    return _QOS_BY_NAME.get(labels.get(LABEL_QOS_CLASS, ""), QoSClass.NONE)


def qos_class_with_default(labels: Mapping[str, str], kube_qos: KubeQoS) -> QoSClass:
    """Return the label's class, or the class that stands for the pod's Kubernetes QoS."""
    return qos_class(labels) or _QOS_OF_KUBE_QOS[kube_qos]


def priority_class_of_value(priority: int | None) -> PriorityClass:
    """Return the class whose band holds `priority`; NONE outside all bands."""
    if priority is not None:
        for cls, (low, high) in PRIORITY_BANDS.items():
            if low <= priority <= high:
                return cls
    return PriorityClass.NONE


def priority_class(labels: Mapping[str, str], priority: int | None) -> PriorityClass:
    """Return the class of the label, which wins even when unknown (NONE), else of `priority`."""
    label = labels.get(LABEL_PRIORITY_CLASS)
    if label is not None:
        return _PRIORITY_BY_NAME.get(label, PriorityClass.NONE)
    return priority_class_of_value(priority)


def priority_class_with_default(
    labels: Mapping[str, str], priority: int | None, kube_qos: KubeQoS
) -> PriorityClass:
    """Return `priority_class`, or what the pod's QoS class implies: BE is batch, others prod."""
    cls = priority_class(labels, priority)
    if cls:
        return cls
    qos = qos_class_with_default(labels, kube_qos)
    return PriorityClass.BATCH if qos is QoSClass.BE else PriorityClass.PROD
