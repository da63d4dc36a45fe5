"""MemoryQOS: protection, throttling, background reclaim and OOM order of memory.

For each pod the class's `memoryQOS` of the NodeSLO and the pod's annotation give one setting. From
the setting and the memory requests follow memory.min, memory.low (pod, container, and their sums on
the QoS directories, because protection counts only as far as the parents have it too) and
memory.high (containers, and pods with a limit of their own).

Containers share the limit of such a pod (`spec.resources`): each may stay below its own memory.high
while the pod reaches its limit and has an OOM kill. Of other pods the containers' values add up to
the same value. Upstream sets none on pods.

A percentage of 0 means "off": nothing is claimed, so kubelet's own values stay. So does
`oomKillGroup: 0` of a class, which an unset field reads as: kubelet itself sets memory.oom.group on
cgroup v2, and a default must not undo that. A compatibility switch writes zeros as upstream does.
Every kind of container is protected, while upstream protects `spec.containers` only. A sum above
the node's allocatable memory is cut to it.

memory.oom.group is not set on QoS directories, although upstream does so: the kernel ends
everything below the topmost such group around its victim, so a node that runs out of memory would
lose all pods of the class at once. A compatibility switch sets it there.

Formulas, defaults and an example: docs/facts/policies.md, "Memory QoS" and "Defaults of the
NodeSLO".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec.structs import asdict
from msgspec.structs import replace as replaced

from apis.annotations import PodMemoryQOS, PodMemoryQOSPolicy, parse_memory_qos
from apis.effective_nodeslo import decode_nodeslo
from apis.errors import InputError
from apis.keys import ANNOTATION_MEMORY_QOS
from apis.nodeslo import (
    MemoryQOS,
    ResourceQOSStrategy,
)
from apis.qos import KubeQoS, QoSClass
from hooks import compat
from hooks.amounts import (
    Pick,
    limit_of_pod,
    regular_only,
    request_of_pod,
    sum_of_limits,
    sum_of_requests,
)
from hooks.claim import Claim, Claimed, Rank
from hooks.facts import NodeInputs
from hooks.policy import Off, OffBecause, Policy, never
from hooks.subject import Amounts, ContainerSubject, Level, Pod, PodSubject, QosSubject
from linux.resources import UNLIMITED, Resource

NAME: Final = "MemoryQOS"

_STRATEGY: Final = "NodeSLO spec.resourceQOSStrategy"
_ANNOTATION: Final = f"annotation {ANNOTATION_MEMORY_QOS}"

_OWN_RESOURCES: Final = frozenset(
    {
        Resource.MEMORY_MIN,
        Resource.MEMORY_LOW,
        Resource.MEMORY_HIGH,
        Resource.MEMORY_WMARK_RATIO,
        Resource.MEMORY_WMARK_SCALE_FACTOR,
        Resource.MEMORY_WMARK_MIN_ADJ,
        Resource.MEMORY_PRIORITY,
        Resource.MEMORY_USE_PRIORITY_OOM,
        Resource.MEMORY_OOM_GROUP,
        Resource.MEMORY_PAGECACHE_LIMIT_ENABLE,
        Resource.MEMORY_PAGECACHE_LIMIT_SIZE,
        Resource.MEMORY_PAGECACHE_LIMIT_SYNC,
    }
)

Row = tuple[Resource, str, str, str]
"""Resource, field of MemoryQOS, its name in JSON, what it does."""

_ORDER: Final[tuple[Row, ...]] = (
    (Resource.MEMORY_PRIORITY, "priority", "priority", "OOM priority"),
    (
        Resource.MEMORY_USE_PRIORITY_OOM,
        "priority_enable",
        "priorityEnable",
        "whether OOM goes by priority",
    ),
)
_RECLAIM: Final[tuple[Row, ...]] = (
    (Resource.MEMORY_WMARK_RATIO, "wmark_ratio", "wmarkRatio", "where background reclaim starts"),
    (
        Resource.MEMORY_WMARK_SCALE_FACTOR,
        "wmark_scale_permill",
        "wmarkScalePermill",
        "how far background reclaim goes",
    ),
    (
        Resource.MEMORY_WMARK_MIN_ADJ,
        "wmark_min_adj",
        "wmarkMinAdj",
        "shift of the global minimum watermark",
    ),
)


class Block(msgspec.Struct, frozen=True):
    """A class's block of the NodeSLO, its recommended values, and the block's field."""

    qos: MemoryQOS
    recommended: MemoryQOS
    field: str


class Setting(msgspec.Struct, frozen=True):
    """The setting of one pod.

    own: the pod's annotation. base: the source of fields that are not in `own`: the class's block,
        or the annotation's `policy`.
    """

    qos: MemoryQOS
    base: str
    own: PodMemoryQOS | None = None

    def source(self, field: str, wire: str) -> str:
        """Return the field that the value of `field` came from."""
        if self.own is not None and getattr(self.own, field) is not None:
            return f"{_ANNOTATION}.{wire}"
        return self.base if self.base.startswith(_ANNOTATION) else f"{self.base}.{wire}"

    def rank(self) -> Rank:
        return Rank.DEFAULT if self.own is None else Rank.POD


class Rule(msgspec.Struct, frozen=True):
    """blocks: by the pod's class, and for pods without one by Kubernetes QoS.

    reclaim, order: the rows of _RECLAIM and _ORDER that this kernel has files for.
    """

    blocks: Mapping[QoSClass | KubeQoS, Block]
    supported: frozenset[Resource]
    reclaim: tuple[Row, ...]
    order: tuple[Row, ...]
    page_bytes: int
    allocatable_bytes: int | None
    zeros: bool
    regular_only: bool
    oom_group_on_directories: bool

    @property
    def degraded(self) -> str:
        wanted: set[Resource] = set()
        for block in self.blocks.values():
            qos = block.qos
            if not qos.enable:
                continue
            if qos.wmark_ratio:
                wanted.add(Resource.MEMORY_WMARK_RATIO)
            if qos.priority_enable:
                wanted.add(Resource.MEMORY_USE_PRIORITY_OOM)
            if qos.min_limit_percent:
                wanted.add(Resource.MEMORY_MIN)
            if qos.low_limit_percent:
                wanted.add(Resource.MEMORY_LOW)
            if qos.throttling_percent:
                wanted.add(Resource.MEMORY_HIGH)
        missing = sorted(wanted - self.supported)
        return f"this kernel has no {', '.join(missing)}" if missing else ""


def _recommended() -> ResourceQOSStrategy:
    """Return the classes' defaults as if enabled; a disabled block of a NodeSLO hides them."""
    on = {"memoryQOS": {"enable": True}}
    spec = {"resourceQOSStrategy": {"lsrClass": on, "lsClass": on, "beClass": on}}
    return decode_nodeslo(spec, obj="recommended memory QoS").resource_qos_strategy


