"""CPU burst: throttled containers may use more than their CPU limit while the node has room.

Two means, each for pods that are not LSE, LSR or BE, with policy `cpuBurstOnly`,
`cfsQuotaBurstOnly` or `auto` (both), from the NodeSLO or the pod's annotation.

Static burst: the kernel saves up to `limit x cpuBurstPercent %` of unused quota for later periods.
Mainline kernels accept no burst above the quota; the executor keeps it there and shows it.

Quota burst, a control law with multiplicative steps. Once a second, for a container with a limit:

    quota' = quota x 1.2   if it is throttled and the node is idle
    quota' = quota x 0.8   if the node is overloaded, or the container has used up its tokens
    quota' = limit         if the policy says so
    limit <= quota' <= limit x cfsQuotaBurstPercent %

Throttled is a container whose newest sample shows throttling, and 5 % of whose periods in the last
5 s were throttled. A raised quota also goes down by 0.8 when the container was not throttled for a
minute and uses less than 80 % of what it would have then.

The node's load is r = use of the share pool / size of the share pool, averaged. At or above T =
sharePoolThresholdPercent it is overloaded, from 0.9 T on it cools down (nothing goes up), below it
is idle.

Tokens (`cfsQuotaBurstPeriodSeconds` of 0 and more) bound how long a container stays above its
limit. A bucket holds C = period x (cfsQuotaBurstPercent - 100); in dt seconds at u percent of the
limit it loses (u - 100) dt for u >= 100 and gains (100 - u) dt for u < 60, within -C and C.
Bursting needs more than 0. The state outlasts a restart of the daemon, so that only a new container
has a new bucket.

The quota is claimed as a factor of what kubelet requested, so it composes with CPU normalisation,
and a quota that another policy has lifted stays lifted. A pod's factor is computed from its
containers in each step, and so is exact when one of them restarts.

Upstream's rule and the worked examples: docs/facts/koordlet.md, "CPU burst".
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec

from apis.annotations import parse_cpu_burst
from apis.errors import InputError
from apis.keys import ANNOTATION_CPU_BURST
from apis.nodeslo import CPUBurstPolicy, CPUBurstStrategy
from apis.qos import QoSClass
from hooks import compat
from hooks.amounts import cpu_request, request_of_pod, requested_of_pod
from hooks.check import LARGEST_FACTOR
from hooks.claim import Claim, Op, Rank
from hooks.facts import NodeInputs
from hooks.policies import cpu_normalization
from hooks.requested import requested_value
from hooks.standing import Claims, Standing
from hooks.subject import ContainerSubject, Pod, PodSubject
from koordlet.measurement.series import LATEST_PERIODS, Metric, Series
from koordlet.qos.strategy import Note, PodOnNode, Situation, Strategy, Verdict
from linux.cgroup_files import DEFAULT_PERIOD_US, MIN_QUOTA_US
from linux.resources import Resource

NAME: Final = "CPUBurst"

_UP: Final = 1.2
_DOWN: Final = 0.8
"""Upstream's steps of the quota."""
_COOLING: Final = 0.9
"""Upstream's: the part of the threshold from which the node cools down."""
_FULL: Final = 100.0
_REFILL_BELOW: Final = 60.0
"""Upstream's percentages of the limit: from the first on a bucket loses tokens, below the second it
gains them."""
_FIRST_TOKENS: Final = 0.25
"""The part of the bucket that a new container has: the mean of upstream's random start."""
_LONGEST_GAP_S: Final = 10.0
"""Chosen: the time between two steps for which one sample of use stands. After a longer pause
nothing is known about the use meanwhile."""
_ABSENT_S: Final = 60.0
"""Chosen: how long the tokens of a container that is not listed are remembered. A source of pods
that is away at a start is back by then; twice the value remembers ended containers for longer."""
_LOAD_INTERVALS: Final = 5
_LOAD_WINDOW_S: Final = 10.0
"""Upstream's: the node's load is averaged over 5 intervals, at most 10 s."""
_THROTTLE_WINDOW_S: Final = 5.0
_THROTTLED: Final = 0.05
"""Chosen: of the periods (100 ms) of 5 s three must be throttled, so that one throttled period
raises nothing. Twice the share makes short bursts wait longer for their quota."""
_CALM_S: Final = 60.0
"""Chosen: how long a raised quota is kept without need. Twice the value keeps more quota above the
limits of idle containers; a much smaller one lets periodic loads throttle at each start."""
_ROOM: Final = 0.8
"""Chosen: use in parts of the lowered quota above which a calm container keeps its quota."""

