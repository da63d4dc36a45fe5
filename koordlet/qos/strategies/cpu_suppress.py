"""CPU suppression: best-effort pods get the CPU that the others leave below a threshold.

Control law. Once a second, in milli-cores:

    amount = capacity x threshold % - latency-sensitive pods - host applications - system
    amount = at least capacity x cpuSuppressMinPercent %, where that is set
    system = max(node - all pods - all host applications, reserved for the system)

The amount is feed-forward: it follows from what the others use, and best-effort use does not count
in it, so the loop cannot swing. It becomes one of two things.

Policy `cpuset`: n = max(ceil(amount in cores), 2) CPUs, of which CPUs of LSR pods are a share that
is proportional to their number. LSE pods' CPUs, reserved CPUs and exclusive CPUs of the system
class are never among them. A set grows by at most 10 % of the node's CPUs in a step. A change of at
most 1 % of the CPUs (at least one CPU) is noise until it has lasted for 2 steps (fewer CPUs) or 5
(more); a larger change counts at once, so a load step is answered in the first step that sees it.

Policy `cfsQuota`: q = max(amount x 100 µs per milli-core, 2000 µs) per 100 ms for all best-effort
pods. A change below 1 % of the node is left out, and q rises by at most 10 % of the node in a step.
On cgroup v1 the quotas of the single pods and containers are lifted meanwhile.

Upstream's rule and the worked examples: docs/facts/koordlet.md, "CPU suppression".
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Final, NamedTuple

import msgspec

from apis.cpuset import NO_CPUS, CpuSet
from apis.errors import InputError
from apis.keys import (
    ANNOTATION_NODE_RESERVATION,
    ANNOTATION_RESOURCE_STATUS,
    CPU,
)
from apis.nodeslo import CgroupBase, CPUSuppressPolicy
from apis.qos import KubeQoS, QoSClass
from apis.quantity import ZERO
from apis.topology import parse_node_reservation
from hooks import compat
from hooks.claim import Claim, Op, Rank
from hooks.facts import NodeInputs
from hooks.standing import NOTHING_STANDS, Claims, Standing, merged
from hooks.subject import HostAppSubject, Level, QosSubject
from koordlet.measurement.series import LATEST_PERIODS, Metric, Series
from koordlet.qos.strategies.best_effort import LIFTED_AHEAD_S, is_best_effort, lifted_below
from koordlet.qos.strategies.cpu_choice import choose, share
from koordlet.qos.strategies.cpu_owners import (
    Owners,
    allocated,
    kubelet_is_static,
    owners_of,
)
from koordlet.qos.strategy import Note, PodOnNode, Situation, Strategy, Verdict
from linux.resources import UNLIMITED, Resource

NAME: Final = "BECPUSuppress"

_LEAST_CPUS: Final = 2
"""Upstream's: below two CPUs best-effort pods hardly make progress."""
_LEAST_QUOTA_US: Final = 2000
"""Upstream's: 2 % of one CPU per 100 ms."""
_US_PER_MILLI: Final = 100
"""A milli-core is 100 µs of the 100 ms in which canonical quotas count."""
_GROWTH: Final = 0.1
"""Upstream's: the part of the node by which best-effort pods may grow in a step."""
_NOISE: Final = 0.01
"""Upstream's dead band of the quota, here of the CPU count too."""
_STEPS_TO_SHRINK: Final = 2
"""Chosen: small excesses end within the 2 s in which a load step must be answered."""
_STEPS_TO_GROW: Final = 5
"""Chosen: growing is not urgent. Twice the value returns idle CPU later; half of it moves the CPU
sets of all best-effort cgroups more often on a noisy node."""
_HOLD_S: Final = 10.0
"""Chosen: without a measurement the last decision stays for so long. A restart of a collector is
shorter; a node that is not measured must not stay suppressed for ever."""

_SLO: Final = "NodeSLO spec.resourceUsedThresholdWithBE"
_DISABLED: Final = f"{_SLO}.enable is false"
_ROOT: Final = QosSubject(KubeQoS.BESTEFFORT, "").key

