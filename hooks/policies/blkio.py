"""BlkIO: limits, weights and latency targets of block I/O, for classes, pods and the whole node.

A block of settings names a device, a volume group with all its disks, or in a pod's annotation one
of its CSI volumes; the settings count for each whole disk below. A block that cannot be used is an
error of its own; the others count.

- `beClass`: the besteffort directory. `lsClass`: the burstable directory. `lsrClass`: each LSR and
  LSE pod, because Guaranteed pods share no directory of their own.
- annotation `koordinator.sh/blkioQOS`: the pod's directory, before its class.
- `cgroupRoot`: iocost of the disk, with latency targets and the cost model.

Files: docs/facts/kernel.md, "Block I/O control".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final

import msgspec

from apis.annotations import parse_blkio_qos
from apis.errors import InputError, InputErrors
from apis.keys import ANNOTATION_BLKIO_QOS
from apis.nodeslo import BlockCfg, BlockType, IOCfg
from apis.qos import KubeQoS, QoSClass
from hooks.claim import Claim, Claimed, Rank
from hooks.facts import Disk, KernelFacts, NodeInputs
from hooks.policy import Off, Partial, Policy, never
from hooks.subject import Level, NodeSubject, Pod, PodSubject, QosSubject
from linux.block_io import check_block_value, cost_model, cost_qos
from linux.resources import Resource, Value

NAME: Final = "BlkIO"

_STRATEGY: Final = "spec.resourceQOSStrategy"
_ROOT: Final = "cgroupRoot"
_DIRECTORIES: Final[Mapping[KubeQoS, str]] = {
    KubeQoS.BURSTABLE: "lsClass",
    KubeQoS.BESTEFFORT: "beClass",
}
_PODS: Final = frozenset({QoSClass.LSE, QoSClass.LSR})
_PERCENTILE: Final = 95
_LATENCY_US: Final = 3000
"""Upstream's defaults of iocost: 95 % of the requests within 3 ms."""
_FLAT: Final = "cgroup v1 throttles the processes of a group itself, not those of groups below"


class Rule(msgspec.Struct, frozen=True):
    """kernel: to resolve the devices of annotations. blocks: the claims of each block that can be
    used, by the NodeSLO field that holds it, in the order of the fields."""

    kernel: KernelFacts
    blocks: Mapping[str, tuple[Claim, ...]]

    def of(self, target: str) -> Iterator[Claim]:
        """Return the claims of one class, or of the root; a later block of a disk counts."""
        found: dict[tuple[Resource, str], Claim] = {}
        prefix = f"{_STRATEGY}.{target}."
        for field, claims in self.blocks.items():
            if field.startswith(prefix):
                found |= {(claim.resource, claim.key): claim for claim in claims}
        yield from found.values()


def parse(inputs: NodeInputs) -> Rule | Off | Partial:
    strategy = inputs.slo.resource_qos_strategy
    targets = {
        "lsrClass": strategy.lsr_class.blkio_qos,
        "lsClass": strategy.ls_class.blkio_qos,
        "beClass": strategy.be_class.blkio_qos,
        _ROOT: strategy.cgroup_root.blkio_qos,
    }
    blocks: dict[str, tuple[Claim, ...]] = {}
    errors: dict[str, InputError] = {}
    for target, qos in targets.items():
        for index, block in enumerate(qos.blocks if qos.enable else ()):
            field = f"{_STRATEGY}.{target}.blkioQOS.blocks[{index}]"
            make = _root_settings if target == _ROOT else _group_settings
            try:
                blocks[field] = _claims(
                    block,
                    make,
                    inputs.kernel,
                    obj="NodeSLO",
                    field=field,
                    source=f"NodeSLO {field}.ioCfg",
                )
            except InputError as error:
                errors[field] = error
    rule = Rule(inputs.kernel, blocks)
    if errors:
        return Partial(rule, InputErrors(list(errors.values())), partial(_mend, rule, errors))
    return rule


def _mend(rule: Rule, fields: Iterable[str], last: Rule) -> Rule:
    """Return the rule with the last good claims of some blocks."""
    kept = {field: last.blocks[field] for field in fields if field in last.blocks}
    return msgspec.structs.replace(rule, blocks={**rule.blocks, **kept})


def _disks(
    block: BlockCfg, kernel: KernelFacts, obj: str, field: str, pod: Pod | None
) -> tuple[Disk, ...]:
    """Return a block's disks, () for a volume of a pod whose mounts were not looked at yet."""
    hint = "devices are named by path, such as /dev/sdb"
    match block.type:
        case BlockType.DEVICE:
            found, kind = kernel.disks.get(block.name, ()), "block device"
        case BlockType.VOLUME_GROUP:
            found, kind = kernel.volume_groups.get(block.name, ()), "active LVM volume group"
        case BlockType.POD_VOLUME if pod is not None:
            volumes = kernel.pod_volumes.get(pod.uid)
            if volumes is None:
                return ()
            found, kind = volumes.get(block.name, ()), "CSI volume of this pod on a block device"
            hint = "name an ephemeral CSI volume, or the PersistentVolume of a claim"
        case _:
            raise InputError(
                obj=obj,
                field=f"{field}.type",
                value=block.type or "",
                problem="not device or volumegroup",
                hint="podvolume counts in the annotation of a pod alone",
            )
    if not found:
        raise InputError(
            obj=obj,
            field=f"{field}.name",
            value=block.name,
            problem=f"this node has no {kind} of that name",
            hint=hint,
        )
    return found


