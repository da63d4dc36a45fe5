"""Pressure control: best-effort pods yield CPU and memory while latency-sensitive pods wait.

Not upstream's; the gate `PressureSuppress` is ours and off by default. CPU suppression is
feed-forward: it knows how much CPU is used, and not which pods wait for it. Pressure (PSI) is
the missing feedback: the share of time in which tasks of a group waited for a resource.

Control law, for CPU and for memory by itself. The squeeze x lies between 0 (nothing is claimed) and
1 (best-effort pods are held at their floor). p is the highest pressure among the latency-sensitive
pods, T the target, dt the time since the last step:

    p > T for 3 s:        x' = x + dt min(p / T / 4, 1)² / 10 s     4 T and more: full in 10 s
    p < T / 2 for 10 s:   x' = x - dt min(T / p / 4, 1)² / 50 s     T / 4 and less: gone in 50 s
    otherwise:            x' = x

    quota of all best-effort pods = floor + (1 - x) (use when the squeeze began - floor)
    memory.high of each           = floor + (1 - x) (use when the squeeze began - floor)

Two programs of others have laws that this one takes its parts from. senpai finds a workload's
memory need by moving its memory.high: it compares the stalled time with a target, and answers with
the square of the relative error, bounded, in small steps towards less memory and large ones back,
after some quiet time. Here the error of one group moves the limits of another, so the roles of
small and large steps are changed: protecting is fast, giving back slow. oomd ends a group only when
pressure has stayed above a threshold for a time, and waits after each act. Here this is the time
before the squeeze grows, and the rest after it was of no use.

Anti-windup. x is bounded, and grows only while it can have an effect: when best-effort pods use at
least 80 % of what they are left, or, at its beginning, more than their floor. If the pressure is
still above the target after a minute at x = 1, its cause lies elsewhere: x returns to 0 and rests
for five minutes.

x outlasts a restart of the daemon with the uses that it counts from: the use of squeezed pods would
be too small a beginning. What the claims of before the restart hold back stays until the first
sample of pressure.

Pressure of a pod's own making does not count: CPU pressure of a pod whose quota throttles it, and
memory pressure of a pod that uses 90 % of its own limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Annotated, Final, NamedTuple

import msgspec

from apis.keys import BATCH_MEMORY
from apis.qos import KubeQoS
from hooks.amounts import limit_of_pod, memory_request, request_of_pod
from hooks.claim import Claim, Op, Rank
from hooks.standing import Claims, Standing, merged
from hooks.subject import Amounts, Pod, PodSubject, QosSubject
from koordlet.measurement.series import LATEST_PERIODS, Metric, Series
from koordlet.qos.strategies.best_effort import LIFTED_AHEAD_S, is_best_effort, lifted_below
from koordlet.qos.strategies.candidates import extended_request
from koordlet.qos.strategy import Note, Situation, Strategy, Verdict
from linux.resources import UNLIMITED, Resource

NAME: Final = "PressureSuppress"

CPU_TARGET: Final = 10.0
MEMORY_TARGET: Final = 5.0
"""Percent of the time, chosen. Tasks of an undisturbed service wait for CPU in a few percent of the
time. Waiting for memory costs more, because it ends with the disk. Twice the value lets latency
grow further before best-effort pods yield; half of it squeezes them for ordinary peaks."""
_HOLD_S: Final = 3.0
"""Chosen: a single peak is shorter. Each further second is latency of the pods that wait."""
_GRACE_S: Final = 10.0
"""Chosen: the window of the kernel's shortest average. Less gives back between two peaks."""
_RELEASE_BELOW: Final = 0.5
"""Of the target; between both nothing moves, so that x does not swing around the target."""
_STEEP: Final = 4.0
"""Pressure by target (or target by pressure) at which x moves at its full rate."""
_GROWTH: Final = 1 / 10.0
_DECAY: Final = 1 / 50.0
"""Full rates of x per second, chosen: the first is as fast as samples of 1 s can follow. Twice the
second returns capacity while the pressure may come back with it."""
_FUTILE_S: Final = 60.0
"""Chosen: at x = 1 pods need seconds to give up CPU and memory. Twice the value holds best-effort
pods at their floor for a minute more without use."""
_REST_S: Final = 300.0
"""Chosen: while the cause lies elsewhere, best-effort pods are at their floor for a sixth of the
time; with half of the value for two sevenths."""
_BINDING: Final = 0.8
"""Of what best-effort pods are left. Chosen: below it a smaller bound would take nothing away."""
_LONGEST_GAP_S: Final = 5.0
"""Chosen: for how long one sample of pressure counts as the pressure between two steps. Twice the
value lets one sample after a stall move x by its full range."""
_SAMPLE_S: Final = 25.0
"""A sample of pressure counts for so long: two of upstream's intervals (10 s), and some delay."""
_OWN_LIMIT: Final = 0.9
"""Of a pod's memory limit. Chosen: from there on the kernel reclaims the pod's own memory."""
_LEVELS: Final = 50
"""Steps of x that limits follow: 2 % each, so that a small move of x writes nothing."""