_USED_BY_LS: Final = ("be_suppress_ls_used_cpu_cores", ())
_USED_BY_BE: Final = ("be_suppress_be_used_cpu_cores", ())


class Amount(NamedTuple):
    """The terms of the control law, in milli-cores.

    system: what counts, the larger of its use and of what is reserved for it. least: the part of
    cpuSuppressMinPercent, 0 if that is not set.
    """

    capacity: int
    threshold_percent: int
    pods: int
    host_apps: int
    system: int
    system_used: int
    least: int

    @property
    def milli(self) -> int:
        """What best-effort pods may use; 0 and less is possible without a least amount."""
        bound = self.capacity * self.threshold_percent // 100
        amount = bound - self.pods - self.host_apps - self.system
        return max(amount, self.least) if self.least else amount

    def __str__(self) -> str:
        terms = f"node {self.threshold_percent} % x {self.capacity / 1000:g}"
        terms += f" - LS {self.pods / 1000:.1f}"
        if self.host_apps:
            terms += f" - host applications {self.host_apps / 1000:.1f}"
        terms += f" - system {self.system / 1000:.1f}"
        if self.system > self.system_used:
            terms += f" (reserved; it uses {self.system_used / 1000:.1f})"
        return f"{terms}, at least {self.least / 1000:g}" if self.least else terms


class Basis(NamedTuple):
    """What the claims on CPU sets follow from; the same basis has the same claims."""

    cpus: CpuSet
    reason: str
    owners: Owners
    inputs: NodeInputs
    pods: tuple[PodOnNode, ...]
    host_apps: tuple[HostAppSubject, ...]


class State(msgspec.Struct, frozen=True):
    """What a step remembers.

    cpus, quota_us: in force; no CPUs and UNLIMITED while that policy is not used. fewer, more:
    steps in a row that asked for less or more CPUs than `cpus`. terms: the amount that led to
    what is in force. basis: of the last step's claims on CPU sets, None without such claims.
    lifted_at: since when best-effort pods lose quotas of their own before the first common one.
    measured_at, last: of the last step that had measurements.
    """

    cpus: CpuSet = NO_CPUS
    quota_us: int = UNLIMITED
    fewer: int = 0
    more: int = 0
    terms: str = ""
    basis: Basis | None = None
    lifted_at: float | None = None
    measured_at: float = 0.0
    last: Verdict = Verdict()


class Kept(msgspec.Struct, frozen=True, tag_field="version", tag=1):
    """The fields of `State` that outlast a restart of the daemon; cpus in the list format.

    The kernel has these CPUs or this quota until the next daemon's first step, so growth and small
    changes are damped from there on. What a step without measurements repeats is not kept: the
    lease of before the restart holds the claims meanwhile.
    """

    cpus: str = ""
    quota_us: int = UNLIMITED
    fewer: int = 0
    more: int = 0
    terms: str = ""


def kept(state: State) -> Kept:
    return Kept(str(state.cpus), state.quota_us, state.fewer, state.more, state.terms)


def resumed(kept: Kept) -> State:
    """Return the state of the first step after a restart."""
    try:
        cpus = CpuSet.parse(kept.cpus)
    except ValueError:
        return State()
    return State(cpus, kept.quota_us, kept.fewer, kept.more, kept.terms)


def lapsed(state: State) -> State:
    """Return the state without claims in force: the next set or quota is a first one."""
    return State()


def disabled(inputs: NodeInputs) -> str:
    """Return why nothing is claimed, whatever is measured; "" where something may be."""
    if inputs.slo.resource_used_threshold_with_be.enable or _keeps_pool(inputs):
        return ""
    return _DISABLED


def _keeps_pool(inputs: NodeInputs) -> bool:
    """Return whether best-effort pods are kept on their pool while nothing is suppressed."""
    return compat.BEST_EFFORT_POOL_ALWAYS in inputs.settings.compat and not _be_cpu_manager(inputs)