_SLO: Final = "NodeSLO spec.cpuBurstStrategy"
_RAISED: Final = ("cpu_burst_raised_quotas", ())
"""How many containers have a raised quota; our own gauge."""
_ANNOTATION: Final = f"annotation {ANNOTATION_CPU_BURST}"
_APART: Final = frozenset({QoSClass.LSE, QoSClass.LSR, QoSClass.BE})
_LIVING: Final = frozenset({"", "Pending", "Running"})
_BURSTS: Final = frozenset({CPUBurstPolicy.AUTO, CPUBurstPolicy.CPU_BURST_ONLY})
_SCALES: Final = frozenset({CPUBurstPolicy.AUTO, CPUBurstPolicy.CFS_QUOTA_BURST_ONLY})

_WITHOUT_EFFECT: Final = (
    "of them without effect, since the quota of their pod is not known and stays: give koordlet the"
    " Pod objects (kubelet.enabled or kubernetes.pods)"
)


class NodeState(StrEnum):
    IDLE = "idle"
    COOLING = "cooling"
    OVERLOAD = "overloaded"
    UNKNOWN = "not measured"


class Operation(StrEnum):
    UP = "up"
    DOWN = "down"
    REMAIN = "remain"
    RESET = "reset"


class Bucket(msgspec.Struct, frozen=True):
    """Tokens in percent of the limit times seconds. at: the moment of the last step."""

    tokens: float
    capacity: float
    at: float


class Held(msgspec.Struct, frozen=True):
    """What a step remembers of a container.

    base_us: the limit, per 100 ms, before normalisation. quota_us: in force, likewise. burst_us:
    claimed. bucket: None without a limit of time. throttled_at: when it was last throttled, or
    first seen. reason: of the last change of the quota. absent_since: since when it is not listed.
    """

    base_us: int
    quota_us: int
    burst_us: int
    throttled_at: float
    bucket: Bucket | None = None
    reason: str = ""
    absent_since: float | None = None


class State(msgspec.Struct, frozen=True, tag_field="version", tag=1):
    """containers: by id, those of the last step, and those with tokens that were not listed."""

    containers: Mapping[str, Held] = {}


class Config(NamedTuple):
    """The strategy for one pod. source: the input field that decided."""

    strategy: CPUBurstStrategy
    source: str
    rank: int


class Load(NamedTuple):
    """The node's load. ratio: use by size of the share pool."""

    state: NodeState
    ratio: float

    def __str__(self) -> str:
        if self.state is NodeState.UNKNOWN:
            return "the share pool is not measured"
        return f"node {self.state}, {self.ratio:.0%} of the share pool in use"


def step(state: State, situation: Situation) -> tuple[State, Verdict]:
    """Return the next state, and the claims on bursts and quotas of containers and pods."""
    load: Load | None = None
    held: dict[str, Held] = {}
    by_subject: dict[str, Claims] = {}
    notes: list[Note] = []
    gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    faults: list[InputError] = []
    rule = _normalisation(situation.inputs)
    has_burst = Resource.CPU_CFS_BURST in situation.inputs.kernel.supported
    wants_burst = False
    raised = bounded = 0
    for one in situation.pods:
        pod = one.pod
        if pod.qos in _APART or pod.phase not in _LIVING:
            continue
        config, error = config_of(pod, situation.inputs.slo.cpu_burst_strategy)
        if error is not None:
            faults.append(error)
        if config.strategy.policy is CPUBurstPolicy.NONE:
            continue
        if load is None:
            load = load_of(situation)
        wants_burst = wants_burst or config.strategy.policy in _BURSTS
        of_pod = {}
        for container in one.containers:
            before, ratio = state.containers.get(container.id), _ratio(rule, container)
            after = _container_step(
                before,
                container,
                config.strategy,
                load,
                situation,
                ratio=ratio,
                has_burst=has_burst,
            )
            if after is not None:
                of_pod[container.id] = after
        by_subject |= _claims(one, of_pod, config)
        held |= of_pod
        raised_here = sum(1 for each in of_pod.values() if each.quota_us > each.base_us)
        raised += raised_here
        if _bounded_by_pod(one, of_pod):
            bounded += raised_here
        _record(one, of_pod, state, notes, gauges)
    if load is None:
        summary = _no_pod(situation.inputs.slo.cpu_burst_strategy)
    else:
        summary = f"{raised} of {len(held)} quotas raised: {load}"
        gauges[_RAISED] = float(raised)
    if bounded:
        summary += f"; {bounded} {_WITHOUT_EFFECT}"
    if wants_burst and not has_burst:
        summary += "; this kernel has no CFS burst"
    return State(held | _absent(state, held, situation.now)), Verdict(
        standing=Standing(by_subject),
        notes=tuple(notes),
        gauges=gauges,
        summary=summary,
        faults=tuple(faults),
        unmeasured=load is not None and load.state is NodeState.UNKNOWN,
    )