_RECOMMENDED: Final = _recommended()


def parse(inputs: NodeInputs) -> Rule | Off:
    strategy = inputs.slo.resource_qos_strategy
    lsr = _block("lsrClass", strategy, QoSClass.LSR)
    ls = _block("lsClass", strategy, QoSClass.LS)
    be = _block("beClass", strategy, QoSClass.BE)
    blocks: dict[QoSClass | KubeQoS, Block] = {
        QoSClass.LSE: lsr,
        QoSClass.LSR: lsr,
        QoSClass.LS: ls,
        QoSClass.BE: be,
        QoSClass.SYSTEM: _block("systemClass", strategy, QoSClass.SYSTEM),
        KubeQoS.GUARANTEED: lsr,
        KubeQoS.BURSTABLE: ls,
        KubeQoS.BESTEFFORT: be,
    }
    supported = inputs.kernel.supported & _OWN_RESOURCES
    if not supported:
        return Off(OffBecause.UNSUPPORTED, "this kernel has no memory protection or throttling")
    return Rule(
        blocks=blocks,
        supported=supported,
        reclaim=tuple(row for row in _RECLAIM if row[0] in supported),
        order=tuple(row for row in _ORDER if row[0] in supported),
        page_bytes=inputs.kernel.page_size_bytes,
        allocatable_bytes=inputs.node.allocatable_memory_bytes,
        zeros=compat.MEMORY_QOS_WRITES_ZEROS in inputs.settings.compat,
        regular_only=compat.POD_SUMS_OF_REGULAR_CONTAINERS in inputs.settings.compat,
        oom_group_on_directories=compat.OOM_GROUP_ON_QOS_DIRECTORIES in inputs.settings.compat,
    )


