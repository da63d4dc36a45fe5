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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from hooks import compat
from hooks.subject import Pod
from koordlet.events import Events, Severity
from koordlet.qos.eviction.means import Answered, EvictionApi, Stopper
from koordlet.qos.eviction.round import Choice, Key, Round, Uncovered, releases_of
from koordlet.qos.strategy import Note, PodOnNode, Shortage, Situation
from service.repeats import Repeats

_LOG = logging.getLogger("koordlet.qos")

SUCCESS: Final = "evictPodSuccess"
FAILURE: Final = "evictPodFail"
"""Upstream's reasons of Kubernetes events."""
REASON: Final = "evicted"
"""Upstream's reason in metrics and the audit log."""
DRY_RUN: Final = "evictionDryRun"
"""Our reason in the audit log for an eviction that a dry run left out."""

_EXPECTED_S: Final = 120.0
"""How long a pod that leaves counts as released. Upstream remembers an evicted pod as long; a pod
with a longer grace is then stuck as far as the node is concerned."""
_SETTLE_S: Final = 5.0
"""How long stopped containers count as released. Chosen: measurements show it after two samples and
a mean of three. Twice the value delays further evictions if kubelet starts them again."""
_RETRY_S: Final = 10.0
"""After a refusal, unless the server names a time. The API server's own for disruption budgets."""
_LONGEST_RETRY_S: Final = 300.0
_AWAY_S: Final = 10.0
"""How long an API server that did not answer is left alone. Chosen: two of its time limits. Twice
the value delays the next eviction over the API by as much."""
_KUBELET_S: Final = 10.0
"""How long after kubelet's eviction of a pod ours wait. Chosen: kubelet looks every 10 s whether
another pod must go."""
_DETAIL_S: Final = 300.0
"""How long a pod's series of the metric stays after its last change; upstream's."""
_STALE_S: Final = 5.0
"""Shortages of older measurements are dropped: newer ones have come or nothing is short. Chosen:
the time limit of one eviction, after which a round may have to be judged again."""
_HISTORY: Final = 256
"""Evictions that status shows. Chosen: two full nodes' worth of pods."""
_STATIC: Final = ("kubernetes.io/config.source", "kubernetes.io/config.mirror")
"""Annotations of a static pod; the source "api" is an ordinary pod's."""
_RESTARTS: Final = frozenset({"Always", "OnFailure"})
"""Restart policies with which kubelet starts a container again that was ended by a signal."""


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


class Evicted(msgspec.Struct, frozen=True):
    """One line of the history. at: seconds since the epoch. means: api, cri or dry-run."""

    at: float
    pod: str
    gate: str
    means: str
    outcome: str
    message: str


class _Remembered(msgspec.Struct):
    """A pod that was evicted. counts_until: how long its release is expected (monotonic clock)."""

    at: float
    releases: Mapping[Key, int]
    counts_until: float