def _no_pod(node: CPUBurstStrategy) -> str:
    """Return why no pod's quota may move."""
    if node.policy is CPUBurstPolicy.NONE:
        return f"{_SLO}.policy is none, and no running pod's annotation says otherwise"
    return "no pod runs whose quota may be raised"


def config_of(pod: Pod, node: CPUBurstStrategy) -> tuple[Config, InputError | None]:
    """Return the pod's strategy: the node's under the annotation's fields.

    A bad annotation counts as none, and its error is returned.
    """
    plain = Config(node, _SLO, Rank.DEFAULT)
    text = pod.annotations.get(ANNOTATION_CPU_BURST)
    if not text:
        return plain, None
    try:
        own = parse_cpu_burst(text, obj=pod.obj)
    except InputError as error:
        return plain, error
    fields = {
        name: value for name in own.__struct_fields__ if (value := getattr(own, name)) is not None
    }
    merged = msgspec.structs.replace(node, **fields)
    return Config(merged, _ANNOTATION if fields else _SLO, Rank.POD), None


# -- the node ---------------------------------------------------------------------------------


def load_of(situation: Situation) -> Load:
    """Return the load of the share pool: CPUs and use without LSE, LSR and BE pods."""
    measured = situation.measurements
    window_s = min(_LOAD_INTERVALS * situation.interval_s, _LOAD_WINDOW_S)
    used = measured.average(Series(Metric.NODE_CPU), within_s=window_s)
    if used is None:
        return Load(NodeState.UNKNOWN, 0.0)
    size_milli = situation.node.cpu_milli
    for one in situation.pods:
        if one.pod.qos not in _APART or one.pod.phase not in _LIVING:
            continue
        series = Series(Metric.POD_CPU, one.pod.uid)
        used -= measured.average(series, within_s=window_s) or 0.0
        if one.pod.qos is not QoSClass.BE:
            size_milli -= request_of_pod(one.pod, cpu_request)
    ratio = round(max(used, 0.0) * 1000 / size_milli, 9) if size_milli > 0 else 1.0
    return Load(
        node_state(ratio, situation.inputs.slo.cpu_burst_strategy.share_pool_threshold_percent),
        ratio,
    )


def node_state(ratio: float, threshold_percent: int) -> NodeState:
    """Return the state for a load, without the rounding errors of percentages."""
    threshold = threshold_percent / 100
    if ratio >= threshold:
        return NodeState.OVERLOAD
    return NodeState.COOLING if ratio >= round(_COOLING * threshold, 9) else NodeState.IDLE


def _normalisation(inputs: NodeInputs) -> cpu_normalization.Rule | None:
    """Return the rule of CPU normalisation, None while it divides nothing."""
    policy = cpu_normalization.POLICY
    if not inputs.settings.gate(policy.gate, default=policy.gate_default):
        return None
    try:
        rule = cpu_normalization.parse(inputs)
    except InputError:
        return None  # the policy reports it
    return rule if isinstance(rule, cpu_normalization.Rule) else None


def _ratio(rule: cpu_normalization.Rule | None, container: ContainerSubject) -> float:
    """Return by what normalisation divides the container's quota; 1.0 where it does not."""
    if rule is None or not cpu_normalization.claim(rule, container):
        return 1.0
    return rule.ratio


# -- a container ------------------------------------------------------------------------------