def _block(field: str, strategy: ResourceQOSStrategy, qos: QoSClass) -> Block:
    ours, recommended = strategy.of(qos), _RECOMMENDED.of(qos)
    assert ours is not None and recommended is not None  # only NONE has no block
    return Block(ours.memory_qos, recommended.memory_qos, f"{_STRATEGY}.{field}.memoryQOS")


def setting_of(rule: Rule, pod: Pod) -> Setting | None:
    """Return the pod's setting, None without one: class disabled, no annotation.

    A pod's annotation counts even if its class is switched off. Raises InputError.
    """
    block = rule.blocks[pod.qos or pod.kube_qos]
    text = pod.annotations.get(ANNOTATION_MEMORY_QOS)
    if text is None:
        return _of_class(rule, block)
    own = parse_memory_qos(text, obj=pod.obj)
    if own.policy is PodMemoryQOSPolicy.NONE:
        return Setting(MemoryQOS(), f"{_ANNOTATION}.policy=none", PodMemoryQOS())
    base, where = block.qos, block.field
    if own.policy is PodMemoryQOSPolicy.AUTO:
        base, where = block.recommended, f"{_ANNOTATION}.policy=auto"
    explicit = {name: value for name, value in asdict(own).items() if value is not None}
    explicit.pop("policy", None)
    return Setting(replaced(base, **explicit), where, own)


def _of_class(rule: Rule, block: Block) -> Setting | None:
    if block.qos.enable:
        return Setting(block.qos, block.field)
    return Setting(MemoryQOS(), block.field) if rule.zeros else None


def _setting_or_class(rule: Rule, pod: Pod) -> tuple[Setting | None, InputError | None]:
    """Return the pod's setting; with a bad annotation its class's, and the error."""
    try:
        return setting_of(rule, pod), None
    except InputError as error:
        return _of_class(rule, rule.blocks[pod.qos or pod.kube_qos]), error


# --- amounts -----------------------------------------------------------------------------------


def _memory_request(amounts: Amounts) -> int | None:
    return amounts.memory_request_bytes


def _memory_limit(amounts: Amounts) -> int | None:
    return amounts.memory_limit_bytes


def _batch_request(amounts: Amounts) -> int | None:
    return amounts.batch_memory_request_bytes


def _batch_limit(amounts: Amounts) -> int | None:
    return amounts.batch_memory_limit_bytes


def _picks(pod: Pod) -> tuple[Pick, Pick]:
    """Return what counts as the pod's memory request and limit."""
    if pod.qos is QoSClass.BE or (not pod.qos and pod.kube_qos is KubeQoS.BESTEFFORT):
        return _batch_request, _batch_limit
    return _memory_request, _memory_limit


def _pod_request(rule: Rule, pod: Pod) -> int:
    request, _ = _picks(pod)
    if rule.regular_only:
        return sum_of_requests(regular_only(pod.specs), request, None)
    return request_of_pod(pod, request)


def _pod_limit(rule: Rule, pod: Pod) -> int:
    request, limit = _picks(pod)
    if rule.regular_only:
        return sum_of_limits(regular_only(pod.specs), limit, None)
    return limit_of_pod(pod, limit, request)


def protection(qos: MemoryQOS, request_bytes: int) -> tuple[int, int]:
    """Return (memory.min, memory.low): percentages of the request, low never below min."""
    lowest = request_bytes * qos.min_limit_percent // 100
    low = request_bytes * qos.low_limit_percent // 100
    return lowest, max(low, lowest) if low else 0


