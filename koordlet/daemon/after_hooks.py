"""What a hook sets off in other parts of the daemon, whichever transport it came over.

Most of it follows the reply. Before the reply come a directory that the runtime is about to mount,
and the mark on the cgroup of a container that is resized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from hooks.engine import Engine
from koordlet.daemon.dynamic.dynamics import Dynamics
from koordlet.daemon.feeds import CRI, KUBELET, Feeds
from koordlet.daemon.passes import Passes
from koordlet.decisions.rules import Rules
from koordlet.executor.journal import Journal
from koordlet.executor.node_wide import make_host_directory
from koordlet.state import NodeState
from linux.cgroup_files import FILES, number
from linux.cgroup_paths import PathError
from linux.host import Host
from linux.resources import Resource, Value
from service.events import Events, Severity


class AfterHooks:
    """The `Surroundings` of `NriHandler` and `HookAnswers`. Belongs to the event loop."""

    def __init__(
        self,
        *,
        host: Host,
        state: NodeState,
        rules: Rules,
        journal: Journal,
        passes: Passes,
        later: Callable[[Callable[[], None]], None],
        dynamics: Dynamics,
        feeds: Feeds,
        events: Events,
        nri_protects: Callable[[], bool],
    ) -> None:
        """later: does work once the runtime has had the time to receive the reply. nri_protects:
        returns whether NRI decides about new containers.
        """
        self._host = host
        self._state = state
        self._rules = rules
        self._journal = journal
        self._passes = passes
        self._later = later
        self._dynamics = dynamics
        self._feeds = feeds
        self._events = events
        self._nri_protects = nri_protects

    @property
    def engine(self) -> Engine:
        return self._rules.engine

    @property
    def nri_protects(self) -> bool:
        return self._nri_protects()

    def after_reply(self, work: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_soon(work)

    def later(self, work: Callable[[], None]) -> None:
        self._later(work)

    # --- pods ----------------------------------------------------------------------------------

    def state_changed(self, reason: str) -> None:
        self._passes.state_changed(reason)
        self._dynamics.state_changed()

    def pod_changed(self, uid: str, *, can_wait: bool = False) -> None:
        self._passes.pod_changed(uid, can_wait=can_wait)
        self._dynamics.state_changed()

    def pod_appeared(self, uid: str) -> None:
        self._passes.pod_appeared(uid)
        self._dynamics.state_changed()
        self._ask_kubelet_about(uid)

    def container_complete(self, uid: str) -> None:
        self._passes.container_complete(uid)
        self._dynamics.state_changed()

    def proxy_called(self, uid: str) -> None:
        self._ask_kubelet_about(uid)
        self._feeds.fetch_soon(CRI)

    def _ask_kubelet_about(self, uid: str) -> None:
        if not self._state.known_to_kubelet(uid):
            self._feeds.fetch_soon(KUBELET)

    # --- containers ----------------------------------------------------------------------------

    def delivered(
        self,
        container_id: str,
        resource: Resource,
        requested: Value | None,
        value: Value,
        policy: str,
    ) -> None:
        self._journal.note_delivered(container_id, resource, requested, value, policy=policy)

    def requested(self, cgroup: str) -> None:
        self._passes.requested(cgroup)

    def our_quotas_us(self, cgroup: str) -> Collection[int]:
        file = FILES[Resource.CPU_CFS_QUOTA]
        record = self._journal.get(cgroup, Resource.CPU_CFS_QUOTA)
        values = self._journal.runtime_values(cgroup, Resource.CPU_CFS_QUOTA)
        texts = () if record is None else record.ours
        texts += () if values is None else values.texts
        return {one for text in texts if isinstance(one := number(file, text), int)}

    def superseded(self, container_id: str, resources: Collection[Resource]) -> None:
        self._journal.supersede(container_id, resources)

    def ended(self, container_id: str) -> None:
        self._passes.ended(container_id)

    # --- the kernel ----------------------------------------------------------------------------

    def make_host_directory(self, path: str, mode: int) -> None:
        try:
            make_host_directory(self._host, path, mode)
        except (OSError, PathError) as error:
            self._events.add(
                "host-directory",
                path,
                f"cannot be made, so the container that mounts it will not start: {error}",
                severity=Severity.ERROR,
            )

    def resctrl_groups(self) -> Collection[str]:
        return self._passes.resctrl_groups
