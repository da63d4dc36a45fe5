"""The node's cgroup layout and its kernel's features, found at start and checked again later.

The pods' root may not exist yet when the daemon starts: a node's first pod creates it. Modules and
switches of the kernel may change while the daemon runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor as Workers
from functools import partial
from typing import Any

import msgspec

from koordlet.configuration.config import Config
from koordlet.decisions.rules import Rules
from koordlet.node.disks import read_pod_volumes
from koordlet.node.hardware import Machine, read_machine
from koordlet.node.machine import layout_of
from koordlet.node.probe import Probed, pods_cpus, probe_kernel
from linux.cgroup_paths import Layout
from linux.discovery import DiscoveryError, kubepods_of
from linux.host import Host
from service.events import Events, Severity

_LOG = logging.getLogger("koordlet")


class NodeKernel:
    """The layout in force and the probed features. Belongs to the event loop."""

    def __init__(
        self,
        config: Config,
        host: Host,
        *,
        rules: Rules,
        events: Events,
        workers: Workers,
        changed: Callable[[Layout], None],
    ) -> None:
        """changed: called with a new layout, and again after its kernel was probed."""
        self._config = config
        self._host = host
        self._rules = rules
        self._events = events
        self._workers = workers
        self._changed = changed
        self._looking = False
        self._with_volumes: frozenset[str] = frozenset()
        self.layout: Layout | None = None
        self.probed: Probed | None = None
        self.machine: Machine | None = None
        """CPUs and memory; None until they were read."""

    @property
    def burst_above_quota(self) -> bool:
        return self.probed is not None and self.probed.burst_above_quota

    async def find(self) -> Layout:
        """Find the layout at start; raises DiscoveryError if there are no cgroups."""
        layout = await self._discover(())
        self._take(layout)
        return layout

    async def probe(self) -> None:
        """Probe the kernel's features."""
        layout = self.layout
        if layout is None:
            return
        loop = asyncio.get_running_loop()
        probed = await loop.run_in_executor(self._workers, probe_kernel, self._host, layout)
        if self.probed is not None:
            volumes = self.probed.facts.pod_volumes
            facts = msgspec.structs.replace(probed.facts, pod_volumes=volumes)
            probed = msgspec.structs.replace(probed, facts=facts)
        self.probed = probed
        self._rules.change(kernel=self.probed.facts)
        await self._look_at_machine()

    async def _look_at_machine(self) -> None:
        """Read CPUs and memory; if that fails, the last ones stay."""
        loop = asyncio.get_running_loop()
        try:
            self.machine = await loop.run_in_executor(self._workers, read_machine, self._host)
        except (OSError, ValueError) as error:
            self._events.add(
                "kernel",
                "machine",
                f"CPUs and memory cannot be read, no strategy runs: {error}"
                if self.machine is None
                else f"CPUs and memory cannot be read, the last ones count: {error}",
            )

    async def probe_again(self) -> None:
        """Probe the kernel's features again; if that fails, the last facts stay in force."""
        try:
            await self.probe()
        except OSError as error:
            self._events.add("kernel", "kernel", f"cannot be probed: {error}")

    async def look_at_cpus(self) -> None:
        """Read which CPUs pods can have now: CPUs go offline and come back."""
        if self.layout is None or self.probed is None:
            return
        loop = asyncio.get_running_loop()
        cpus = await loop.run_in_executor(self._workers, pods_cpus, self._host, self.layout)
        self._change_facts(pods_cpus=cpus)
        await self._look_at_machine()

    def _change_facts(self, **changes: Any) -> None:
        assert self.probed is not None
        facts = msgspec.structs.replace(self.probed.facts, **changes)
        self.probed = msgspec.structs.replace(self.probed, facts=facts)
        self._rules.change(kernel=facts)

    def follow_volumes(self, uids: frozenset[str]) -> bool:
        """Have the volumes of these pods looked at; return whether they are others than before."""
        changed = uids != self._with_volumes
        self._with_volumes = uids
        return changed

    async def look_at_volumes(self) -> None:
        """Read on which disks the CSI volumes of the followed pods lie; the last ones stay if that
        fails."""
        uids = self._with_volumes
        if self.probed is None or not (uids or self.probed.facts.pod_volumes):
            return
        read = partial(
            read_pod_volumes, self._host, uids, kubelet_directory=self._config.kubelet.directory
        )
        try:
            volumes = await asyncio.get_running_loop().run_in_executor(self._workers, read)
        except OSError as error:
            self._events.add("kernel", "volumes", f"the pods' volumes cannot be read: {error}")
            return
        if uids == self._with_volumes:
            # A pod that ends loses its mounts before it goes: that is no mistake in its annotation.
            known = self.probed.facts.pod_volumes
            self._change_facts(
                pod_volumes={uid: {**known.get(uid, {}), **found} for uid, found in volumes.items()}
            )

    async def find_kubepods(self, live: Iterable[str]) -> None:
        """Look for the pods' root while it is not known, and probe there. live: pods' cgroups.

        A known root is looked for again when more pods are in another one (kubelet was restarted
        with another cgroup driver), or when it is gone and another exists.
        """
        if self._looking or self.layout is None:
            return
        self._looking = True
        try:
            known = self.layout.kubepods
            if known:
                # The known root first: it wins if another has as many pods.
                live = sorted(live, key=lambda path: not path.startswith(f"{known}/"))
                if kubepods_of(live) in ("", known):
                    if await self._is_there(self.layout):
                        return
                    live = ()
            layout = await self._discover(tuple(live))
            if layout.kubepods and layout != self.layout:
                self._take(layout)
                await self.probe()
                self._changed(layout)
        except (OSError, DiscoveryError) as error:
            self._events.add("cgroups", "cgroups", str(error), severity=Severity.ERROR)
        finally:
            self._looking = False

    async def _is_there(self, layout: Layout) -> bool:
        directory = layout.directory(next(iter(layout.mounts)), layout.kubepods)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, self._host.is_dir, directory)

    async def _discover(self, live: Iterable[str]) -> Layout:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._workers, lambda: layout_of(self._config, self._host, live=live)
        )

    def _take(self, layout: Layout) -> None:
        self.layout = layout
        _LOG.info(
            "cgroup layout",
            extra={
                "version": layout.version,
                "driver": layout.driver.value,
                "kubepods": layout.kubepods,
            },
        )
        self._changed(layout)
