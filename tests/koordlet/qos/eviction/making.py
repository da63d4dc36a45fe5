"""An evictor between a scripted API server and a scripted runtime."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hooks.subject import Pod
from koordlet.qos.eviction.evictor import EvictionOptions, Evictor
from koordlet.qos.eviction.means import Answer, Answered
from koordlet.qos.eviction.past_rounds import Past
from koordlet.qos.strategy import Note, PodOnNode, Shortage, Victim
from service.events import Events
from tests.koordlet.qos.eviction_making import a_pod, a_situation


async def nothing_kept(past: Past) -> None:
    """Forget what a restart would have to know."""


EVICTED = Answer(Answered.EVICTED)
BUDGET = Answer(Answered.REFUSED, "Cannot evict pod as it would violate the pod's budget")
SILENT = Answer(Answered.UNREACHABLE, "no answer within 5 s")


@dataclass
class Api:
    """Answers by the pod's name; otherwise evicts."""

    answers: dict[str, Answer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    events: list[tuple[str, str, str]] = field(default_factory=list)

    async def evict(self, pod: Pod) -> Answer:
        self.asked.append(pod.name)
        await asyncio.sleep(0)
        return self.answers.get(pod.name, EVICTED)

    def warn(self, pod: Pod, reason: str, message: str) -> None:
        self.events.append((pod.name, reason, message))


@dataclass
class Runtime:
    """Stops containers, or fails with `error`, or hangs until `released`."""

    error: str = ""
    stopped: list[tuple[tuple[str, ...], float]] = field(default_factory=list)
    released: asyncio.Event | None = None

    async def stop(self, container_ids: Sequence[str], *, grace_s: float) -> str:
        self.stopped.append((tuple(container_ids), grace_s))
        if self.released is not None:
            await self.released.wait()
        return self.error


class Bed:
    """An evictor with a clock of its own."""

    def __init__(
        self,
        *,
        api: Api | None = None,
        runtime: Runtime | None = None,
        keep: Callable[[Past], Awaitable[None]] = nothing_kept,
        **options: Any,
    ) -> None:
        self.now = 1000.0
        self.api = api
        self.runtime = runtime
        self.events = Events()
        self.notes: list[Note] = []
        self.evictor = Evictor(
            EvictionOptions(**options),
            api=lambda: self.api,
            stopper=runtime,
            events=self.events,
            note=self.notes.append,
            keep=keep,
            clock=lambda: self.now,
            wall=lambda: 5.0,
        )

    async def round(
        self, *shortages: Shortage, pods: Iterable[Pod | PodOnNode] | None = None, **about: Any
    ) -> None:
        if pods is None:
            pods = {
                each.pod.uid: each.pod for short in shortages for each in short.victims
            }.values()
        await self.evictor.round(shortages, a_situation(pods, now=self.now, **about))
        # Stops run beside the round.
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.latest()]

    @property
    def why(self) -> list[str]:
        return [each["why"] for each in self.evictor.status()["short"]]


def short(
    needed: int,
    *pods: tuple[Pod, int],
    gate: str = "BEMemoryEvict",
    resource: str = "memory",
    of_requests: bool = False,
    others: Sequence[tuple[Pod, int]] = (),
) -> Shortage:
    return Shortage(
        gate=gate,
        resource=resource,
        of_requests=of_requests,
        needed=needed,
        numbers="the node uses 79.3 %",
        victims=tuple(Victim(*each) for each in pods),
        cool_down_s=4.0,
        others=tuple(Victim(*each) for each in others),
    )


A, B, C = (a_pod(name, qos="BE") for name in "abc")