def _be_cpu_manager(inputs: NodeInputs) -> bool:
    return inputs.settings.gate("BECPUManager", default=False)


def step(state: State, situation: Situation) -> tuple[State, Verdict]:
    """Return the next state, and the claims on best-effort pods' CPU sets or their quota."""
    inputs, config = situation.inputs, situation.inputs.slo.resource_used_threshold_with_be
    owners = owners_of(situation)
    if not config.enable:
        standing = _pool_claims(owners, situation) if _keeps_pool(inputs) else Standing()
        summary = f"nothing is suppressed: {_DISABLED}"
        return State(), Verdict(standing=standing, summary=summary, faults=owners.errors)
    amount = amount_of(situation)
    if amount is None:
        if state.measured_at and situation.now - state.measured_at <= _HOLD_S:
            summary = f"no measurement of the node's CPU; unchanged: {state.last.summary}"
            return state, msgspec.structs.replace(state.last, notes=(), summary=summary)
        summary = "no measurement of the node's CPU: nothing is suppressed"
        return State(), Verdict(summary=summary, faults=owners.errors, unmeasured=True)
    if config.cpu_suppress_policy is CPUSuppressPolicy.CFS_QUOTA:
        after, verdict = _by_quota(state, situation, owners, amount)
    elif _be_cpu_manager(inputs):
        summary = "gate BECPUManager: best-effort CPU sets follow from their allocations"
        after, verdict = State(), Verdict(summary=summary)
    elif not situation.node.cpus:
        short = "the CPU topology is not known: a quota instead of a CPU set"
        after, verdict = _by_quota(state, situation, owners, amount, degraded=short)
    elif not owners.free:
        short = "no CPU is left beside LSE pods and reserved CPUs: the least quota"
        after, verdict = _by_quota(state, situation, owners, amount, milli=0, degraded=short)
    else:
        after, verdict = _by_cpus(state, situation, owners, amount)
    verdict = msgspec.structs.replace(
        verdict,
        faults=owners.errors,
        gauges={**verdict.gauges, **_usage(situation, amount)},
    )
    return msgspec.structs.replace(after, measured_at=situation.now, last=verdict), verdict


def _usage(
    situation: Situation, amount: Amount
) -> Mapping[tuple[str, tuple[tuple[str, str], ...]], float]:
    within_s = LATEST_PERIODS * situation.interval_s
    used = situation.measurements.latest(Series(Metric.BE_CPU_USED), within_s=within_s)
    gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {_USED_BY_LS: amount.pods / 1000}
    if used is not None:
        gauges[_USED_BY_BE] = used / 1000
    return gauges


# -- the amount -------------------------------------------------------------------------------


def amount_of(situation: Situation) -> Amount | None:
    """Return the terms of the control law; None without the node's CPU use.

    A pod or host application without a sample counts 0, and its use then lies in the system's.
    """
    measured, inputs = situation.measurements, situation.inputs
    config = inputs.slo.resource_used_threshold_with_be
    within_s = LATEST_PERIODS * situation.interval_s
    node = measured.latest(Series(Metric.NODE_CPU), within_s=within_s)
    if node is None:
        return None
    all_pods = others = 0.0
    for one in situation.pods:
        used = measured.latest(Series(Metric.POD_CPU, one.pod.uid), within_s=within_s) or 0.0
        all_pods += used
        if not is_best_effort(one.pod):
            others += used
    below_be = apps_below_best_effort(situation)
    all_apps = other_apps = 0.0
    for app in situation.host_apps:
        used = measured.latest(Series(Metric.HOST_APP_CPU, app.name), within_s=within_s) or 0.0
        all_apps += used
        if app.qos is not QoSClass.BE or app.name not in below_be:
            other_apps += used
    capacity = situation.node.cpu_milli
    system_used = _milli(node - all_pods - all_apps)
    least = config.cpu_suppress_min_percent
    return Amount(
        capacity=capacity,
        threshold_percent=config.cpu_suppress_threshold_percent,
        pods=_milli(others),
        host_apps=_milli(other_apps),
        system=max(system_used, _reserved_milli(situation)),
        system_used=system_used,
        least=0 if least is None else capacity * least // 100,
    )