class Evictor:
    """See the module. Everything but `submit` belongs to the event loop.

    api: returns the connected API server, or None where there is none.
    stopper: the container runtime; None where containers may not be stopped.
    note: takes a line of the audit log.
    """

    def __init__(
        self,
        options: EvictionOptions,
        *,
        api: Callable[[], EvictionApi | None],
        stopper: Stopper | None,
        events: Events,
        note: Callable[[Note], None],
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.options = options
        self._api = api
        self._stopper = stopper
        self._events = events
        self._note = note
        self._clock = clock
        self._wall = wall
        self._repeats = Repeats(clock=clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._submitted: tuple[tuple[Shortage, ...], Situation] | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._remembered: dict[str, _Remembered] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        """uid -> (until when the pod is not tried again, why)."""
        self._failures: dict[tuple[str, str], tuple[float, str]] = {}
        """(uid, gate) -> (when, message) of the last event about a failure."""
        self._leaving_since: dict[str, float] = {}
        self._kubelets: dict[str, float] = {}
        """uid -> since when kubelet's eviction of the pod is known."""
        self._begun = False
        self._cooled_at: dict[str, float] = {}
        """gate -> when it last evicted."""
        self._away_until = 0.0
        self._held = ""
        self._uncovered: tuple[Uncovered, ...] = ()
        self._judged_at = 0.0
        self.history: deque[Evicted] = deque(maxlen=_HISTORY)
        self.evictions = 0
        """Pods evicted since the start."""
        self._details: dict[tuple[str, str], tuple[int, float]] = {}

    # --- in and out ----------------------------------------------------------------------------

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

    def details(self) -> Mapping[tuple[str, str], int]:
        """Return (namespace, name) -> evictions of the pod, of the last five minutes."""
        now = self._clock()
        for key in [key for key, (_, at) in self._details.items() if now - at > _DETAIL_S]:
            del self._details[key]
        return {key: count for key, (count, _) in self._details.items()}

    def status(self) -> dict[str, Any]:
        """Return the state for programs."""
        return {
            "dryRun": self.options.dry_run,
            "heldBack": self._held,
            "evictions": self.evictions,
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
            "last": [msgspec.to_builtins(each) for each in self.history],
        }

    # --- one round -----------------------------------------------------------------------------

    async def round(self, shortages: Sequence[Shortage], situation: Situation) -> None:
        """Evict what these shortages need."""
        now = self._judged_at = self._clock()
        pods = {each.pod.uid: each for each in situation.pods}
        self._forget(pods, now)
        held = self._kubelet_evicts(situation, now)
        self._hold(held)
        if held:
            self._uncovered = tuple(Uncovered(each, each.needed, held) for each in shortages)
            return
        upstream = compat.EVICTION_STOPS_CONTAINERS in situation.inputs.settings.compat
        round_ = Round(
            shortages,
            expected=self._expected(shortages, pods, now),
            barred=self._barred(pods, now),
            cooling=self._cooling(shortages, now),
            most=self.options.most_per_round,
        )
        while (choice := round_.next()) is not None:
            uid = choice.victim.pod.uid
            releases = releases_of(uid, shortages)
            why = await self._evict(choice, pods.get(uid), releases, upstream=upstream)
            if why:
                round_.refused(choice, why)
            else:
                round_.evicted(choice)
        for gate in round_.gates_served():
            self._cooled_at[gate] = now
        self._uncovered = round_.uncovered()
        for each in self._uncovered:
            if each.shortage.gate not in self._cooling(shortages, now):
                self._events.add(
                    "eviction-short", each.shortage.gate, f"{each.shortage.resource}: {each.why}"
                )

    def _forget(self, pods: Mapping[str, PodOnNode], now: float) -> None:
        """Drop what is known about pods that left, and what is too old to count."""
        self._remembered = {
            uid: each
            for uid, each in self._remembered.items()
            if uid in pods and now - each.at < _EXPECTED_S
        }
        self._refused = {
            uid: each for uid, each in self._refused.items() if uid in pods and now < each[0]
        }
        self._failures = {key: each for key, each in self._failures.items() if key[0] in pods}
        self._leaving_since = {
            uid: self._leaving_since.get(uid, now) for uid, each in pods.items() if each.terminating
        }
        before, self._kubelets = self._kubelets, {}
        for uid, each in pods.items():
            if each.pod.status_reason == "Evicted":
                # Pods that kubelet evicted before our start say nothing about now.
                self._kubelets[uid] = before.get(uid, now if self._begun else -_KUBELET_S)
        self._begun = True

    def _kubelet_evicts(self, situation: Situation, now: float) -> str:
        """Return why kubelet is taken to evict pods now; "" if it is not."""
        pressures = situation.inputs.node.pressures
        if pressures:
            return f"kubelet evicts pods itself: the Node has {', '.join(sorted(pressures))}"
        for each in situation.pods:
            since = self._kubelets.get(each.pod.uid)
            if since is not None and (each.containers or now - since < _KUBELET_S):
                return f"kubelet evicts pods itself: {each.pod.obj}"
        return ""

    def _hold(self, held: str) -> None:
        if held and held != self._held:
            self._events.add("eviction-held", "node", held, severity=Severity.INFO)
        self._held = held

    def _expected(
        self, shortages: Sequence[Shortage], pods: Mapping[str, PodOnNode], now: float
    ) -> dict[str, dict[Key, int]]:
        """Return what pods that were evicted, or that leave by themselves, will release."""
        expected: dict[str, dict[Key, int]] = {}
        for uid, since in self._leaving_since.items():
            counts = now - since < _EXPECTED_S
            expected[uid] = releases_of(uid, shortages) if counts else {}
        for uid, each in self._remembered.items():
            if uid not in expected:
                counts = now < each.counts_until
                expected[uid] = {**each.releases, **releases_of(uid, shortages)} if counts else {}
        return expected

    def _barred(self, pods: Mapping[str, PodOnNode], now: float) -> dict[str, str]:
        return {
            uid: f"{pods[uid].pod.obj}: {why}; tried again in {until - now:.0f} s"
            for uid, (until, why) in self._refused.items()
        }

    def _cooling(self, shortages: Sequence[Shortage], now: float) -> dict[str, float]:
        """Return the gates that cool down now, each with its cool-down in seconds."""
        cool_downs = {
            each.gate: self.options.cool_downs.get(each.gate, each.cool_down_s)
            for each in shortages
            if each.gate in self._cooled_at
        }
        return {
            gate: cool_down_s
            for gate, cool_down_s in cool_downs.items()
            if now - self._cooled_at[gate] < cool_down_s
        }

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
        if api is not None and self._clock() >= self._away_until and not _is_static(pod):
            if self.options.dry_run:
                return self._would_go(choice, releases)
            answer = await api.evict(pod)
            match answer.answered:
                case Answered.EVICTED:
                    self._goes(choice, releases, "api")
                    return ""
                case Answered.GONE:
                    self._remember(pod, releases)
                    return ""
                case Answered.REFUSED:
                    self._fails(choice, "api", answer.detail)
                    retry = _RETRY_S if answer.retry_after_s is None else answer.retry_after_s
                    until = self._clock() + min(max(retry, 1.0), _LONGEST_RETRY_S)
                    self._refused[pod.uid] = until, answer.detail
                    return answer.detail
                case Answered.UNREACHABLE:
                    self._away_until = self._clock() + _AWAY_S
                    self._fails(choice, "api", answer.detail)
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
        if api is not None and self._clock() >= self._away_until and _is_static(pod):
            return "it is a static pod, which kubelet would start again"
        if self.options.only_by_api or self._stopper is None:
            return (
                "there is no connection to an API server"
                if api is None
                else "the API server does not answer, and containers may not be stopped instead"
            )
        if on_node is None or not on_node.containers:
            return "it has no running container, so its end would release nothing"
        restarts = pod.restart_policy in _RESTARTS
        if choice.shortage.of_requests and restarts and not stops_first:
            return (
                f"kubelet would start its containers again (restartPolicy {pod.restart_policy}),"
                " so stopping them would release no requests"
            )
        return ""

    def _would_go(self, choice: Choice, releases: Mapping[Key, int]) -> str:
        """Report what a dry run leaves out; the pod counts as evicted in the next rounds."""
        self._remember(choice.victim.pod, releases)
        message = f"dry run: would {_message(choice)}; {choice.shortage.numbers}"
        self._report(choice, "dry-run", "would be evicted", message, reason=DRY_RUN)
        return ""

    def _goes(self, choice: Choice, releases: Mapping[Key, int], means: str) -> None:
        """Remember and report an eviction."""
        pod = choice.victim.pod
        self._remember(pod, releases)
        self.evictions += 1
        key = pod.namespace, pod.name
        self._details[key] = self._details.get(key, (0, 0.0))[0] + 1, self._clock()
        message = f"{_message(choice)}; {_means_text(choice, means)}{choice.shortage.numbers}"
        self._report(choice, means, REASON, message)
        if (api := self._api()) is not None:
            api.warn(pod, SUCCESS, message)

    def _fails(self, choice: Choice, means: str, error: str) -> None:
        """Report an eviction that did not happen; an event repeats the first one's words."""
        pod, gate = choice.victim.pod, choice.shortage.gate
        now = self._clock()
        at, message = self._failures.get((pod.uid, gate), (now, ""))
        new = f"{_message(choice)}, error {error}"
        if now - at >= _DETAIL_S or not message.startswith(new):
            at, message = now, f"{new}; {choice.shortage.numbers}"
            self._failures[pod.uid, gate] = at, message
            self._report(choice, means, "failed", message)
        if (api := self._api()) is not None:
            api.warn(pod, FAILURE, message)

    def _report(
        self, choice: Choice, means: str, outcome: str, message: str, *, reason: str = REASON
    ) -> None:
        pod = choice.victim.pod
        self.history.append(
            Evicted(self._wall(), pod.obj, choice.shortage.gate, means, outcome, message)
        )
        self._events.add("eviction", pod.obj, message)
        self._note(Note(0, reason, message, f"{pod.namespace}/{pod.name}"))

    def _remember(self, pod: Pod, releases: Mapping[Key, int]) -> None:
        now = self._clock()
        self._remembered[pod.uid] = _Remembered(now, dict(releases), now + _EXPECTED_S)

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
        self._remember(choice.victim.pod, releases)
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
        try:
            error = await self._stopper.stop(ids, grace_s=grace_s)
        except Exception as fault:  # noqa: BLE001 - reported as this eviction's failure
            error = f"{type(fault).__name__}: {fault}"
        uid = choice.victim.pod.uid
        if error:
            self._remembered.pop(uid, None)
            self._refused[uid] = self._clock() + _RETRY_S, error
            self._fails(choice, "cri", error)
            return
        self._goes(choice, releases, "cri")
        self._remembered[uid].counts_until = self._clock() + _SETTLE_S


def _is_static(pod: Pod) -> bool:
    source, mirror = (pod.annotations.get(key, "") for key in _STATIC)
    return bool(mirror) or source not in ("", "api")


def _message(choice: Choice) -> str:
    """Return upstream's text of an event."""
    pod = choice.victim.pod
    return (
        f"evict Pod:{pod.namespace}/{pod.name}, reason: {REASON}, message: trigger by koordlet"
        f" feature {choice.shortage.gate}, kill pod: {pod.name}"
    )


def _means_text(choice: Choice, means: str) -> str:
    if means != "cri":
        return ""
    policy = choice.victim.pod.restart_policy
    again = f", which kubelet will start again (restartPolicy {policy})"
    return f"stopped its containers{again if policy in _RESTARTS else ''}; "
