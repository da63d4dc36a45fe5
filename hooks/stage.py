"""The moments at which a decision is made, and the labels by which their durations are counted."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """When a decision is made; upstream's stage names, and the reconciler."""

    RUN_POD_SANDBOX = "PreRunPodSandbox"
    CREATE_CONTAINER = "PreCreateContainer"
    UPDATE_CONTAINER = "PreUpdateContainerResources"
    SYNCHRONIZE = "Synchronize"
    RECONCILE = "Reconcile"


TimingKey = tuple[str, str, bool]
"""Of a policy at a stage: policy, stage, succeeded."""

RepairKey = tuple[str, str, bool]
"""Of a policy in the reconciler: level, resource, succeeded."""
