"""Memory bandwidth: best-effort pods yield it while the memory of latency-sensitive pods is full.

Not upstream's; the gate `BandwidthSuppress` is ours and off by default. Upstream limits the class
BE to `mbaPercent` once and for all. Here that is the ceiling, and resctrl's monitoring decides.

For each memory domain, of the newest sample, in bytes per second:

    S = traffic of the control groups LSR, LS and BE          L = that of LSR and LS
    u = S / C          C = what the domain's memory carries

Control law: additive increase, multiplicative decrease, with a dead band, once a sample. p is the
percentage that best-effort pods are left:

    p' = max(0.8 p, floor)     if u >= 90 % and L >= 10 % of C, both for 3 s
    p' = min(p + 10, ceiling)  if u < 75 % for 10 s
    p' = p                     otherwise

Multiplicative decrease protects within some samples, and additive increase finds the largest p that
leaves the line free; that is how TCP shares a line. A feedback is needed because the hardware's
percentages delay requests, and how much traffic remains depends on the program. The ceiling is
`mbaPercent`, the floor the least that the machine sets. p is a percentage of the hardware's scale,
or with the mount option mba_MBps of C, and then begins at the present use.

C is `qos.memoryBandwidthMbps`. Where that is 0, it is the largest S that was measured. A line that
was never full cannot be known, so such a maximum counts only from 10 GB/s on, and when it has not
grown by 5 % for ten minutes; and each five minutes best-effort pods get their ceiling back for ten
seconds, in which a larger S corrects it. Without this, limited traffic would confirm too small a C.

p and the learnt C outlast a restart of the daemon.

Traffic of tasks outside the three groups (system services, pods of classes that are off) is not
seen. The bound is composed with the class's schemata, so cache masks and `mbaPercent` stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Annotated, Final, NamedTuple

import msgspec

from hooks.claim import Claim, Op, Rank
from hooks.facts import NodeInputs, ResctrlFacts
from hooks.policies.resctrl_class import POLICY as CLASSES
from hooks.schemata import bandwidth
from hooks.standing import Standing
from hooks.subject import NodeSubject
from koordlet.measurement.series import Metric, Series
from koordlet.qos.strategy import Note, Situation, Strategy, Verdict
from linux.resctrl import format_schemata
from linux.resources import Resource

NAME: Final = "BandwidthSuppress"

FULL: Final = 0.9
"""Chosen: latency of memory rises steeply above about 90 % of what it carries. Less leaves
bandwidth unused; more answers when services already wait."""
FREE: Final = 0.75
"""Chosen: two steps of 10 % of a hardware scale stay below FULL. A wider band returns less."""
_PROTECTED: Final = 0.1
"""Of the line, chosen: below it, latency-sensitive pods hardly wait for memory."""
_DOWN: Final = 0.8
_UP: Final = 10.0
"""Chosen: from 100 % to the floor of 10 % in 11 samples, and back in 9. 10 is Intel's step."""
_HOLD_S: Final = 3.0
_GRACE_S: Final = 10.0
"""Chosen, as for pressure: a single peak is shorter; giving back is not urgent."""
_LEAST_LINE: Final = 10e9
"""Bytes per second, chosen: half of one channel of DDR4-2400. Less fills no server's memory."""
_GROWN: Final = 1.05
_STEADY_S: Final = 600.0
_PROBE_EVERY_S: Final = 300.0
_PROBE_S: Final = 10.0
"""See the module. Chosen: services are disturbed in 3 % of the time while C is learnt."""
_SAMPLE_S: Final = 25.0
"""A sample counts for so long: two of upstream's intervals (10 s), and some delay."""
_LEAST_PERCENT: Final = 10.0
"""The floor, as Intel's machines have it. Less would stop best-effort pods with locks held."""

_MB: Final = 1e6
_MIB_SHIFT: Final = 20
"""The kernel compares mba_MBps values with its counters in MiB/s."""
_GROUP: Final = "BE"
_NODE: Final = NodeSubject().key
_SOURCE: Final = f"gate {NAME}"
_FILES: Final = ("mbm_total_bytes", "mbm_local_bytes")
"""The kernel's counters; the first that a machine has counts."""


class Traffic(NamedTuple):
    """Bytes per second in one memory domain."""

    protected: float
    best_effort: float

    @property
    def total(self) -> float:
        return self.protected + self.best_effort


