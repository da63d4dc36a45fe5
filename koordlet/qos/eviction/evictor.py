"""The one evictor: carries out the shortages of all strategies, on the event loop.

`submit` takes the shortages of one round of strategies; `run` works through them, and never waits
for a container to end. For each victim:

1. The API server, where there is one: an Eviction for the pod's very uid, so disruption budgets and
   admission count. A refusal makes room for the next victim, and the pod is tried again later.
2. Stopping the pod's containers over CRI, all of them, with a grace: where there is no API server
   or it does not answer, unless `only_by_api`. The switch EvictionStopsContainers brings upstream's
   order back: containers are stopped without a grace, and the API server is not involved.

What holds evictions back:

- Kubelet evicts itself: a pressure condition of the Node, or a pod that kubelet is evicting.
- The cool-down of a gate after evictions for it.
- What pods release that were evicted before, or that leave by themselves, for at most two minutes:
  after that the pod is stuck, and the node is still short.
- A pod whose end would release nothing: a static pod (kubelet starts it again), a pod without
  running containers, and for a shortage of requests a pod that restarts its stopped containers.

With `dry_run` victims are chosen and reported, and nothing else happens to them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from hooks import compat
from koordlet.qos.eviction.kubelet_restarts import is_static, restarts_containers
from koordlet.qos.eviction.means import Answered, EvictionApi, Stopper
from koordlet.qos.eviction.past_rounds import Past, PastRounds
from koordlet.qos.eviction.reports import Reports
from koordlet.qos.eviction.round import Choice, Key, Round, Uncovered
from koordlet.qos.strategy import Note, PodOnNode, Shortage, Situation
from service.events import Events, Severity
from service.repeats import Repeats

_LOG = logging.getLogger("koordlet.qos")

_RETRY_S: Final = 10.0
"""After a refusal, unless the server names a time. The API server's own for disruption budgets."""
_LONGEST_RETRY_S: Final = 300.0
"""Of what the server names. Chosen: a shortage that lasts five minutes is worth another attempt.
Twice the value leaves a victim alone for as much longer, also when its budget allows it by then."""
_AWAY_S: Final = 10.0
"""How long an API server that did not answer is left alone. Chosen: two of its time limits. Twice
the value delays the next eviction over the API by as much."""
_STALE_S: Final = 5.0
"""Shortages of older measurements are dropped: newer ones have come or nothing is short. Chosen:
the time limit of one eviction, after which a round may have to be judged again."""


class EvictionOptions(msgspec.Struct, frozen=True):
    """An operator's settings.

    cool_downs: gate -> seconds, where they differ from the shortage's own.
    most_per_round: victims of one round. Chosen: enough for a burst of small pods, and few enough
        that one wrong measurement does not empty a node. Twice the value doubles that.
    stop_grace_s: between SIGTERM and SIGKILL of a stopped container. Chosen: Docker's. Twice the
        value lets a process clean up for longer while the node is short.
    """

    only_by_api: bool = False
    dry_run: bool = False
    most_per_round: int = 10
    stop_grace_s: float = 10.0
    cool_downs: Mapping[str, float] = {}


