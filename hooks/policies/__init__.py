"""The built-in policies, one file each. `BUILTIN` lists them for the daemon and the tools."""

from __future__ import annotations

from typing import Final

from hooks.policies import (
    batch_resource,
    blkio,
    core_sched,
    cpu_normalization,
    cpuset_allocator,
    gpu_env,
    group_identity,
    memory_qos,
    oom_score_adj,
    rdma_device,
    resctrl_class,
    resctrl_pod,
    system_config,
)
from hooks.policy import Policy

BUILTIN: Final[tuple[Policy, ...]] = (
    batch_resource.POLICY,
    blkio.POLICY,
    cpu_normalization.POLICY,
    cpuset_allocator.POLICY,
    core_sched.POLICY,
    gpu_env.POLICY,
    group_identity.POLICY,
    memory_qos.POLICY,
    oom_score_adj.POLICY,
    rdma_device.POLICY,
    resctrl_class.POLICY,
    resctrl_pod.POLICY,
    system_config.POLICY,
)