_FLOOR_QUOTA_US: Final = 100_000
"""Chosen: one CPU for all best-effort pods. Without it they hold locks and memory without end."""
_FLOOR_BYTES: Final = 128 << 20
"""Chosen: the least that a pod without a request keeps; less is mostly its program text."""
_US_PER_MILLI: Final = 100
"""A milli-core is 100 µs of the 100 ms in which canonical quotas count."""

_SOURCE: Final = f"gate {NAME}"
_LEAST_RANK: Final = 0
"""Below every claim: the base that a bound needs where nothing else sets a value."""
_ROOT: Final = QosSubject(KubeQoS.BESTEFFORT, "").key


class Loop(msgspec.Struct, frozen=True):
    """The state of one control loop.

    squeeze: x. at: of the last step. over_since, calm_since, full_since: since when the pressure is
    above the target, below the release, and x is 1 with the pressure above the target.
    rests_until: no growth before. references: use when the squeeze began, by what it bounds.
    """

    squeeze: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    at: float | None = None
    over_since: float | None = None
    calm_since: float | None = None
    full_since: float | None = None
    rests_until: float = 0.0
    references: Mapping[str, int] = {}


class State(msgspec.Struct, frozen=True, tag_field="version", tag=1):
    """lifted_at: since when best-effort pods have no quotas of their own, for the sake of a common
    one; None without a common quota."""

    cpu: Loop = Loop()
    memory: Loop = Loop()
    lifted_at: float | None = None


def lapsed(state: State) -> State:
    """Return the state without claims in force: the loops go on, and quotas need a new lead."""
    return msgspec.structs.replace(state, lifted_at=None)


class Pressure(NamedTuple):
    """The highest pressure in percent, and whose it is."""

    percent: float
    pod: str


class Bounded(NamedTuple):
    """What a loop can bound: present use and floor, by name; µs per 100 ms, or bytes."""

    use: Mapping[str, int]
    floor: Mapping[str, int]


def step(state: State, situation: Situation) -> tuple[State, Verdict]:
    """Return the next state, and the bounds of best-effort pods' quota and memory."""
    cpu_pressure = pressure_of(situation, "cpu", _throttled)
    memory_pressure = pressure_of(situation, "mem", _at_own_limit)
    cpu_bounded = _cpu_bounded(situation)
    memory_bounded = _memory_bounded(situation)
    cpu = loop_step(state.cpu, cpu_pressure, CPU_TARGET, cpu_bounded, situation.now)
    memory = loop_step(state.memory, memory_pressure, MEMORY_TARGET, memory_bounded, situation.now)
    claims: dict[str, Claims] = {}
    for name, quota_us in bounds(cpu, cpu_bounded).items():
        reason = _reason("CPU", cpu, cpu_pressure, CPU_TARGET)
        claims[name] = _at_most(Resource.CPU_CFS_QUOTA, quota_us, reason)
    for name, high in bounds(memory, memory_bounded).items():
        reason = _reason("memory", memory, memory_pressure, MEMORY_TARGET)
        claims[name] = _at_most(Resource.MEMORY_HIGH, high, reason)
    parts = [
        _reason(name, loop, pressure, target)
        for name, loop, pressure, target in (
            ("CPU", cpu, cpu_pressure, CPU_TARGET),
            ("memory", memory, memory_pressure, MEMORY_TARGET),
        )
        if loop.squeeze or situation.now < loop.rests_until
    ]
    summary = "; ".join(parts)
    unmeasured = cpu_pressure is None and memory_pressure is None
    if unmeasured:
        summary = (
            "no pressure of latency-sensitive pods is measured: it needs gate PSICollector, and"
            " cgroup v2 or Alibaba's kernel"
        )
    lifted, lifted_at = Standing(), None
    if _ROOT in claims:
        held = "the quota of all best-effort pods holds this one"
        lifted = lifted_below(situation, NAME, held, _SOURCE)
        lifted_at = situation.now if state.lifted_at is None else state.lifted_at
        if lifted.by_class and situation.now - lifted_at < LIFTED_AHEAD_S:
            # Containers that the runtime is creating still have a quota of their own.
            del claims[_ROOT]
    after = State(cpu, memory, lifted_at)
    return after, Verdict(
        standing=merged([Standing(claims), lifted]),
        notes=tuple(_notes(state, after, parts)),
        gauges={
            ("pressure_squeeze_ratio", (("resource", "cpu"),)): cpu.squeeze,
            ("pressure_squeeze_ratio", (("resource", "memory"),)): memory.squeeze,
        },
        summary=summary,
        unmeasured=unmeasured,
    )