def throttling(
    qos: MemoryQOS, *, request_bytes: int, limit_bytes: int, min_bytes: int, page_bytes: int
) -> int:
    """Return memory.high: between request and limit by `throttlingPercent`, whole pages."""
    above = (limit_bytes - request_bytes) * qos.throttling_percent // 100
    high = (request_bytes + above) // page_bytes * page_bytes
    return max(high, min_bytes) if high > 0 else high


# --- claims ------------------------------------------------------------------------------------


def claim_pod(rule: Rule, subject: PodSubject) -> Iterator[Claimed]:
    pod = subject.pod
    setting, error = _setting_or_class(rule, pod)
    if setting is not None:
        if pod.specs:
            request = _pod_request(rule, pod)
            yield from _protect(rule, setting, request, "the pod's requests")
            _, limit = _picks(pod)
            if limit(pod.resources) and not rule.regular_only:
                yield from _throttle(rule, setting, request, _pod_limit(rule, pod), "pod")
        yield from _reclaim_and_oom(rule, setting)
        yield from _page_cache(rule, setting, pod)
    if error is not None:
        yield error


def claim_container(rule: Rule, subject: ContainerSubject) -> Iterator[Claimed]:
    pod = subject.pod
    setting, error = _setting_or_class(rule, pod)
    if setting is not None:
        spec = pod.spec(subject.name)
        if spec is not None:
            request, limit = _picks(pod)
            yield from _protect(
                rule, setting, request(spec.amounts) or 0, "the container's request"
            )
            # Kubelet sets the pod's own limit on a container without one.
            own = limit(spec.amounts) or limit(pod.resources) or 0
            yield from _throttle(rule, setting, request(spec.amounts) or 0, own, "container")
        yield from _reclaim_and_oom(rule, setting)
    if error is not None:
        yield error


def claim_qos(rule: Rule, subject: QosSubject) -> Iterator[Claim]:
    sum_min = sum_low = 0
    for pod in subject.pods:
        # claim_pod reports a bad annotation; here the pod's class counts.
        setting, _ = _setting_or_class(rule, pod)
        if setting is not None:
            lowest, low = protection(setting.qos, _pod_request(rule, pod))
            sum_min += lowest
            sum_low += low
    reason = f"sum over the pods below the {subject.kube_qos} directory"
    source = f"{_STRATEGY}.*.memoryQOS and {_ANNOTATION} of the pods"
    for resource, total in ((Resource.MEMORY_MIN, sum_min), (Resource.MEMORY_LOW, sum_low)):
        if resource not in rule.supported or not (total or rule.zeros):
            continue
        short, top = "", rule.allocatable_bytes
        if top is not None and total > top:
            short = f"{total} bytes are more than the node's allocatable memory, {top}"
            total = top
        yield _claim(resource, total, reason, source, degraded=short)
    setting = _of_class(rule, rule.blocks[subject.kube_qos])
    if setting is not None:
        yield from _tuned(setting, rule.order)
        if rule.oom_group_on_directories:
            yield from _oom_group(rule, setting)


def _protect(rule: Rule, setting: Setting, request_bytes: int, whose: str) -> Iterator[Claim]:
    qos = setting.qos
    lowest, low = protection(qos, request_bytes)
    if (lowest or rule.zeros) and Resource.MEMORY_MIN in rule.supported:
        source = setting.source("min_limit_percent", "minLimitPercent")
        reason = f"{qos.min_limit_percent} % of {whose}"
        yield _claim(Resource.MEMORY_MIN, lowest, reason, source, setting.rank())
    if (low or rule.zeros) and Resource.MEMORY_LOW in rule.supported:
        source = setting.source("low_limit_percent", "lowLimitPercent")
        reason = f"{qos.low_limit_percent} % of {whose}"
        yield _claim(Resource.MEMORY_LOW, low, reason, source, setting.rank())


