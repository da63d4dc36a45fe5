"""A simulated node with an executor on it, and short ways to say what is wanted."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from hooks.claim import Claim
from koordlet.executor.executor import Executor
from koordlet.executor.journal import Journal
from koordlet.executor.slots import ResourceView, Want, WriteReport
from koordlet.executor.table import Limits
from koordlet.node.probe import probe_kernel
from linux.discovery import discover
from linux.resources import Resource, Value
from tests.simulated import DEBIAN_12_V1, DEBIAN_12_V2, Kubelet, Profile, SimulatedKernel
from tests.simulated.kubelet import Limits as PodLimits

DEFAULT_LIMITS = Limits()
TWO_CORES = PodLimits(cpu_request_milli=1000, cpu_limit_milli=2000, memory_limit_bytes=1 << 30)
"""What kubelet asks for most pods and containers here."""
BOTH = pytest.mark.parametrize("profile", [DEBIAN_12_V1, DEBIAN_12_V2], ids=lambda p: p.name)
"""On cgroup v1 and v2."""
Wish = tuple[str, Resource, Value]


def claim_of(resource: Resource, value: Value, *, key: str = "", policy: str = "test") -> Claim:
    return Claim(
        resource=resource, value=value, key=key, policy=policy, reason="because", source="a test"
    )


def fill_disk(journal: Journal) -> None:
    """Let the next append of the journal meet a full disk; a new file can still be written."""
    assert journal._log is not None
    journal.update()  # opens the file
    full = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(full, journal._log._file)
    os.close(full)


class Bed:
    """A node: kernel, kubelet, journal, executor. `crash_and_restart` makes a new executor."""

    def __init__(
        self,
        profile: Profile = DEBIAN_12_V1,
        *,
        journal_path: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.kernel = SimulatedKernel(profile)
        self.kubelet = Kubelet(self.kernel)
        self.limits = limits
        self.journal_path = journal_path
        self.layout = discover(self.kernel)
        self.probed = probe_kernel(self.kernel, self.layout)
        self.kernel.writes.clear()
        self.journal = self._journal()
        self.executor = self._executor()

    def _journal(self) -> Journal:
        return Journal(self.journal_path, boot="b1", monotonic=lambda: self.kernel.clock.now)

    def _executor(self) -> Executor:
        return Executor(
            self.kernel,
            self.layout,
            self.journal,
            limits=self.limits,
            burst_above_quota=self.probed.burst_above_quota,
            clock=lambda: self.kernel.clock.now,
        )

    def restart(self) -> None:
        """A new process: a new executor on what the journal's file holds."""
        self.kernel.restart_program()
        if self.journal_path is not None:
            self.journal.close()
            self.journal = self._journal()
        self.executor = self._executor()

    def want(
        self,
        subject: str,
        *wishes: Wish,
        requested: Mapping[Resource, Value] | None = None,
        policy: str = "test",
    ) -> None:
        asked = requested or {}
        self.executor.want(
            subject,
            [
                Want(
                    subject=subject,
                    place=place,
                    resource=resource,
                    key="",
                    value=value,
                    claim=claim_of(resource, value, policy=policy),
                    requested=asked.get(resource),
                )
                for place, resource, value in wishes
            ],
        )

    def run(self) -> WriteReport:
        """One pass, as the reconciler makes it."""
        for record in self.executor.orphans():
            self.executor.restore(record)
        return self.executor.apply(self.executor.plan())

    def text(self, cgroup: str, file: str) -> str:
        return self.kernel.text(self.kubelet.path(cgroup, file))

    def set(self, cgroup: str, file: str, value: str, *, writer: str = "kubelet") -> None:
        self.kernel.write_as(writer, self.kubelet.path(cgroup, file), value)

    def view(self, subject: str, resource: Resource) -> ResourceView:
        return next(v for v in self.executor.views(subject) if v.resource is resource)
