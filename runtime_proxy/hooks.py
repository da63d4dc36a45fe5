"""Asks hook servers about pods and containers, for CRI and for Docker.

Servers are asked in order, each answer merged before the next one is asked; failure policies,
the skip label and the time that a caller can spare are honoured here. After-stages run in the
background: a reply never waits for them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from protos.runtimehook.v1alpha1 import api_pb2 as hook
from runtime_proxy import merge
from runtime_proxy.failure_log import FailureLog
from runtime_proxy.hook_server import GivenUp, HookError, HookServer, HookServers
from runtime_proxy.model import Container, Pod, container_request, pod_request
from runtime_proxy.runtime import RuntimeAway
from runtime_proxy.stages import Stage
from runtime_proxy.store import Store
from runtime_proxy.tasks import spawn

log = logging.getLogger(__name__)

# The share of a caller's remaining time that hooks may use. Chosen: a runtime that is left half of
# kubelet's two minutes can still start a container.
_HOOK_SHARE = 0.5

_Object = TypeVar("_Object", Pod, Container)


@dataclass(slots=True)
class Skipped:
    """Intercepted calls that went on without hooks, by the reason."""

    unreadable: int = 0
    labelled: int = 0
    unknown_object: int = 0
    runtime_away: int = 0
    fault: int = 0


class Lookup(Protocol):
    """Objects from the store or, where it does not have them, from the runtime."""

    done: bool

    async def pod(self, identifier: str) -> Pod | None:
        """None if the runtime does not know it either. Raises RuntimeAway."""

    async def container(self, identifier: str) -> Container | None:
        """None if the runtime does not know it either. Raises RuntimeAway."""


@dataclass(slots=True)
class Hooks:
    """Asks hook servers in order, and merges each answer before it asks the next one."""

    servers: HookServers
    store: Store
    recovery: Lookup
    skip_label: tuple[str, str]
    skipped: Skipped = field(default_factory=Skipped)
    failures: FailureLog = field(default_factory=FailureLog)
    # The last of each pod's after-stages under way.
    _telling: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _successor_reports_ends: bool = False

    def skips(self, pod: Pod) -> bool:
        key, value = self.skip_label
        if pod.labels.get(key) == value:
            self.skipped.labelled += 1
            return True
        return False

    def remember(self, known: Container | None, updated: Container | None) -> None:
        """Store a changed container, together with what other calls have changed meanwhile."""
        if known is None or updated is None:
            return
        current = self.store.container(known.id)
        if current is not None:
            self.store.put_container(merge.carry_over(current, known, updated))

    async def ask_about_pod(
        self,
        stage: Stage,
        pod: Pod,
        budget: "Budget",
        merged: Callable[[Pod, hook.PodSandboxHookResponse], Pod] = merge.answered_pod,
    ) -> Pod:
        """Return the pod as the hooks of this stage want it. Raises Refused under policy Fail.

        merged: returns a pod with one answer taken into it.
        """
        for server in self.servers.serving(stage):
            pod = await self._ask(
                server,
                stage,
                pod,
                pod_request(pod),
                lambda pod, data: merged(pod, hook.PodSandboxHookResponse.FromString(data)),
                budget,
            )
        return pod

    async def ask_about_container(
        self, stage: Stage, container: Container, pod: Pod, budget: "Budget"
    ) -> Container:
        """Return the container as the hooks of this stage want it. Raises Refused under Fail."""
        for server in self.servers.serving(stage):
            container = await self._ask(
                server,
                stage,
                container,
                container_request(container, pod),
                lambda container, data: merge.answered_container(
                    container, hook.ContainerResourceHookResponse.FromString(data)
                ),
                budget,
            )
        return container

    async def _ask(
        self,
        server: HookServer,
        stage: Stage,
        known: _Object,
        request: Message,
        merged: Callable[[_Object, bytes], _Object],
        budget: "Budget",
    ) -> _Object:
        """Return `known` with one server's answer in it.

        It is returned as it is where there is no answer and the server's policy is Ignore.
        """
        try:
            answer = await server.call(stage, request.SerializeToString(), budget_s=budget.left_s())
            if answer is None:
                return known
            after = merged(known, answer)
            merge.check_size(known, after)
            self.failures.succeeded(server.name, stage.value)
            return after
        except GivenUp as error:
            # The breaker has been logged.
            reason = str(error)
        except HookError as error:
            reason = str(error)
            self.failures.failed(server.name, stage.value, reason)
        except (DecodeError, merge.TooLarge) as error:
            what = str(error) if isinstance(error, merge.TooLarge) else "unreadable"
            reason = f"{server.registration.endpoint}: the answer to {stage.value} is {what}"
            self.failures.failed(server.name, stage.value, reason)
        if server.registration.fail and stage.may_refuse:
            raise Refused(reason)
        return known

    def in_background(self, pod_id: str, work: Coroutine[Any, Any, None]) -> None:
        """Run work beside the calls. The work of one pod runs in the order in which it came."""
        task = spawn("hooks behind a call", _after(self._telling.get(pod_id), work))
        self._telling[pod_id] = task
        task.add_done_callback(lambda done: self._told(pod_id, done))

    def _told(self, pod_id: str, task: asyncio.Task[None]) -> None:
        if self._telling.get(pod_id) is task:
            del self._telling[pod_id]

    async def settle(self, limit_s: float) -> None:
        """Wait for the hooks of after-stages that are still running."""
        if self._telling:
            await asyncio.wait(self._telling.values(), timeout=limit_s)

    async def tell_of_container(
        self, stage: Stage, container: Container, pod: Pod | None = None
    ) -> None:
        """Report an after-stage of one container. No call waits for the answer.

        pod: the container's, where it may be gone by the time of the report.
        """
        if not self.servers.serving(stage):
            return
        try:
            pod = pod or await self.recovery.pod(container.pod_id)
        except RuntimeAway:
            return
        if pod is None or self.skips(pod):
            return
        await self.ask_about_container(stage, container, pod, Budget(None))

    async def pod_stopped(self, pod: Pod, containers: Sequence[Container]) -> None:
        """Report the end of a sandbox, and of the containers that ended with it."""
        for container in containers:
            await self.tell_of_container(Stage.POST_STOP_CONTAINER, container, pod)
        if self.servers.serving(Stage.POST_STOP_POD_SANDBOX) and not self.skips(pod):
            await self.ask_about_pod(Stage.POST_STOP_POD_SANDBOX, pod, Budget(None))

    def leave_ends(self) -> None:
        """Leave the ends of objects to a successor, which learns of them from the runtime.

        Both would report the end of a container whose StopContainer is answered here.
        """
        self._successor_reports_ends = True

    def container_exited(self, identifier: str) -> None:
        """Report the end of a container, whatever ended it, unless it was reported before."""
        if self._successor_reports_ends:
            return
        stopped = self.store.stop_container(identifier)
        if stopped is not None:
            pod = self.store.pod(stopped.pod_id)
            self.in_background(
                stopped.pod_id, self.tell_of_container(Stage.POST_STOP_CONTAINER, stopped, pod)
            )

    def sandbox_exited(self, identifier: str) -> None:
        """Report the end of a sandbox and of its containers, unless it was reported before."""
        if self._successor_reports_ends:
            return
        stopped = self.store.stop_pod(identifier)
        if stopped is not None:
            containers = [
                c
                for c in list(self.store.containers_of(identifier))
                if self.store.stop_container(c.id) is not None
            ]
            self.in_background(identifier, self.pod_stopped(stopped, containers))

    def vanished(self, pods: Iterable[Pod], containers: Iterable[Container]) -> None:
        """Report the ends of objects that the runtime no longer has, unless reported before."""
        lost = {pod.id: pod for pod in pods}
        for container in containers:
            if not container.stopped:
                pod = lost.get(container.pod_id) or self.store.pod(container.pod_id)
                self.in_background(
                    container.pod_id,
                    self.tell_of_container(Stage.POST_STOP_CONTAINER, container, pod),
                )
        for pod in lost.values():
            if not pod.stopped:
                self.in_background(pod.id, self.pod_stopped(pod, ()))


async def _after(before: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> None:
    if before is not None:
        await asyncio.wait({before})
    await work


class Refused(Exception):
    """A hook server under failure policy Fail gave no answer."""


class Budget:
    """How long hooks may take, out of the caller's own deadline."""

    def __init__(self, timeout_s: float | None) -> None:
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s * _HOOK_SHARE

    def left_s(self) -> float | None:
        return None if self._deadline is None else max(0.001, self._deadline - time.monotonic())