def _container_step(
    before: Held | None,
    container: ContainerSubject,
    config: CPUBurstStrategy,
    load: Load,
    situation: Situation,
    *,
    ratio: float,
    has_burst: bool,
) -> Held | None:
    """Return what is held of a container now, None for one without a CPU limit."""
    requested = requested_value(container, Resource.CPU_CFS_QUOTA)
    if not isinstance(requested, int) or requested <= 0:
        return None
    base = max(requested, MIN_QUOTA_US)
    now, measured = situation.now, situation.measurements
    recent_s = LATEST_PERIODS * situation.interval_s
    used = measured.latest(Series(Metric.CONTAINER_CPU, container.id), within_s=recent_s)
    limit_cores = base / ratio / DEFAULT_PERIOD_US
    percent = _FULL if used is None else max(used, 0.0) / limit_cores * 100
    bucket = filled(None if before is None else before.bucket, config, percent, now)
    throttled = _throttled(container.id, situation)
    operation = operation_of(config, load.state, throttled=throttled, bucket=bucket)
    quota = base if before is None else before.quota_us
    throttled_at = now if before is None or throttled else before.throttled_at
    calm = (
        throttled is False
        and now - throttled_at >= _CALM_S
        and compat.BURST_QUOTA_STAYS not in situation.inputs.settings.compat
    )
    if calm and operation is Operation.REMAIN and percent * base / 100 < quota * _DOWN * _ROOM:
        operation = Operation.DOWN
    target = moved(quota, base, config.cfs_quota_burst_percent, operation)
    reason = "" if before is None else before.reason
    if target != quota:
        why = {
            Operation.UP: "throttled",
            Operation.DOWN: "calm" if calm else "tokens used up" if _exhausted(bucket) else "",
        }.get(operation, "")
        reason = "; ".join(part for part in (why, str(load)) if part)
    bursts = has_burst and config.policy in _BURSTS
    burst = int(base / ratio) * config.cpu_burst_percent // 100 if bursts else 0
    return Held(base, target, burst, throttled_at, bucket, reason)


def _absent(before: State, held: Mapping[str, Held], now: float) -> dict[str, Held]:
    """Return the containers whose tokens are remembered though they take no part in this step.

    Else a source of pods that is away for a moment would fill every bucket again.
    """
    found = {}
    for key, each in before.containers.items():
        since = now if each.absent_since is None else each.absent_since
        if key not in held and each.bucket is not None and now - since < _ABSENT_S:
            found[key] = msgspec.structs.replace(
                each, quota_us=each.base_us, burst_us=0, reason="", absent_since=since
            )
    return found


def _throttled(container_id: str, situation: Situation) -> bool | None:
    """Return whether the container is throttled, None without a recent sample."""
    measured, series = situation.measurements, Series(Metric.CONTAINER_CPU_THROTTLED, container_id)
    latest = measured.latest(series, within_s=LATEST_PERIODS * situation.interval_s)
    if latest is None:
        return None
    if latest <= 0:
        return False
    if compat.BURST_ON_ANY_THROTTLING in situation.inputs.settings.compat:
        return True
    window_s = max(_THROTTLE_WINDOW_S, LATEST_PERIODS * situation.interval_s)
    return (measured.average(series, within_s=window_s) or latest) >= _THROTTLED


def filled(
    bucket: Bucket | None, config: CPUBurstStrategy, percent: float, now: float
) -> Bucket | None:
    """Return the bucket after the time since its last step at `percent` of the limit.

    None: the time of a burst is not limited. A bucket whose size has changed is as full as before.
    """
    period_s = config.cfs_quota_burst_period_seconds
    if period_s < 0:
        return None
    capacity = float(period_s * max(config.cfs_quota_burst_percent - 100, 0))
    if bucket is None:
        return Bucket(_FIRST_TOKENS * capacity, capacity, now)
    tokens = bucket.tokens
    if bucket.capacity != capacity:
        fullness = tokens / bucket.capacity if bucket.capacity else _FIRST_TOKENS
        tokens = fullness * capacity
    passed_s = min(max(now - bucket.at, 0.0), _LONGEST_GAP_S)
    if percent >= _FULL:
        tokens -= (percent - _FULL) * passed_s
    elif percent < _REFILL_BELOW:
        tokens += (_FULL - percent) * passed_s
    return Bucket(min(max(tokens, -capacity), capacity), capacity, now)


def _exhausted(bucket: Bucket | None) -> bool:
    return bucket is not None and bucket.tokens <= 0


def operation_of(
    config: CPUBurstStrategy, node: NodeState, *, throttled: bool | None, bucket: Bucket | None
) -> Operation:
    """Return what happens to a container's quota; throttled: None if it was not measured."""
    if config.policy not in _SCALES:
        return Operation.RESET
    if _exhausted(bucket):
        operation = Operation.DOWN
    else:
        operation = Operation.UP if throttled else Operation.REMAIN
    if node is NodeState.OVERLOAD:
        return Operation.DOWN
    if node is not NodeState.IDLE and operation is Operation.UP:
        return Operation.REMAIN
    return operation