class Line(msgspec.Struct, frozen=True):
    """What a step remembers of one memory domain.

    percent: left to best-effort pods. seen: total traffic of the last sample. over_since,
    free_since: since when it is full and free. limited_since: since when percent is lower than the
    ceiling. rests_until: no decrease before. largest: the largest total traffic so far. steady,
    grown_at: what it was when it had last grown by 5 %, and when that was.
    """

    percent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 100.0
    seen: float = -1.0
    over_since: float | None = None
    free_since: float | None = None
    limited_since: float | None = None
    rests_until: float = 0.0
    largest: float = 0.0
    steady: float = 0.0
    grown_at: float = 0.0


class Frame(NamedTuple):
    """The constants of a machine and its configuration.

    capacity: configured, in bytes per second; 0 where it is learnt. from_use: a decrease begins at
    the present use. floor, ceiling: percentages.
    """

    capacity: float
    floor: float
    ceiling: float
    from_use: bool


class State(msgspec.Struct, frozen=True, tag_field="version", tag=1):
    """lines: by memory domain."""

    lines: Mapping[int, Line] = {}


def step(state: State, situation: Situation) -> tuple[State, Verdict]:
    """Return the next state, and the bounds of the bandwidth of class BE."""
    inputs = situation.inputs
    facts, why = _offered(inputs)
    if facts is None:
        return State(), Verdict(summary=why)
    frame = _frame(inputs, facts)
    traffic = {domain: traffic_of(situation, domain) for domain in facts.mb_domains}
    lines = {
        domain: next_line(state.lines.get(domain, Line()), found, frame, situation.now)
        for domain, found in traffic.items()
    }
    bounds: dict[int, int] = {}
    parts: list[str] = []
    gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for domain, line in lines.items():
        found = traffic[domain]
        left = min(line.percent, frame.ceiling)
        gauges["bandwidth_suppress_percent", (("domain", str(domain)),)] = left
        if found is not None and left < frame.ceiling:
            bounds[domain] = _value(facts, left, capacity_of(line, frame))
            parts.append(_reason(domain, line, found, frame))
    summary = "; ".join(parts)
    unmeasured = not any(traffic.values())
    if unmeasured:
        summary = "no memory bandwidth of LSR, LS and BE is measured (gate ResctrlCollector)"
    after = State(lines)
    return after, Verdict(
        standing=Standing({_NODE: (_claim(bounds, summary),)}) if bounds else Standing(),
        notes=_notes(state, after, frame, summary),
        gauges=gauges,
        summary=summary,
        unmeasured=unmeasured,
    )


def _offered(inputs: NodeInputs) -> tuple[ResctrlFacts | None, str]:
    """Return what can be bounded, or why nothing can."""
    facts = inputs.kernel.resctrl
    if facts is None or not facts.mb_domains:
        return None, "this machine, or its kernel, cannot allocate memory bandwidth (resctrl MB)"
    if not inputs.settings.gate(CLASSES.gate, default=CLASSES.gate_default):
        return None, f"feature gate {CLASSES.gate}=false: class BE has no control group"
    if not inputs.slo.resource_qos_strategy.be_class.resctrl_qos.enable:
        return None, "beClass.resctrlQOS is off in the NodeSLO: class BE has no control group"
    return facts, ""


def _frame(inputs: NodeInputs, facts: ResctrlFacts) -> Frame:
    ceiling = float(inputs.slo.resource_qos_strategy.be_class.resctrl_qos.mba_percent or 100)
    return Frame(
        capacity=inputs.settings.memory_bandwidth_mbps * _MB,
        floor=min(max(_LEAST_PERCENT, float(facts.min_bandwidth)), ceiling),
        ceiling=ceiling,
        from_use=facts.mba_mbps,
    )


def traffic_of(situation: Situation, domain: int) -> Traffic | None:
    """Return the traffic of one domain; None unless BE and one of LSR and LS are measured."""
    lsr, ls, be = (_rate(situation, group, domain) for group in ("LSR", "LS", _GROUP))
    if be is None or (lsr is None and ls is None):
        return None
    return Traffic((lsr or 0.0) + (ls or 0.0), be)


def _rate(situation: Situation, group: str, domain: int) -> float | None:
    for file in _FILES:
        series = Series(Metric.RESCTRL_BANDWIDTH, group, f"{domain}/{file}")
        rate = situation.measurements.latest(series, within_s=_SAMPLE_S)
        if rate is not None:
            return rate
    return None


# -- the loop ---------------------------------------------------------------------------------


