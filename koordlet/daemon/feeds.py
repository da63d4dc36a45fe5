"""Feeds the state and the rules from the objects directory, the API server, kubelet and the CRI.

Objects of the directory take precedence over those of the API server, kind by kind: the operator
wrote the directory for this very machine, and a bare node has no server. Worker threads read, the
event loop applies. `koordlet.state` merges what several sources say about a pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from apis.effective_nodeslo import default_nodeslo
from hooks.facts import NodeMeta
from koordlet.configuration.config import Config
from koordlet.decisions.rules import Rules
from koordlet.sources.objects import Directory, NodeObjects, Problem, over
from koordlet.sources.polling import Poller
from koordlet.state import NodeState, Source
from koordlet.state.podspec import KnownPod, known_pod
from koordlet.transports.nri_handler import RUNTIME
from service.directory_watch import DirectoryWatch
from service.events import Events, Severity

if TYPE_CHECKING:
    from koordlet.sources.apiserver import ApiServer
    from koordlet.sources.cri import RuntimeList
    from koordlet.sources.kubelet import KubeletClient

OBJECTS: Final = "objects"
KUBELET: Final = "kubelet"
CRI: Final = "cri"
KUBERNETES: Final = "kubernetes"
SERVED_PODS: Final = "kubernetes-pods"

_FIRST_OBJECTS_S: Final = 5.0
"""How long the start waits for the API server if no objects were kept. Chosen: many times a list's
time. Without an answer defaults are in force. Twice the value delays containers' protection on a
node whose server is away."""


class Surroundings(Protocol):
    """What the feeds need of the daemon."""

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run a task as long as the daemon runs."""
        ...

    def state_changed(self, reason: str) -> None:
        """The state changed: publish a snapshot and wake the reconciler."""
        ...

    def objects_changed(self) -> None:
        """The rules have new objects: update everything else that depends on them."""
        ...


class FeedStatus(Protocol):
    """The state of a source, for `koordctl status`."""

    @property
    def name(self) -> str: ...
    @property
    def problem(self) -> str: ...
    @property
    def failures(self) -> int: ...
    @property
    def fetches(self) -> int: ...
    @property
    def answered_at(self) -> float | None: ...


def awaited(config: Config) -> list[str]:
    """Return the sources whose first list the state waits for."""
    names = [OBJECTS]
    names += [RUNTIME] if config.nri.enabled or config.cri.enabled else []
    names += [KUBELET] if config.kubelet.enabled else []
    names += [KUBERNETES] if config.kubernetes.wanted else []
    names += [SERVED_PODS] if config.kubernetes.gives_pods else []
    return names