def apps_below_best_effort(situation: Situation) -> frozenset[str]:
    """Return the names of the host applications that run below the besteffort directory."""
    return frozenset(
        app.name
        for app in situation.inputs.slo.host_applications
        if app.cgroup_path is not None and app.cgroup_path.base is CgroupBase.KUBEPODS_BESTEFFORT
    )


def _milli(cores: float) -> int:
    """Return cores as milli-cores, truncated; the difference of equal floats is not below 0.

    Nine digits are kept before: sums of measured floats are not exact.
    """
    return max(int(round(cores, 9) * 1000), 0)


def _reserved_milli(situation: Situation) -> int:
    """Return what the node keeps for its system: not allocatable, or reserved by its annotation."""
    capacity = situation.node.cpu_milli
    allocatable = situation.node.allocatable.get(CPU)
    if allocatable is None:
        allocatable = situation.inputs.node.allocatable_cpu_milli
    kept = 0 if allocatable is None else max(capacity - allocatable, 0)
    try:
        reservation = parse_node_reservation(
            situation.inputs.node.annotations.get(ANNOTATION_NODE_RESERVATION) or "null",
            obj=f"Node {situation.inputs.node.name}",
        )
    except InputError:
        return kept  # `owners_of` reports it
    return max(kept, reservation.amounts().get(CPU, ZERO).milli_value())


# -- policy cpuset ----------------------------------------------------------------------------


def _by_cpus(
    state: State, situation: Situation, owners: Owners, amount: Amount
) -> tuple[State, Verdict]:
    wanted = wanted_cpus(amount.milli, len(owners.free))
    count, fewer, more = damped(
        wanted,
        len(state.cpus),
        state.fewer,
        state.more,
        cpus=len(owners.everything),
        every_step=compat.SUPPRESS_WITHOUT_DAMPING in situation.inputs.settings.compat,
    )
    topology, ls = situation.node.cpus, owners.free - owners.lsr
    from_lsr = share(count, owners.lsr, ls)
    cpus = choose(from_lsr, owners.lsr, state.cpus, topology) | choose(
        count - from_lsr, ls, state.cpus, topology
    )
    changed = cpus != state.cpus
    terms = str(amount) if changed else state.terms
    reason = f"suppressed to {len(cpus)} CPUs: {terms}"
    basis = Basis(cpus, reason, owners, situation.inputs, situation.pods, situation.host_apps)
    after = State(cpus=cpus, fewer=fewer, more=more, terms=terms, basis=basis)
    standing = (
        state.last.standing
        if basis == state.basis
        else _cpu_claims(cpus, situation, owners, reason, before=state.last.standing)
    )
    notes: tuple[Note, ...] = ()
    if changed:
        message = f"best-effort CPUs {state.cpus or 'not limited'} -> {cpus}: {amount}"
        notes = (Note(3, "AdjustBEByNodeCPUUsage", message),)
    return after, Verdict(
        standing=standing,
        notes=notes,
        gauges={("be_suppress_cpu_cores", (("type", "cpuset"),)): float(len(cpus))},
        summary=f"best-effort pods on {len(cpus)} CPUs ({cpus}): "
        f"{amount} = {amount.milli / 1000:.1f} cores",
    )


def wanted_cpus(milli: int, available: int) -> int:
    """Return the number of CPUs for an amount: rounded up, at least 2, at most what there is."""
    return min(max(ceil(milli / 1000), _LEAST_CPUS), available)