class Evictor:
    """See the module. Everything but `submit` belongs to the event loop.

    api: returns the connected API server, or None where there is none.
    stopper: the container runtime; None where containers may not be stopped.
    note: takes a line of the audit log.
    keep: keeps what a restart must know; awaited before anything else is evicted.
    """

    def __init__(
        self,
        options: EvictionOptions,
        *,
        api: Callable[[], EvictionApi | None],
        stopper: Stopper | None,
        events: Events,
        note: Callable[[Note], None],
        keep: Callable[[Past], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.options = options
        self._api = api
        self._stopper = stopper
        self._events = events
        self._keep = keep
        self._clock = clock
        self._repeats = Repeats(clock=clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._submitted: tuple[tuple[Shortage, ...], Situation] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._past = PastRounds(options.cool_downs)
        self.reports = Reports(api=api, events=events, note=note, clock=clock, wall=wall)
        self._away_until = 0.0
        self._held = ""
        self._uncovered: tuple[Uncovered, ...] = ()
        self._judged_at = 0.0

    # --- in and out ----------------------------------------------------------------------------

    def resume(self, past: Past) -> None:
        """Go on from what was kept before a restart. Before the first round."""
        self._past.resume(past, self._clock())

    def submit(self, shortages: Sequence[Shortage], situation: Situation) -> None:
        """Take the shortages of one round of strategies in place of former ones. Any thread."""
        self._submitted = tuple(shortages), situation
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    async def run(self) -> None:
        """Carry out what is submitted until cancelled."""
        self._loop = asyncio.get_running_loop()
        if self._submitted is not None:
            self._wake.set()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                await self._next()
        finally:
            self._loop = None
            for task in self._stopping:
                task.cancel()

    async def _next(self) -> None:
        submitted, self._submitted = self._submitted, None
        if submitted is None:
            return
        shortages, situation = submitted
        if self._clock() - situation.now > max(_STALE_S, 3 * situation.interval_s):
            return
        try:
            await self.round(shortages, situation)
        except Exception as error:  # noqa: BLE001 - the next round must come, and it is reported
            if (left_out := self._repeats.due(type(error).__name__)) is not None:
                _LOG.error(
                    "a round of evictions failed",
                    exc_info=error,
                    extra={"same_failure_not_logged": left_out} if left_out else None,
                )

    def status(self) -> dict[str, Any]:
        """Return the state for programs."""
        return {
            "dryRun": self.options.dry_run,
            "heldBack": self._held,
            "evictions": self.reports.evictions,
            "short": [
                {
                    "gate": each.shortage.gate,
                    "resource": each.shortage.resource,
                    "needed": each.shortage.needed,
                    "missing": each.missing,
                    "numbers": each.shortage.numbers,
                    "why": each.why,
                }
                for each in self._uncovered
                if self._clock() - self._judged_at <= _STALE_S
            ],
            "last": [msgspec.to_builtins(each) for each in self.reports.history],
        }

    # --- one round -----------------------------------------------------------------------------

    async def round(self, shortages: Sequence[Shortage], situation: Situation) -> None:
        """Evict what these shortages need."""
        now = self._judged_at = self._clock()
        pods = {each.pod.uid: each for each in situation.pods}
        self._past.look_at(pods, now)
        self.reports.keep(pods.keys())
        held = self._past.kubelet_evicts(situation, now)
        self._hold(held)
        if held:
            self._uncovered = tuple(Uncovered(each, each.needed, held) for each in shortages)
            return
        upstream = compat.EVICTION_STOPS_CONTAINERS in situation.inputs.settings.compat
        round_ = Round(
            shortages,
            expected=self._past.expected(shortages, now),
            barred=self._past.barred(pods, now),
            cooling=self._past.cooling(shortages, now),
            most=self.options.most_per_round,
        )
        while (choice := round_.next()) is not None:
            uid = choice.victim.pod.uid
            releases = round_.releases[uid]
            why = await self._evict(choice, pods.get(uid), releases, upstream=upstream)
            if why:
                round_.refused(choice, why)
            else:
                round_.evicted(choice)
                self._past.served(round_.gates_served(), now)
                await self._keep(self._past.past)
        self._uncovered = round_.uncovered()
        cooling = self._past.cooling(shortages, now)
        for each in self._uncovered:
            if each.shortage.gate not in cooling:
                self._events.add(
                    "eviction-short", each.shortage.gate, f"{each.shortage.resource}: {each.why}"
                )

    def _hold(self, held: str) -> None:
        if held and held != self._held:
            self._events.add("eviction-held", "node", held, severity=Severity.INFO)
        self._held = held

    # --- one victim ----------------------------------------------------------------------------

    async def _evict(
        self,
        choice: Choice,
        on_node: PodOnNode | None,
        releases: Mapping[Key, int],
        *,
        upstream: bool,
    ) -> str:
        """Evict a victim; return "" when it goes, else why not."""
        pod = choice.victim.pod
        stops_first = upstream and not self.options.only_by_api
        api = None if stops_first else self._api()
        if api is not None and self._clock() >= self._away_until and not is_static(pod):
            if self.options.dry_run:
                return self._would_go(choice, releases)
            answer = await api.evict(pod)
            match answer.answered:
                case Answered.EVICTED:
                    self._goes(choice, releases, "api")
                    return ""
                case Answered.GONE:
                    self._past.evicted(pod.uid, releases, self._clock())
                    return ""
                case Answered.REFUSED:
                    self.reports.fails(choice, "api", answer.detail)
                    retry = _RETRY_S if answer.retry_after_s is None else answer.retry_after_s
                    until = self._clock() + min(max(retry, 1.0), _LONGEST_RETRY_S)
                    self._past.refused(pod.uid, until=until, why=answer.detail)
                    return answer.detail
                case Answered.UNREACHABLE:
                    self._away_until = self._clock() + _AWAY_S
                    self.reports.fails(choice, "api", answer.detail)
        why = self._cannot_stop(choice, on_node, api, stops_first=stops_first)
        if why or on_node is None:
            return why or "the pod is not on the node any more"
        if self.options.dry_run:
            return self._would_go(choice, releases)
        self._stop(choice, on_node, releases, grace_s=0 if stops_first else None)
        return ""

    def _cannot_stop(
        self,
        choice: Choice,
        on_node: PodOnNode | None,
        api: EvictionApi | None,
        *,
        stops_first: bool,
    ) -> str:
        """Return why a victim's containers are not stopped; "" if they may be."""
        pod = choice.victim.pod
        if api is not None and self._clock() >= self._away_until and is_static(pod):
            return "it is a static pod, which kubelet would start again"
        if self.options.only_by_api or self._stopper is None:
            return (
                "there is no connection to an API server"
                if api is None
                else "the API server does not answer, and containers may not be stopped instead"
            )
        if on_node is None or not on_node.containers:
            return "it has no running container, so its end would release nothing"
        if choice.shortage.of_requests and restarts_containers(pod) and not stops_first:
            return (
                f"kubelet would start its containers again (restartPolicy {pod.restart_policy}),"
                " so stopping them would release no requests"
            )
        return ""

    def _would_go(self, choice: Choice, releases: Mapping[Key, int]) -> str:
        """Count a pod that the dry run leaves alone as evicted in the next rounds."""
        self._past.evicted(choice.victim.pod.uid, releases, self._clock())
        self.reports.would_go(choice)
        return ""

    def _goes(self, choice: Choice, releases: Mapping[Key, int], means: str) -> None:
        self._past.evicted(choice.victim.pod.uid, releases, self._clock())
        self.reports.goes(choice, means)

    # --- stopping ------------------------------------------------------------------------------

    def _stop(
        self,
        choice: Choice,
        on_node: PodOnNode,
        releases: Mapping[Key, int],
        *,
        grace_s: float | None,
    ) -> None:
        """Begin to stop a pod's containers; the round goes on meanwhile."""
        self._past.evicted(choice.victim.pod.uid, releases, self._clock(), stopping=True)
        grace = self.options.stop_grace_s if grace_s is None else grace_s
        ids = tuple(each.id for each in on_node.containers)
        task = asyncio.get_running_loop().create_task(self._stopped(choice, ids, releases, grace))
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def _stopped(
        self, choice: Choice, ids: Sequence[str], releases: Mapping[Key, int], grace_s: float
    ) -> None:
        if self._stopper is None:
            return
        await self._keep(self._past.past)
        try:
            error = await self._stopper.stop(ids, grace_s=grace_s)
        except Exception as fault:  # noqa: BLE001 - reported as this eviction's failure
            error = f"{type(fault).__name__}: {fault}"
        uid = choice.victim.pod.uid
        if error:
            self._past.not_stopped(uid)
            self._past.refused(uid, until=self._clock() + _RETRY_S, why=error)
            self.reports.fails(choice, "cri", error)
        else:
            self._goes(choice, releases, "cri")
            self._past.stopped(uid, self._clock())
        await self._keep(self._past.past)
