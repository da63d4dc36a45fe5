"""Reasons, scores, chosen devices and virtual functions are those of a slow, obvious oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import given, settings

from apis.keys import LABEL_GPU_MODEL, LABEL_GPU_PARTITION_POLICY
from cluster.scheduler.exact.devices.allocate import Devices
from cluster.scheduler.exact.devices.candidates import Limits
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.exact.numa import Hint, subsets
from cluster.scheduler.plugins.contract import Reason
from cluster.scheduler.plugins.devices.allocation import DeviceShareAllocator
from cluster.scheduler.plugins.devices.device_share import DeviceShareFilter, DeviceShareScore
from cluster.scheduler.plugins.devices.reserved import limits_within
from cluster.scheduler.plugins.reservations.restoring import Restoring
from cluster.scheduler.tables.booking import Allocation
from cluster.scheduler.tables.devices.request import DeviceRequest, device_request
from cluster.scheduler.tables.devices.table import DeviceTable
from cluster.scheduler.tables.reservations.facts import AllocatePolicy
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables
from tests.cluster.scheduler.devices import oracle, oracle_nodes
from tests.cluster.scheduler.devices.clusters import a_cluster, reasons
from tests.cluster.scheduler.devices.making import a_booking, a_device_object, a_shape, full
from tests.cluster.scheduler.devices.random_machines import (
    NPU,
    TEMPLATES,
    cases,
)
from tests.cluster.scheduler.making import make_node
from tests.cluster.scheduler.reservations.making import make_facts

Given = dict[str, list[tuple[int, str, dict[str, int], str]]]
"""By type: minor, virtual function or "", amounts, template or ""."""

_RESTORED = Restoring()
_MANY = settings(max_examples=120, deadline=None)


@dataclass(frozen=True)
class _Cluster:
    """held: what the pods and reservations of each machine have."""

    tables: Tables
    devices: DeviceTable
    machines: list[dict[str, Any]]
    held: list[list[oracle_nodes.Held]]

    def node(self, row: int, *, free: str = "") -> oracle_nodes.Node:
        machine = self.machines[row]
        partitions = None
        if machine["partitions"]:
            partitions = [
                oracle_nodes.Partition(minors, score, bandwidth << 30)
                for minors, score, bandwidth in machine["partitions"]
            ]
            honor = LABEL_GPU_PARTITION_POLICY in machine["device_labels"]
        else:
            partitions = oracle.EIGHT_LINKED if LABEL_GPU_MODEL in machine["labels"] else None
            honor = LABEL_GPU_PARTITION_POLICY in machine["labels"]
        return oracle_nodes.node_of(
            machine["devices"],
            self.held[row],
            partitions=partitions,
            honor=honor,
            templates=TEMPLATES if machine["npu"] else {},
            free=free,
        )

    def reservations(self, row: int) -> list[tuple[str, oracle_nodes.Node]]:
        """Return the reservations of a node, each with the node as a pod inside sees it."""
        found = []
        for uid in sorted({pod.group for pod in self.held[row] if pod.own}):
            node = self.node(row, free=uid)
            facts = self.tables.reservations.get(uid)
            assert facts is not None
            only = facts.policy is AllocatePolicy.RESTRICTED
            left = oracle_nodes.left_of(node, self.held[row], uid)
            found.append((uid, replace(node, limits=oracle_nodes.Limits(reserved=left, only=only))))
        return found


def _cluster(machines: list[dict[str, Any]]) -> _Cluster:
    """Return the machines with their pods, in the tables and for the oracle."""
    tables, devices = a_cluster()
    devices.set_templates({"-".join(NPU.values()): TEMPLATES})
    cluster = _Cluster(tables, devices, machines, [])
    for row, machine in enumerate(machines):
        name = f"n{row}"
        tables.upsert_node(make_node(name, labels=machine["labels"]))
        errors = devices.set_device(
            a_device_object(
                name,
                machine["devices"],
                labels=machine["device_labels"],
                annotations=machine["device_annotations"],
            )
        )
        assert not errors
        held: list[oracle_nodes.Held] = []
        cluster.held.append(held)
        allocator = DeviceShareAllocator(devices, restored=_RESTORED)
        for number, (amounts, how) in enumerate(machine["held"]):
            shape = a_shape(amounts, **how)
            found = allocator.choose(shape, row)
            if machine["silent"] == number:
                found = {}  # bound by another scheduler
            if not isinstance(found, Failure):
                tables.place(a_booking(f"{name}-{number}", shape, name, found))
                held.append(oracle_nodes.Held(_request(shape), found))
        for number, each in enumerate(machine["reservations"]):
            _reserve(cluster, row, f"{name}-r{number}", each, allocator)
    return cluster


def _reserve(
    cluster: _Cluster,
    row: int,
    name: str,
    reservation: dict[str, Any],
    allocator: DeviceShareAllocator,
) -> None:
    """Have a reservation for the app "a" on a node, with pods that use it, where they fit."""
    tables, uid, held = cluster.tables, f"uid-{name}", cluster.held[row]
    shape = a_shape(reservation["amounts"], **reservation["extra"])
    found = allocator.choose(shape, row)
    if isinstance(found, Failure):
        return
    amounts = {full(key): str(amount) for key, amount in reservation["amounts"].items()}
    tables.reservations.upsert(make_facts(name, amounts, policy=reservation["policy"]))
    tables.place(a_booking(uid, shape, f"n{row}", found))
    held.append(oracle_nodes.Held(_request(shape), found, uid, own=True))
    for number, (requests, how) in enumerate(reservation["owners"]):
        owner = a_shape(requests, **how)
        given = _within(cluster, owner, row, uid, allocator)
        if not isinstance(given, Failure):
            booking = a_booking(f"{name}-{number}", owner, f"n{row}", given, reservation=uid)
            tables.place(booking)
            held.append(oracle_nodes.Held(_request(owner), given, uid))


def _within(
    cluster: _Cluster, shape: PodShape, row: int, uid: str, allocator: DeviceShareAllocator
) -> Devices | Failure:
    """Return what a pod gets through a reservation."""
    limits = limits_within(cluster.devices, cluster.tables, row, uid, _RESTORED)
    return allocator.choose(shape, row, limits=limits, without=frozenset({uid}))


def _request(shape: PodShape) -> DeviceRequest:
    request = shape.derived(device_request)
    assert isinstance(request, DeviceRequest)
    return request


def _chosen(found: Devices | Failure) -> Given | oracle.Failed:
    if isinstance(found, Failure):
        return oracle.Failed(found.text, found.resolvable)
    given: Given = {}
    for type_, each in found.items():
        given[str(type_)] = []
        for one in each:
            extension = one.extension
            vfs = extension.vfs if extension is not None else ()
            amounts = {name: quantity.value() for name, quantity in one.resources.items()}
            template = extension.gpu_shared_resource_template if extension is not None else ""
            bus_id = vfs[0].bus_id if vfs else ""
            given[str(type_)].append((one.minor, bus_id, amounts, template))
    return given


def _expected(node: oracle_nodes.Node, request: DeviceRequest) -> Given | oracle.Failed:
    found = oracle.decide(node, request)
    if isinstance(found, oracle.Failed):
        return found
    given: Given = {}
    for type_, each in found.items():
        wanted = request.types[type_]
        template = (oracle.template_of(node, wanted) or "") if type_ == "gpu" else ""
        given[str(type_)] = [
            (one.minor, one.function(wanted), one.takes(wanted), template) for one in each
        ]
    return given


def _shown(held_back: list[Reason]) -> set[oracle.Failed]:
    return {oracle.Failed(reason.text, reason.resolvable) for reason in held_back}


@_MANY
@given(cases())
def test_a_node_gives_the_devices_that_the_oracle_gives_or_fails_with_its_reason(
    case: tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]],
) -> None:
    machines, requests, extra = case
    cluster = _cluster(machines)
    shape = a_shape(requests, **extra)
    request = _request(shape)
    masks = reasons(shape, cluster.tables, cluster.devices)
    for row, held_back in enumerate(masks):
        expected = _expected(cluster.node(row), request)
        assert _chosen(DeviceShareAllocator(cluster.devices).choose(shape, row)) == expected
        if isinstance(expected, oracle.Failed):
            # Columns look at all types, and name what is missing of each.
            assert expected in _shown(held_back)
        else:
            assert not held_back


@_MANY
@given(cases())
def test_nodes_that_pass_are_ranked_as_the_oracle_ranks_them(
    case: tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]],
) -> None:
    machines, requests, extra = case
    cluster = _cluster(machines)
    shape = a_shape(requests, **extra)
    rows = np.arange(len(machines), dtype=np.intp)
    scores = DeviceShareScore(cluster.devices).score(shape, cluster.tables, rows)
    for row, score in enumerate(scores.tolist()):
        node = cluster.node(row)
        if not isinstance(oracle.decide(node, _request(shape)), oracle.Failed):
            assert score == oracle.node_score(node, _request(shape))


@_MANY
@given(cases())
def test_a_pod_gets_devices_through_a_reservation_as_the_oracle_gives_them(
    case: tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]],
) -> None:
    machines, requests, extra = case
    cluster = _cluster(machines)
    shape = a_shape(requests, labels={"app": "a"}, **extra)
    request = _request(shape)
    allocator = DeviceShareAllocator(cluster.devices, restored=_RESTORED)
    plugin = DeviceShareFilter(cluster.devices, restored=_RESTORED)
    mask = plugin.filter(shape, cluster.tables, slice(0, len(machines)))
    known = plugin.reasons(shape)
    for row in range(len(machines)):
        outcomes = []
        for uid, node in cluster.reservations(row):
            expected = _expected(node, request)
            outcomes.append(expected)
            assert _chosen(_within(cluster, shape, row, uid, allocator)) == expected
        alone = _expected(cluster.node(row), request)
        passes = any(not isinstance(each, oracle.Failed) for each in (alone, *outcomes))
        assert bool(mask[row]) is not passes
        if not passes:
            bits = [known[bit] for bit in range(len(known)) if int(mask[row]) >> bit & 1]
            assert alone in _shown(bits)
        # The one row alone is judged as it is among all.
        alone_mask = plugin.filter(shape, cluster.tables, np.array([row], dtype=np.intp))
        assert alone_mask[0] == mask[row]


@_MANY
@given(cases())
def test_devices_are_aligned_to_numa_nodes_as_the_oracle_aligns_them(
    case: tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]],
) -> None:
    (machine, *_), requests, extra = case
    cluster = _cluster([machine])
    shape = a_shape(requests, **extra)
    request = _request(shape)
    allocator = DeviceShareAllocator(cluster.devices, restored=_RESTORED)
    views = [("", cluster.node(0)), *cluster.reservations(0)]
    for uid, node in views:
        places = [one.place for type_ in request.types for one in node.of(type_)]
        ids = sorted({place[0] for place in places if place is not None and place[0] >= 0})
        hints = allocator.hints(
            shape,
            cluster.tables,
            0,
            subsets((0, 1)),
            reservation=uid,
            without=frozenset({uid}) if uid else frozenset(),
        )
        if not ids:
            assert hints is None
            continue
        assert hints is not None
        empty = oracle_nodes.node_of(
            machine["devices"],
            [],
            partitions=node.partitions,
            honor=node.honor,
            templates=node.templates,
        )
        able, capable = {}, []
        for mask in subsets(tuple(ids)):
            numa = frozenset(each for each in ids if mask >> each & 1)
            limits = replace(node.limits, numa=numa)
            if not isinstance(_expected(replace(empty, limits=limits), request), oracle.Failed):
                capable.append(mask.bit_count())
            expected = _expected(replace(node, limits=limits), request)
            within = limits_within(cluster.devices, cluster.tables, 0, uid, _RESTORED)
            asked = replace(within, numa=numa) if uid else Limits(numa=numa)
            free = frozenset({uid}) if uid else frozenset[str]()
            assert _chosen(allocator.choose(shape, 0, limits=asked, without=free)) == expected
            if not isinstance(expected, oracle.Failed):
                able[mask] = expected
        anywhere = _expected(node, request)
        whole = sum(1 << each for each in ids)
        expected_hints = {}
        for mask in subsets((0, 1)):
            # NUMA nodes without devices change nothing.
            given = able.get(mask & whole)
            if given is not None:
                preferred = (mask & whole).bit_count() == min(capable, default=0)
                same = _minors(given) == _minors(anywhere)
                expected_hints[mask] = Hint(preferred, 500 if same else 0)
        assert dict(hints) == expected_hints
        booked = allocator.allocate(
            shape, cluster.tables, 0, Allocation(numa=((0, {"cpu": 1}),), reservation=uid)
        )
        numa = frozenset({0})
        expected = _expected(replace(node, limits=replace(node.limits, numa=numa)), request)
        if isinstance(booked, Reason):
            assert oracle.Failed(booked.text, booked.resolvable) == expected
        else:
            assert _chosen(booked.devices) == expected


def _minors(found: Given | oracle.Failed) -> dict[str, list[int]] | None:
    if isinstance(found, oracle.Failed):
        return None
    return {type_: [each[0] for each in of_type] for type_, of_type in found.items()}