def damped(
    wanted: int, present: int, fewer: int, more: int, *, cpus: int, every_step: bool = False
) -> tuple[int, int, int]:
    """Return the number of CPUs for this step, and the steps in a row that asked for fewer or more.

    present: the number in force, 0 for none: the first set is not limited. cpus: of the node.
    every_step: without the damping of small changes.
    """
    if present == 0 or wanted == present:
        return wanted, 0, 0
    small = max(int(cpus * _NOISE), 1)
    if wanted < present:
        fewer += 1
        if present - wanted > small or fewer >= _STEPS_TO_SHRINK or every_step:
            return wanted, 0, 0
        return present, fewer, 0
    more += 1
    if wanted - present > small or more >= _STEPS_TO_GROW or every_step:
        return min(wanted, present + ceil(cpus * _GROWTH)), 0, 0
    return present, 0, more


def _cpu_claims(
    cpus: CpuSet,
    situation: Situation,
    owners: Owners,
    reason: str,
    *,
    before: Standing = NOTHING_STANDS,
) -> Standing:
    """Return the claims that keep best-effort cgroups within `cpus`.

    before: the last ones, whose objects stay for equal claims: pods come and go all the time, and
    readers then see without a comparison that nothing else has changed.

    Host applications below the besteffort directory are kept there too: on v1 a directory cannot
    be narrower than one below it. A pod with CPUs of its own stays inside these; where none of them
    is in `cpus`, the directories above it hold them as well, or v1 would refuse them.

    Under kubelet's static policy the besteffort and pod directories are left alone: kubelet sets
    its shared CPUs on containers, which a narrower directory would refuse.

    On cgroup v1 a container that is being created inherits its pod's set. A claim by class would be
    part of the reply at its creation, and the creation would fail if the directories above shrank
    meanwhile. So only containers that have a cgroup are named there.
    """
    policy = _SLO + ".cpuSuppressPolicy"
    within = (_claim(Resource.CPUSET_CPUS, cpus, reason, policy, op=Op.WITHIN),)
    former = before.by_class.get((Level.SANDBOX, KubeQoS.BESTEFFORT))
    within = former if former == within else within
    static = kubelet_is_static(situation)
    by_class: dict[tuple[Level, KubeQoS], Claims] = {(Level.SANDBOX, KubeQoS.BESTEFFORT): within}
    by_subject: dict[str, Claims] = {}
    if static or situation.inputs.kernel.cgroup_version == 2:
        by_class[Level.CONTAINER, KubeQoS.BESTEFFORT] = within
    else:
        for one in situation.pods:
            if one.pod.kube_qos is KubeQoS.BESTEFFORT:
                for container in one.containers:
                    by_subject[container.key] = within
    if static:
        return Standing(by_subject, by_class)
    by_class[Level.POD, KubeQoS.BESTEFFORT] = within
    root: Claims = within
    below = apps_below_best_effort(situation)
    by_subject |= {app.key: within for app in situation.host_apps if app.name in below}
    for one in situation.pods:
        if one.pod.kube_qos is not KubeQoS.BESTEFFORT or one.pod.ended:
            continue
        own = allocated(one.pod)
        if own and (own := own & owners.everything) and not own & cpus:
            held = f"CPUs allocated to {one.pod.obj}"
            source = f"annotation {ANNOTATION_RESOURCE_STATUS}.cpuset"
            around = _claim(Resource.CPUSET_CPUS, own, held, source, op=Op.AT_LEAST)
            by_subject[f"pod/{one.pod.uid}"] = (around,)
            root = (*root, around)
    by_subject[_ROOT] = root
    return Standing(by_subject, by_class)


def _pool_claims(owners: Owners, situation: Situation) -> Standing:
    """Return the claims that keep best-effort pods off CPUs that they may never use."""
    if not owners.free or owners.free == owners.everything:
        return Standing()
    reason = "CPUs that are neither an LSE pod's nor reserved"
    return _cpu_claims(owners.free, situation, owners, reason)


# -- policy cfsQuota --------------------------------------------------------------------------