def next_line(line: Line, traffic: Traffic | None, frame: Frame, now: float) -> Line:
    """Return the line after a step; the same one while there is no new sample.

    Without any sample best-effort pods get their ceiling back, and the learnt maximum stays.
    """
    if traffic is None:
        return Line(
            percent=frame.ceiling,
            largest=line.largest,
            steady=line.steady,
            grown_at=line.grown_at,
        )
    if traffic.total == line.seen:
        return line
    steady, grown_at = line.steady, line.grown_at
    if traffic.total > steady * _GROWN:
        steady, grown_at = traffic.total, now
    line = msgspec.structs.replace(
        line, seen=traffic.total, largest=max(line.largest, traffic.total)
    )
    percent = min(line.percent, frame.ceiling)
    capacity = capacity_of(line, frame)
    known = bool(frame.capacity) or (capacity >= _LEAST_LINE and now - grown_at >= _STEADY_S)
    over = (
        known
        and now >= line.rests_until
        and traffic.total >= FULL * capacity
        and traffic.protected >= _PROTECTED * capacity
    )
    free = traffic.total < FREE * capacity
    over_since = (now if line.over_since is None else line.over_since) if over else None
    free_since = (now if line.free_since is None else line.free_since) if free else None
    if over_since is not None and now - over_since >= _HOLD_S:
        use = traffic.best_effort / capacity * 100.0 if frame.from_use else percent
        percent = max(_DOWN * min(percent, use), frame.floor)
    elif free_since is not None and now - free_since >= _GRACE_S:
        percent = min(percent + _UP, frame.ceiling)
    limited_since, rests_until = None, line.rests_until
    if percent < frame.ceiling:
        limited_since = now if line.limited_since is None else line.limited_since
        if not frame.capacity and now - limited_since >= _PROBE_EVERY_S:
            percent, limited_since, over_since = frame.ceiling, None, None
            rests_until = now + _PROBE_S
    return Line(
        percent=percent,
        seen=line.seen,
        over_since=over_since,
        free_since=free_since,
        limited_since=limited_since,
        rests_until=rests_until,
        largest=line.largest,
        steady=steady,
        grown_at=grown_at,
    )


def capacity_of(line: Line, frame: Frame) -> float:
    """Return C, in bytes per second; 0 before anything was measured."""
    return frame.capacity or line.largest


# -- claims -----------------------------------------------------------------------------------


def _value(facts: ResctrlFacts, percent: float, capacity: float) -> int:
    """Return the MB value that leaves best-effort pods this percentage."""
    if facts.mba_mbps:
        return max(int(capacity * percent / 100.0) >> _MIB_SHIFT, 1)
    return bandwidth(facts, ceil(percent))


def _claim(bounds: Mapping[int, int], reason: str) -> Claim:
    return Claim(
        resource=Resource.RESCTRL_SCHEMATA,
        key=_GROUP,
        value=format_schemata({"MB": bounds}),
        policy=NAME,
        reason=reason,
        source=_SOURCE,
        op=Op.WITHIN,
        rank=Rank.EMERGENCY,
    )


def _reason(domain: int, line: Line, traffic: Traffic, frame: Frame) -> str:
    learnt = "" if frame.capacity else " (learnt)"
    protected, best_effort = traffic.protected / 1e9, traffic.best_effort / 1e9
    return (
        f"domain {domain}: class BE is left {line.percent:.0f} %: LSR and LS {protected:.1f} + BE"
        f" {best_effort:.1f} of {capacity_of(line, frame) / 1e9:.1f} GB/s{learnt}"
    )


def _notes(before: State, after: State, frame: Frame, summary: str) -> tuple[Note, ...]:
    """Return an audit line when a bound begins or ends."""

    def limited(state: State) -> frozenset[int]:
        return frozenset(one for one, line in state.lines.items() if line.limited_since is not None)

    if limited(before) == limited(after):
        return ()
    ended = "class BE has its whole memory bandwidth again"
    return (Note(3, NAME, summary if limited(after) else ended),)


def disabled(inputs: NodeInputs) -> str:
    """Return why no bandwidth can be bounded; "" where some can."""
    return _offered(inputs)[1]


STRATEGY: Final = Strategy(
    name=NAME,
    gates={NAME: False},
    interval_s=1.0,
    ttl_s=10.0,  # as CPU suppression
    initial=State,
    step=step,
    disabled=disabled,
    kept=State,
)