Settings = Iterable[tuple[Resource, Value, str]]
"""(resource, value, why the claim falls short or "")."""


def _group_settings(config: IOCfg, disk: Disk, kernel: KernelFacts) -> Settings:
    flat = _FLAT if kernel.cgroup_version == 1 else ""
    for resource, number in (
        (Resource.BLKIO_READ_BPS, config.read_bps),
        (Resource.BLKIO_WRITE_BPS, config.write_bps),
        (Resource.BLKIO_READ_IOPS, config.read_iops),
        (Resource.BLKIO_WRITE_IOPS, config.write_iops),
    ):
        if number:
            yield resource, number, flat
    if config.io_weight_percent is not None:
        weight = Resource.BLKIO_BFQ_WEIGHT if disk.bfq else Resource.BLKIO_COST_WEIGHT
        yield weight, config.io_weight_percent, ""
    targets = [one for one in (config.read_latency_us, config.write_latency_us) if one]
    if targets and kernel.cgroup_version == 2:
        yield Resource.BLKIO_LATENCY, min(targets), ""


def _root_settings(config: IOCfg, disk: Disk, kernel: KernelFacts) -> Settings:
    def chosen(value: int | None, default: int) -> int:
        return default if value is None else value

    given_us = (config.read_latency_us, config.write_latency_us)
    latencies = [chosen(one, _LATENCY_US) for one in given_us]
    if min(latencies) < 0:
        raise ValueError(f"{min(latencies)} is a negative latency")
    yield (
        Resource.BLKIO_COST_QOS,
        cost_qos(
            rpct=chosen(config.read_latency_percent, _PERCENTILE),
            rlat=latencies[0],
            wpct=chosen(config.write_latency_percent, _PERCENTILE),
            wlat=latencies[1],
        ),
        "",
    )
    if not config.enable_user_model:
        return
    numbers = {
        "rbps": config.model_read_bps,
        "rseqiops": config.model_read_seq_iops,
        "rrandiops": config.model_read_rand_iops,
        "wbps": config.model_write_bps,
        "wseqiops": config.model_write_seq_iops,
        "wrandiops": config.model_write_rand_iops,
    }
    given = {name: number for name, number in numbers.items() if number}
    if len(given) < len(numbers):
        missing = ", ".join(sorted(numbers.keys() - given.keys()))
        raise ValueError(f"enableUserModel needs all six numbers of the model; without {missing}")
    yield Resource.BLKIO_COST_MODEL, cost_model(given), ""


def _claims(
    block: BlockCfg,
    make: Callable[[IOCfg, Disk, KernelFacts], Settings],
    kernel: KernelFacts,
    *,
    obj: str,
    field: str,
    source: str,
    rank: int = Rank.DEFAULT,
    pod: Pod | None = None,
) -> tuple[Claim, ...]:
    """Return the claims of one block; raises InputError if any part of it cannot be used."""
    made: list[Claim] = []
    for disk in _disks(block, kernel, obj, field, pod):
        try:
            for resource, value, degraded in make(block.io_cfg, disk, kernel):
                check_block_value(resource, disk.number, value)
                made.append(
                    Claim(
                        resource=resource,
                        key=disk.number,
                        value=value,
                        policy=NAME,
                        reason=f"block I/O of {block.name}",
                        source=source,
                        rank=rank,
                        degraded=degraded,
                    )
                )
        except ValueError as error:
            raise InputError(
                obj=obj, field=f"{field}.ioCfg", value=block.name, problem=str(error)
            ) from error
    return tuple(made)


def claim_node(rule: Rule, subject: NodeSubject) -> Iterator[Claim]:
    yield from rule.of(_ROOT)


def claim_directory(rule: Rule, subject: QosSubject) -> Iterator[Claim]:
    target = _DIRECTORIES.get(subject.kube_qos)
    if target is not None:
        yield from rule.of(target)


def claim_pod(rule: Rule, subject: PodSubject) -> Iterator[Claimed]:
    pod = subject.pod
    if pod.qos in _PODS:
        yield from rule.of("lsrClass")
    text = pod.annotations.get(ANNOTATION_BLKIO_QOS)
    if text is None:
        return
    where = f'metadata.annotations["{ANNOTATION_BLKIO_QOS}"]'
    own: dict[tuple[Resource, str], Claim] = {}
    for index, block in enumerate(parse_blkio_qos(text, obj=pod.obj).blocks):
        try:
            claims = _claims(
                block,
                _group_settings,
                rule.kernel,
                obj=pod.obj,
                field=f"{where}.blocks[{index}]",
                source=f"annotation {ANNOTATION_BLKIO_QOS}",
                rank=Rank.POD,
                pod=pod,
            )
        except InputError as error:
            yield error
            continue
        own |= {(claim.resource, claim.key): claim for claim in claims}
    yield from own.values()


POLICY: Final = Policy(
    name=NAME,
    gate="BlkIOReconcile",
    gate_default=False,
    summary="limits, weights and latency targets of block I/O",
    parse=parse,
    claims={
        Level.NODE: claim_node,
        Level.QOS: claim_directory,
        Level.POD: claim_pod,
    },
    degraded=lambda rule: "; ".join(
        dict.fromkeys(
            claim.degraded for claims in rule.blocks.values() for claim in claims if claim.degraded
        )
    ),
    individual=never,
)