def _by_quota(
    state: State,
    situation: Situation,
    owners: Owners,
    amount: Amount,
    *,
    milli: int | None = None,
    degraded: str = "",
) -> tuple[State, Verdict]:
    """milli: what to leave at once, if it is not the amount."""
    pool = Standing()
    allocated_cpus = situation.inputs.settings.gate("BECPUManager", default=False)
    if not allocated_cpus:
        pool = _pool_claims(owners, situation)
    source = _SLO + ".cpuSuppressPolicy"
    lifted = lifted_below(
        situation, NAME, "the quota of all best-effort pods holds this one", source
    )
    lifted_at = situation.now if state.lifted_at is None else state.lifted_at
    if (
        milli is None
        and lifted.by_class
        and state.quota_us == UNLIMITED
        and situation.now - lifted_at < LIFTED_AHEAD_S
    ):
        # Containers that the runtime is creating still have a quota of their own.
        summary = f"best-effort pods lose their own quotas, then they get one together: {amount}"
        held = state.cpus & owners.free
        if held and not allocated_cpus:
            # The policy was `cpuset`: its set holds them until the quota does.
            reason = f"suppressed to {len(held)} CPUs until a quota holds: {state.terms}"
            pool = _cpu_claims(held, situation, owners, reason)
        verdict = Verdict(standing=merged([pool, lifted]), summary=summary)
        return State(cpus=state.cpus, terms=state.terms, lifted_at=lifted_at), verdict
    wanted = amount.milli if milli is None else milli
    quota_us = next_quota(wanted, state.quota_us, situation.node.cpu_milli)
    changed = quota_us != state.quota_us
    terms = str(amount) if changed else state.terms
    cores = quota_us / (1000 * _US_PER_MILLI)
    reason = f"suppressed to {cores:g} cores by quota: {terms}"
    claim = _claim(Resource.CPU_CFS_QUOTA, quota_us, reason, source, degraded=degraded)
    standing = merged([pool, Standing({_ROOT: (claim,)}), lifted])
    notes: tuple[Note, ...] = ()
    if changed:
        before = "unlimited" if state.quota_us == UNLIMITED else f"{state.quota_us} µs"
        message = f"best-effort quota {before} -> {quota_us} µs: {amount}"
        notes = (Note(3, "AdjustBEByNodeCPUUsage", message),)
    return State(quota_us=quota_us, terms=terms), Verdict(
        standing=standing,
        notes=notes,
        gauges={("be_suppress_cpu_cores", (("type", "cfsQuota"),)): cores},
        summary=f"best-effort pods with {cores:g} cores: "
        f"{amount} = {amount.milli / 1000:.1f} cores" + (f" ({degraded})" if degraded else ""),
    )


def next_quota(milli: int, present_us: int, capacity_milli: int) -> int:
    """Return the quota of all best-effort pods per 100 ms.

    present_us: in force, UNLIMITED for none. capacity_milli: the node's, counted in whole cores.
    """
    wanted = max(milli * _US_PER_MILLI, _LEAST_QUOTA_US)
    whole_us = ceil(capacity_milli / 1000) * 1000 * _US_PER_MILLI
    if present_us == UNLIMITED:
        return wanted
    difference = wanted - present_us
    if abs(difference) < whole_us * _NOISE and wanted != _LEAST_QUOTA_US:
        return present_us
    return min(wanted, present_us + int(whole_us * _GROWTH))


def _claim(
    resource: Resource,
    value: int | CpuSet,
    reason: str,
    source: str,
    *,
    op: Op = Op.SET,
    degraded: str = "",
) -> Claim:
    return Claim(
        resource=resource,
        value=value,
        policy=NAME,
        reason=reason,
        source=source,
        op=op,
        rank=Rank.EMERGENCY,
        degraded=degraded,
    )


STRATEGY: Final = Strategy(
    name=NAME,
    gates={"BECPUSuppress": True},
    interval_s=1.0,
    # Chosen: some late steps of a busy node must not give all CPUs back; twice the value leaves
    # best-effort pods suppressed longer after the strategy has died.
    ttl_s=10.0,
    initial=State,
    step=step,
    kept=Kept,
    keep=kept,
    resume=resumed,
    lapsed=lapsed,
    disabled=disabled,
)
