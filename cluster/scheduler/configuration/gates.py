"""The feature gates of the scheduler: names and defaults are upstream's.

Manifests pass one list of gates to all of Kubernetes' components, so an unknown gate is named and
ignored. An unknown gate that is spelt almost like a known one is an error, because a misspelt gate
is a feature that silently stays off.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Final, NamedTuple

from apis.errors import InputError, InputErrors
from apis.gates import OFF, ON, Gate, parse_gates, resolve_gates

GATES: Final[Mapping[str, Gate]] = {
    "CompatibleCSIStorageCapacity": OFF,
    "DisableCSIStorageCapacityInformer": OFF,
    "CompatiblePodDisruptionBudget": OFF,
    "DisablePodDisruptionBudgetInformer": OFF,
    "DisableDynamicResourceAllocationInformer": OFF,
    "ResizePod": OFF,
    "MultiQuotaTree": OFF,
    "ElasticQuotaIgnorePodOverhead": OFF,
    "ElasticQuotaIgnoreTerminatingPod": OFF,
    "ElasticQuotaImmediateIgnoreTerminatingPod": OFF,
    "ElasticQuotaGuaranteeUsage": OFF,
    "DisableDefaultQuota": OFF,
    "SupportParentQuotaSubmitPod": OFF,
    "LazyReservationRestore": OFF,
    "OmitNodeLabelsForReservation": OFF,
    "SkipReservationFitsNode": OFF,
    "DevicePluginAdaption": OFF,
    "CleanExpiredReservationAllocated": OFF,
    "SkipFilterWithNominatedPods": OFF,
    "DynamicSchedulerCheck": ON,
    "CSIStorageCapacity": ON,
    "GenericEphemeralVolume": ON,
    "PodDisruptionBudget": ON,
    "SyncBarrier": OFF,
    "CrossSchedulerNomination": OFF,
    "GangPendingPodsConditionPatch": ON,
    "EnableInlineBatchSchedule": OFF,
    "EnableBatchScheduleNodeSnapshot": ON,
    "PriorityTransformer": OFF,
    "PreemptionPolicyTransformer": OFF,
    "ReplaceResourcesTransformer": OFF,
}
WITH_EFFECT: Final = frozenset(
    {
        "CleanExpiredReservationAllocated",
        "CrossSchedulerNomination",
        "DevicePluginAdaption",
        "DisableDefaultQuota",
        "ElasticQuotaGuaranteeUsage",
        "ElasticQuotaIgnorePodOverhead",
        "ElasticQuotaIgnoreTerminatingPod",
        "ElasticQuotaImmediateIgnoreTerminatingPod",
        "MultiQuotaTree",
        "OmitNodeLabelsForReservation",
        "PreemptionPolicyTransformer",
        "PriorityTransformer",
        "ReplaceResourcesTransformer",
        "ResizePod",
    }
)
"""Gates that change what is decided or written. docs/scheduler.md says why the others do not."""
_STAGES: Final = frozenset({"AllAlpha", "AllBeta"})
_COMPONENT: Final = "kube:"
"""kube-scheduler 1.36 takes gates with the name of a component in front."""
_MISSPELT: Final = 0.85
"""Similarity from which a name is taken for a misspelt gate of ours; chosen: one wrong letter in
seven. None of the gates of Kubernetes 1.36 is as similar to one of ours."""


class SchedulerGates(NamedTuple):
    """on: every gate of ours; others: names that were set and are none of ours."""

    on: Mapping[str, bool]
    others: tuple[str, ...]


def read_gates(text: str, *, obj: str, field: str) -> SchedulerGates:
    """Return the gates that `A=true,B=false` sets over the defaults. Raises InputErrors."""
    said = {
        name.removeprefix(_COMPONENT): on
        for name, on in parse_gates(text, obj=obj, field=field).items()
    }
    lower = {name.lower(): name for name in GATES}
    ours: dict[str, bool] = {}
    others: list[str] = []
    misspelt: list[InputError] = []
    for name, on in said.items():
        if name in GATES or name in _STAGES:
            ours[name] = on
        elif close := get_close_matches(name.lower()[:64], lower, n=1, cutoff=_MISSPELT):
            misspelt.append(
                InputError(
                    obj=obj,
                    field=field,
                    value=name,
                    problem="unknown feature gate",
                    hint=f"did you mean {lower[close[0]]}?",
                )
            )
        else:
            others.append(name)
    if misspelt:
        raise InputErrors(misspelt)
    return SchedulerGates(resolve_gates(GATES, (obj, field, ours)), tuple(others))
