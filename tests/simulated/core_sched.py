"""Core scheduling: cookies on tasks, through the calls that prctl(PR_SCHED_CORE) offers."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from tests.simulated.profiles import Feature
from tests.simulated.tree import Task
from tests.simulated.values import refuse

if TYPE_CHECKING:
    from tests.simulated.kernel import SimulatedKernel

# The kernel's ids are hashed addresses: unique while in use, in no order.
_COOKIES = count(0xFFFF_8000_0001, 0x9E3779B1)


@dataclass
class CoreScheduling:
    """The machine's core scheduling; absent kernels answer EINVAL, no SMT is ENODEV."""

    kernel: SimulatedKernel

    def _check(self) -> None:
        profile = self.kernel.profile
        if not profile.has(Feature.CORE_SCHED):
            refuse(errno.EINVAL, "CONFIG_SCHED_CORE is not set")
        if profile.has(Feature.ALIBABA) and not self.kernel.sysctls["kernel.sched_core"]:
            refuse(errno.EINVAL, "kernel.sched_core is 0")
        if profile.topology.threads < 2:
            refuse(errno.ENODEV, "no SMT")

    def _task(self, pid: int) -> Task:
        self._check()
        task = self.kernel.tasks.get(pid or self.kernel.own_pid)
        if task is None:
            refuse(errno.ESRCH, f"no task {pid}")
        return task

    def get(self, pid: int) -> int:
        return self._task(pid).cookie

    def create(self, pid: int) -> None:
        cookie = next(_COOKIES)
        for thread in self.kernel.threads_of(self._task(pid).tgid):
            thread.cookie = cookie

    def copy(self, source_pid: int, target_pids: list[int]) -> list[int]:
        cookie = self._task(source_pid).cookie if source_pid else 0
        self._check()
        failed: list[int] = []
        for pid in target_pids:
            task = self.kernel.tasks.get(pid)
            if task is None:
                failed.append(pid)
                continue
            for thread in self.kernel.threads_of(task.tgid):
                thread.cookie = cookie
        return failed