def _throttle(
    rule: Rule, setting: Setting, request_bytes: int, limit_bytes: int, whose: str
) -> Iterator[Claim]:
    if Resource.MEMORY_HIGH not in rule.supported:
        return
    source, rank = setting.source("throttling_percent", "throttlingPercent"), setting.rank()
    percent = setting.qos.throttling_percent
    if percent == 0:
        if rule.zeros:
            yield _claim(Resource.MEMORY_HIGH, UNLIMITED, "no throttling", source, rank)
        return
    reason = f"{percent} % of the way from the {whose}'s request to its limit"
    if limit_bytes <= 0:
        reason = f"{percent} % of the way from the {whose}'s request to the node's memory"
        limit_bytes = rule.allocatable_bytes or 0
    if limit_bytes <= 0:
        return  # neither a limit nor a Node: the formula has no upper end
    lowest, _ = protection(setting.qos, request_bytes)
    high = throttling(
        setting.qos,
        request_bytes=request_bytes,
        limit_bytes=limit_bytes,
        min_bytes=lowest,
        page_bytes=rule.page_bytes,
    )
    if high > 0:
        yield _claim(Resource.MEMORY_HIGH, high, reason, source, rank)


def _reclaim_and_oom(rule: Rule, setting: Setting) -> Iterator[Claim]:
    yield from _tuned(setting, rule.reclaim)
    yield from _tuned(setting, rule.order)
    yield from _oom_group(rule, setting)


def _tuned(setting: Setting, rows: tuple[Row, ...]) -> Iterator[Claim]:
    """Claim fields whose "off" is a value: new groups inherit these files, so off is written."""
    for resource, field, wire, reason in rows:
        value = getattr(setting.qos, field)
        yield _claim(resource, value, reason, setting.source(field, wire), setting.rank())


def _oom_group(rule: Rule, setting: Setting) -> Iterator[Claim]:
    value = setting.qos.oom_kill_group
    explicit = setting.own is not None and setting.own.oom_kill_group is not None
    if Resource.MEMORY_OOM_GROUP in rule.supported and (value or explicit or rule.zeros):
        reason = "an OOM kills the whole group" if value else "an OOM kills one process"
        source = setting.source("oom_kill_group", "oomKillGroup")
        yield _claim(Resource.MEMORY_OOM_GROUP, value, reason, source, setting.rank())


def _page_cache(rule: Rule, setting: Setting, pod: Pod) -> Iterator[Claim]:
    qos = setting.qos
    if Resource.MEMORY_PAGECACHE_LIMIT_SIZE not in rule.supported:
        return
    asked = (qos.page_cache_enable, qos.page_cache_limit_percent, qos.page_cache_limit_size)
    if asked == (None, None, None) and not rule.zeros:
        return
    limit = _pod_limit(rule, pod)
    source = setting.source("page_cache_limit_percent", "pageCacheLimitPercent")
    size = 0
    if qos.page_cache_limit_size:
        size = (
            qos.page_cache_limit_size
            if limit == UNLIMITED
            else min(qos.page_cache_limit_size, limit)
        )
        source = setting.source("page_cache_limit_size", "pageCacheLimitSize")
    elif limit != UNLIMITED:
        size = limit * (qos.page_cache_limit_percent or 0) // 100
    enable = size > 0 if qos.page_cache_enable is None else qos.page_cache_enable
    values = {
        Resource.MEMORY_PAGECACHE_LIMIT_SIZE: size,
        Resource.MEMORY_PAGECACHE_LIMIT_ENABLE: int(enable),
    }
    if size > 0:
        values[Resource.MEMORY_PAGECACHE_LIMIT_SYNC] = int(bool(qos.page_cache_reclaim_sync))
    for resource, value in values.items():
        yield _claim(resource, value, "page cache limit of the pod", source, setting.rank())


def _claim(
    resource: Resource,
    value: int,
    reason: str,
    source: str,
    rank: Rank = Rank.DEFAULT,
    degraded: str = "",
) -> Claim:
    return Claim(
        resource=resource,
        value=value,
        policy=NAME,
        reason=reason,
        source=source,
        rank=rank,
        degraded=degraded,
    )


POLICY: Final = Policy(
    name=NAME,
    gate="CgroupReconcile",
    gate_default=False,
    summary="memory protection, throttling, background reclaim and OOM order",
    parse=parse,
    claims={Level.QOS: claim_qos, Level.POD: claim_pod, Level.CONTAINER: claim_container},
    degraded=lambda rule: rule.degraded,
    individual=never,
)