class Feeds:
    """All sources of one daemon. Belongs to the event loop."""

    def __init__(
        self,
        config: Config,
        *,
        state: NodeState,
        rules: Rules,
        events: Events,
        workers: Executor,
        surroundings: Surroundings,
    ) -> None:
        self._config = config
        self._state = state
        self._rules = rules
        self._events = events
        self._workers = workers
        self._daemon = surroundings
        self._directory = Directory(config.objects_dir, config.node_name)
        self._of_directory = NodeObjects()
        self._scanning = False
        self._scan_again = False
        self._reported_problems: frozenset[Problem] = frozenset()
        self._pollers: dict[str, Poller] = {}
        self._watch: DirectoryWatch | None = None
        self._api_server: ApiServer | None = None
        self.kubelet: KubeletClient | None = None
        self.objects = NodeObjects()
        """The objects of the directory and the API server, merged."""

    # --- life ----------------------------------------------------------------------------------

    async def first_objects(self) -> None:
        """Read the directory, and begin to watch the API server. Rules can be built afterwards."""
        await self._scan()
        if self._config.kubernetes.wanted:
            await self._follow_api_server()

    def start(self) -> None:
        """Begin to watch the directory, and to poll kubelet and the CRI."""
        config = self._config
        self._watch = DirectoryWatch(
            config.objects_dir, self.scan_soon, poll=config.intervals.objects
        )
        if config.kubelet.enabled:
            from koordlet.sources.kubelet import KubeletClient

            self.kubelet = KubeletClient(config.kubelet, self._bad_pod)
            poller = self._poller(KUBELET, config.kubelet.interval)
            self._daemon.spawn(
                KUBELET, poller.run(self.kubelet.fetch, self._kubelet_pods, self._state.now)
            )
        if config.cri.enabled:
            # Imports gRPC, which takes some 10 MB: only where the CRI is used.
            from koordlet.sources.cri import CriClient

            cri = CriClient(config.cri, self._bad_pod)
            poller = self._poller(CRI, config.cri.interval)
            self._daemon.spawn(CRI, poller.run(cri.fetch, self._cri_list, self._state.now))

    def close(self) -> None:
        """Stop watching the directory; the daemon ends the tasks."""
        if self._watch is not None:
            self._watch.close()

    @property
    def statuses(self) -> list[FeedStatus]:
        """The states of the sources that can fail."""
        found: list[FeedStatus] = list(self._pollers.values())
        if self._api_server is not None:
            found.append(self._api_server)
        return found

    def fetch_soon(self, name: str) -> None:
        """Fetch from a polled source soon, if it is configured."""
        poller = self._pollers.get(name)
        if poller is not None:
            poller.trigger()

    def _poller(self, name: str, interval: float) -> Poller:
        made = self._pollers[name] = Poller(name, interval, self._events, self._workers)
        return made

    # --- objects -------------------------------------------------------------------------------

    def scan_soon(self) -> None:
        """Read the objects directory again; if it changes in the meantime, once more."""
        if self._scanning:
            self._scan_again = True
            return
        self._scanning = True
        self._daemon.spawn(OBJECTS, self._scan_until_quiet())

    async def _scan_until_quiet(self) -> None:
        try:
            while True:
                self._scan_again = False
                await self._scan()
                if not self._scan_again:
                    return
        finally:
            self._scanning = False

    async def _scan(self) -> None:
        loop = asyncio.get_running_loop()
        objects, pods = await loop.run_in_executor(self._workers, self._read_directory)
        self._state.mark_synced(OBJECTS)
        if pods is not None:
            self._of_directory = objects
            self._state.pods_list(Source.OBJECTS, pods)
            self._apply_objects()

    def _read_directory(self) -> tuple[NodeObjects, tuple[KnownPod, ...] | None]:
        """Return the directory's objects and pods; None for the pods if nothing changed.

        For a worker thread.
        """
        before = self._of_directory
        objects = self._directory.scan()
        if objects is before:
            return objects, None
        return objects, tuple(known_pod(pod) for pod in objects.pods)

    async def _follow_api_server(self) -> None:
        # Imports aiohttp and, in a thread, the kubernetes package: only where a server is used.
        from koordlet.sources.apiserver import ApiServer
        from koordlet.sources.served_pods import ServedPods

        node_name, pods = self._config.node_name, None
        if self._config.kubernetes.gives_pods:
            pods = ServedPods(node_name, changed=self._served_pods, bad_pod=self._bad_pod)
        self._api_server = server = ApiServer(
            self._config.kubernetes,
            node_name,
            self._config.run_dir,
            self._events,
            self._workers,
            self._of_api_server,
            pods=pods,
        )
        loop = asyncio.get_running_loop()
        kept = await loop.run_in_executor(self._workers, server.read_kept)
        server.take_kept(kept)
        self._daemon.spawn(KUBERNETES, server.run())
        try:
            async with asyncio.timeout(_FIRST_OBJECTS_S):
                await server.wait_first()
        except TimeoutError:
            self._events.add(
                KUBERNETES,
                KUBERNETES,
                "starting without the API server: defaults are in force until it answers",
                severity=Severity.ERROR,
            )

    def _of_api_server(self, objects: NodeObjects) -> None:
        self._first_list(KUBERNETES)
        self._apply_objects()

    def with_directory(self, objects: NodeObjects) -> NodeObjects:
        """Return what would be in force if the directory said `objects`."""
        of_server = NodeObjects() if self._api_server is None else self._api_server.objects
        return over(objects, of_server)

    def _apply_objects(self) -> None:
        self.objects = objects = self.with_directory(self._of_directory)
        problems = frozenset(objects.problems)
        for problem in objects.problems:
            if problem not in self._reported_problems:
                where = f"{problem.file}: {problem.obj}" if problem.obj else problem.file
                self._events.add("bad-object", where, problem.message, severity=Severity.ERROR)
        self._reported_problems = problems
        self._rules.change(
            slo=objects.slo if objects.slo is not None else default_nodeslo(),
            topology=objects.topology,
            node=NodeMeta(self._config.node_name)
            if objects.node is None
            # Batch resources change every minute, and no rule depends on them.
            else msgspec.structs.replace(objects.node, allocatable={}, capacity={}),
        )
        self._daemon.objects_changed()

    # --- pods ----------------------------------------------------------------------------------

    def _kubelet_pods(self, pods: Sequence[KnownPod], taken_at: int) -> None:
        # A kubelet that restarts lists no pods for a while, so an empty list changes nothing.
        if pods and self._state.pods_list(Source.KUBELET, pods):
            self._daemon.state_changed(KUBELET)
        self._first_list(KUBELET)

    def _served_pods(self, pods: Sequence[KnownPod]) -> None:
        if self._state.pods_list(Source.KUBERNETES, pods):
            self._daemon.state_changed(SERVED_PODS)
        self._first_list(SERVED_PODS)

    def _cri_list(self, lists: RuntimeList, taken_at: int) -> None:
        sandboxes, containers = lists
        self._state.runtime_list(sandboxes, containers, taken_at=taken_at)
        self._first_list(RUNTIME)
        self._daemon.state_changed(CRI)

    def _first_list(self, source: str) -> None:
        if source in self._state.awaited:
            self._state.mark_synced(source)
            self._daemon.state_changed(source)

    def _bad_pod(self, obj: str, problem: str) -> None:
        self._events.add("bad-object", obj, problem)