def moved(quota_us: int, base_us: int, ceiling_percent: int, operation: Operation) -> int:
    """Return the quota after an operation, from `base_us` to its `ceiling_percent`."""
    percent = min(max(ceiling_percent, 100), int(100 * LARGEST_FACTOR))
    target = {
        Operation.UP: int(quota_us * _UP),
        Operation.DOWN: int(quota_us * _DOWN),
        Operation.RESET: base_us,
        Operation.REMAIN: quota_us,
    }[operation]
    return min(max(target, base_us), base_us * percent // 100)


# -- claims -----------------------------------------------------------------------------------


def _claims(one: PodOnNode, held: Mapping[str, Held], config: Config) -> dict[str, Claims]:
    """Return the claims on a pod and its containers, by subject.

    A pod without a quota needs neither a larger one nor a burst.
    """
    claims: dict[str, Claims] = {}
    extra = burst = 0
    for container in one.containers:
        of = held.get(container.id)
        if of is None:
            continue
        extra += of.quota_us - of.base_us
        burst += of.burst_us
        claims[container.key] = _two_claims(
            of.quota_us / of.base_us, of.burst_us, config, of.reason, "the container's limit"
        )
    requested = _pod_base_us(one, held)
    if requested > 0:
        most = max(config.strategy.cfs_quota_burst_percent, 100) / 100
        factor = min((requested + extra) / requested, most, LARGEST_FACTOR)
        whole = "the sum over the pod's containers"
        claims[PodSubject(one.pod).key] = _two_claims(factor, burst, config, whole, whole)
    return {key: of for key, of in claims.items() if of}


def _pod_base_us(one: PodOnNode, held: Mapping[str, Held]) -> int:
    """Return the quota of the pod's limit per 100 ms, 0 for none.

    While the specification is not known, that of the containers which run.
    """
    if one.pod.specs:
        return requested_of_pod(one.pod).cfs_quota_us or 0
    if len(held) < len(one.containers):
        return 0
    return sum(each.base_us for each in held.values())


def _bounded_by_pod(one: PodOnNode, held: Mapping[str, Held]) -> bool:
    """Return whether the pod's own quota stays and bounds its containers.

    A factor of an unknown request changes nothing. Kubelet sets a quota on a pod all of whose
    containers have a limit.
    """
    known = one.pod.specs or one.requested.cfs_quota_us is not None
    return not known and len(held) == len(one.containers)


def _two_claims(factor: float, burst_us: int, config: Config, why: str, whose: str) -> Claims:
    made: list[Claim] = []
    if factor > 1.0:
        claim = Claim(
            resource=Resource.CPU_CFS_QUOTA,
            value=0,
            policy=NAME,
            reason=f"quota burst: {why}",
            source=config.source,
            op=Op.MULTIPLY,
            rank=config.rank,
            factor=factor,
        )
        made.append(claim)
    if burst_us > 0:
        claim = Claim(
            resource=Resource.CPU_CFS_BURST,
            value=burst_us,
            policy=NAME,
            reason=f"{config.strategy.cpu_burst_percent} % of {whose}",
            source=f"{config.source}.cpuBurstPercent",
            rank=config.rank,
        )
        made.append(claim)
    return tuple(made)


def _record(
    one: PodOnNode,
    held: Mapping[str, Held],
    before: State,
    notes: list[Note],
    gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float],
) -> None:
    """Add the audit lines of what changed, and the gauges of what is in force."""
    pod = one.pod
    obj = f"{pod.namespace}/{pod.name}"
    for container in one.containers:
        of = held.get(container.id)
        if of is None:
            continue
        was = before.containers.get(container.id)
        was_quota = of.base_us if was is None else was.quota_us
        if of.quota_us != was_quota:
            message = f"{container.name}: quota {was_quota} -> {of.quota_us} µs: {of.reason}"
            notes.append(Note(3, "CFSQuotaBurst", message, obj))
        if of.burst_us != (0 if was is None else was.burst_us):
            message = f"{container.name}: burst {of.burst_us} µs"
            notes.append(Note(3, "CPUBurst", message, obj))
        labels = (
            ("pod_namespace", pod.namespace),
            ("pod_name", pod.name),
            ("container_id", container.id),
            ("container_name", container.name),
        )
        if of.burst_us:
            gauges["container_scaled_cfs_burst_us", labels] = float(of.burst_us)
        if of.quota_us > of.base_us:
            gauges["container_scaled_cfs_quota_us", labels] = float(of.quota_us)


STRATEGY: Final = Strategy(
    name=NAME,
    gates={"CPUBurst": True},
    interval_s=1.0,
    ttl_s=10.0,  # as CPU suppression: some late steps must not reset every quota
    initial=State,
    step=step,
    kept=State,
)