# -- what is measured -------------------------------------------------------------------------


def pressure_of(
    situation: Situation, resource: str, own_making: Callable[[Situation, Pod], bool]
) -> Pressure | None:
    """Return the highest `some` pressure among latency-sensitive pods; None if none was measured.

    The share of the last sampling interval counts; where that is missing, the average over 10 s.
    """
    measured = situation.measurements
    highest: Pressure | None = None
    for one in situation.pods:
        pod = one.pod
        if is_best_effort(pod) or pod.ended or own_making(situation, pod):
            continue
        percent = measured.latest(
            Series(Metric.POD_PSI, pod.uid, f"{resource}.some.stall"), within_s=_SAMPLE_S
        )
        if percent is None:
            series = Series(Metric.POD_PSI, pod.uid, f"{resource}.some.avg10")
            percent = measured.latest(series, within_s=_SAMPLE_S)
        if percent is not None and (highest is None or percent > highest.percent):
            highest = Pressure(percent, f"{pod.namespace}/{pod.name}")
    return highest


def _recent(situation: Situation, metric: Metric, of: str = "") -> float | None:
    within_s = LATEST_PERIODS * situation.interval_s
    return situation.measurements.latest(Series(metric, of), within_s=within_s)


def _throttled(situation: Situation, pod: Pod) -> bool:
    return bool(_recent(situation, Metric.POD_CPU_THROTTLED, pod.uid))


def _at_own_limit(situation: Situation, pod: Pod) -> bool:
    limit = limit_of_pod(pod, _memory_limit, memory_request) if pod.specs else UNLIMITED
    used = _recent(situation, Metric.POD_MEMORY_WITH_PAGE_CACHE, pod.uid)
    return limit > 0 and used is not None and used >= _OWN_LIMIT * limit


def _memory_limit(amounts: Amounts) -> int | None:
    return amounts.memory_limit_bytes


def _batch_memory(amounts: Amounts) -> int | None:
    return amounts.batch_memory_request_bytes


def _requested_memory(pod: Pod) -> int:
    """Return the pod's batch-memory request; without a specification that of its annotation."""
    if pod.specs:
        return request_of_pod(pod, _batch_memory)
    return extended_request(pod, _batch_memory, BATCH_MEMORY)


def _cpu_bounded(situation: Situation) -> Bounded:
    used = _recent(situation, Metric.BE_CPU_USED)
    config = situation.inputs.slo.resource_used_threshold_with_be
    least_milli = situation.node.cpu_milli * (config.cpu_suppress_min_percent or 0) // 100
    floor = max(_FLOOR_QUOTA_US, least_milli * _US_PER_MILLI)
    return Bounded({} if used is None else {_ROOT: int(used * _US_PER_MILLI)}, {_ROOT: floor})


def _memory_bounded(situation: Situation) -> Bounded:
    if Resource.MEMORY_HIGH not in situation.inputs.kernel.supported:
        return Bounded({}, {})
    use: dict[str, int] = {}
    floor: dict[str, int] = {}
    for one in situation.pods:
        pod = one.pod
        if not is_best_effort(pod) or pod.ended:
            continue
        used = _recent(situation, Metric.POD_MEMORY_WITH_PAGE_CACHE, pod.uid)
        if used is not None:
            key = PodSubject(pod).key
            use[key] = int(used)
            floor[key] = max(_FLOOR_BYTES, _requested_memory(pod))
    return Bounded(use, floor)


# -- the loop ---------------------------------------------------------------------------------


def loop_step(
    loop: Loop, pressure: Pressure | None, target: float, bounded: Bounded, now: float
) -> Loop:
    """Return the loop after a step. Without a sample of pressure it begins again at 0."""
    if pressure is None:
        return Loop(at=now, rests_until=loop.rests_until)
    percent = pressure.percent
    dt = 0.0 if loop.at is None else min(max(now - loop.at, 0.0), _LONGEST_GAP_S)
    over = percent > target
    calm = percent < _RELEASE_BELOW * target
    over_since = (now if loop.over_since is None else loop.over_since) if over else None
    calm_since = (now if loop.calm_since is None else loop.calm_since) if calm else None
    squeeze = loop.squeeze
    if over_since is not None and now - over_since >= _HOLD_S and now >= loop.rests_until:
        if _has_effect(loop, bounded):
            squeeze = min(squeeze + dt * growth(percent, target), 1.0)
    elif calm_since is not None and now - calm_since >= _GRACE_S:
        squeeze = max(squeeze - dt * decay(percent, target), 0.0)
    full_since, rests_until = None, loop.rests_until
    if over and squeeze >= 1.0:
        full_since = now if loop.full_since is None else loop.full_since
        if now - full_since >= _FUTILE_S:
            squeeze, full_since, rests_until = 0.0, None, now + _REST_S
    references = _references(loop, bounded) if squeeze > 0.0 else {}
    return Loop(squeeze, now, over_since, calm_since, full_since, rests_until, references)


def _references(loop: Loop, bounded: Bounded) -> dict[str, int]:
    """Return the use to count from: when the squeeze began, or when it first exceeded the floor.

    What was not measured this time keeps its reference; what is gone loses it.
    """
    kept = {name: used for name, used in loop.references.items() if name in bounded.floor}
    first = {name: used for name, used in bounded.use.items() if used > bounded.floor[name]}
    return first | kept


def growth(percent: float, target: float) -> float:
    """Return by how much x grows in a second at a pressure above the target."""
    return _GROWTH * min(percent / target / _STEEP, 1.0) ** 2


def decay(percent: float, target: float) -> float:
    """Return by how much x falls in a second at a pressure below the release."""
    ratio = _STEEP if percent <= 0 else target / percent
    return _DECAY * min(ratio / _STEEP, 1.0) ** 2


def _has_effect(loop: Loop, bounded: Bounded) -> bool:
    """Return whether a larger squeeze would take something away."""
    if loop.squeeze == 0.0:
        return any(used > bounded.floor[name] for name, used in bounded.use.items())
    left = bounds(loop, bounded)
    return any(bounded.use.get(name, 0) >= _BINDING * most for name, most in left.items())


def bounds(loop: Loop, bounded: Bounded) -> dict[str, int]:
    """Return what each may use at most, in the unit of its use; nothing without a squeeze."""
    level = ceil(loop.squeeze * _LEVELS) / _LEVELS
    return {
        name: floor + ceil(round((1.0 - level) * (used - floor), 6))
        for name, used in loop.references.items()
        if used > (floor := bounded.floor.get(name, used))
    }


# -- claims -----------------------------------------------------------------------------------


def _at_most(resource: Resource, value: int, reason: str) -> Claims:
    """Return the claims that bound a value, also where nothing else sets it."""
    base = Claim(
        resource=resource,
        value=UNLIMITED,
        policy=NAME,
        reason="the base of the bound by pressure",
        source=_SOURCE,
        rank=_LEAST_RANK,
    )
    bound = msgspec.structs.replace(
        base, value=value, reason=reason, op=Op.WITHIN, rank=Rank.EMERGENCY
    )
    return base, bound


def _reason(name: str, loop: Loop, pressure: Pressure | None, target: float) -> str:
    waits = "no pressure measured"
    if pressure is not None:
        waits = f"{pressure.pod} waits for {name} {pressure.percent:.0f} % (target {target:g} %)"
    if not loop.squeeze and loop.rests_until:
        return f"{waits}: the squeeze was of no use and rests"
    return f"{waits}: squeezed {loop.squeeze:.0%}"


def _notes(before: State, after: State, parts: list[str]) -> list[Note]:
    """Return an audit line when a squeeze begins, ends, or turns out to be of no use."""
    changed = any(
        bool(was.squeeze) != bool(loop.squeeze)
        for was, loop in ((before.cpu, after.cpu), (before.memory, after.memory))
    )
    if not changed:
        return []
    return [Note(3, NAME, "; ".join(parts) or "best-effort pods are not squeezed any more")]


STRATEGY: Final = Strategy(
    name=NAME,
    gates={NAME: False},
    interval_s=1.0,
    ttl_s=10.0,  # as CPU suppression
    initial=State,
    step=step,
    kept=State,
    lapsed=lapsed,
)
