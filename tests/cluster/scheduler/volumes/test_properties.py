"""Random storage: verdicts equal those of slow plain code, and no volume goes to two claims."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from apis.decode import json_decoder
from apis.scheduling_pod import (
    SchedulingPod,
    decode_scheduling_node,
    decode_scheduling_pod,
)
from apis.storage import CSINode, CSIStorageCapacity, StorageClass, decode_claim, decode_volume
from cluster.scheduler.cycle.scheduling import Placed
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.plugins.volumes.binding import VolumeBinding
from cluster.scheduler.reasons.diagnosis import diagnose
from cluster.scheduler.sources.bookings import booking_of
from cluster.scheduler.tables.booking import NO_ALLOCATION, Allocation
from cluster.scheduler.tables.tables import Tables
from cluster.scheduler.tables.volumes.attachments import limits_of
from cluster.scheduler.tables.volumes.objects import (
    claim_of,
    class_of,
    largest_volume,
    volume_of,
)
from cluster.scheduler.tables.volumes.places import place_of_selector
from tests.cluster.scheduler.random_cluster import nodes
from tests.cluster.scheduler.volumes import oracle, random_volumes
from tests.cluster.scheduler.volumes.making import HOST, Cluster, on, pod_with

Tree = dict[str, Any]

_class = json_decoder(StorageClass)
_csi_node = json_decoder(CSINode)
_capacity = json_decoder(CSIStorageCapacity)


def _encode(tree: Tree) -> bytes:
    return msgspec.json.encode(tree)


def _fill(tables: Tables, storage: oracle.Storage, random: Random) -> None:
    """Show the storage to the tables, in any order."""
    volumes = tables.volumes
    steps: list[Any] = [
        *((volumes.set_class, class_of(_class(_encode(e)))) for e in storage.classes.values()),
        *((volumes.set_claim, claim_of(decode_claim(_encode(e)))) for e in storage.claims.values()),
        *(
            (volumes.set_volume, volume_of(decode_volume(_encode(e))))
            for e in storage.volumes.values()
        ),
    ]
    random.shuffle(steps)
    for method, value in steps:
        method(value)
    for name, node in storage.csi_nodes.items():
        tables.attachments.set_limits(name, limits_of(_csi_node(_encode(node))))
    for name, driver in storage.drivers.items():
        volumes.set_driver(name, reports_storage=driver["spec"]["storageCapacity"])
    for report in storage.capacities:
        read = _capacity(_encode(report))
        assert read.node_topology is not None
        place = place_of_selector(read.node_topology)
        key = report["metadata"]["name"]
        volumes.set_storage(key, read.storage_class_name, place, largest_volume(read))


def _storage(random: Random, names: list[str]) -> oracle.Storage:
    bound = random_volumes.bound(random, 8, names)
    claims = {claim["metadata"]["name"]: claim for claim, _ in bound}
    volumes = {volume["metadata"]["name"]: volume for _, volume in bound if volume is not None}
    for volume in random_volumes.free_volumes(random, 8, names):
        volumes[volume["metadata"]["name"]] = volume
    for number in range(8):
        claim = random_volumes.fresh_claim(random, f"fresh-{number}")
        claims[claim["metadata"]["name"]] = claim
        if random.random() < 0.15:
            claim["metadata"]["annotations"][oracle.SELECTED] = random.choice(names)
        elif random.random() < 0.15:
            volumes[f"free-{number}"]["spec"]["claimRef"] = {
                "namespace": "default",
                "name": claim["metadata"]["name"],
            }
    if random.random() < 0.5:
        claims["bound-1"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return oracle.Storage(
        classes={each["metadata"]["name"]: each for each in random_volumes.classes(random)},
        claims=claims,
        volumes=volumes,
        csi_nodes={
            each["metadata"]["name"]: each for each in random_volumes.csi_nodes(random, names)
        },
        drivers={each["metadata"]["name"]: each for each in random_volumes.csi_drivers()},
        capacities=random_volumes.capacities(random, names),
    )


def _pod(random: Random, name: str, claims: list[str], node: str = "") -> Tree:
    used = random.sample(claims, random.choice((1, 1, 2, 3, 4)))
    volumes: list[Tree] = [
        {"name": f"v{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(used)
    ]
    if random.random() < 0.3:
        volumes.append({"name": "disk", **random_volumes.disk(random)})
    spec = {"nodeName": node, "containers": [{"name": "c"}], "volumes": volumes}
    return {"metadata": {"name": name, "namespace": "default", "uid": name}, "spec": spec}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_verdicts_equal_those_of_the_oracle(seed: int) -> None:
    random = Random(seed)
    made = nodes(random, 7)
    names = [node["metadata"]["name"] for node in made]
    storage = _storage(random, names)
    cluster = Cluster()
    tables = cluster.tables
    late = random.random() < 0.5
    if late:
        _fill(tables, storage, random)
    for node in made:
        tables.upsert_node(decode_scheduling_node(_encode(node)))
    if not late:
        _fill(tables, storage, random)
    for number in range(6):
        node_name = random.choice(names)
        pod = _pod(random, f"r{number}", list(storage.claims), node_name)
        running = decode_scheduling_pod(_encode(pod))
        tables.place(booking_of(running, cluster.shapes.of(running)).booking)
        storage.running.append((node_name, pod))
    for number in range(8):
        pod = _pod(random, f"p{number}", [*storage.claims, "missing"])
        shape = cluster.shapes.of(decode_scheduling_pod(_encode(pod)))
        expected = oracle.refusal(pod, storage)
        if expected:
            try:
                cluster.evaluator.evaluate(shape)
            except Refusal as refusal:
                assert str(refusal) == expected
            else:
                raise AssertionError(f"not refused: {expected}")
            continue
        evaluation = cluster.evaluator.evaluate(shape)
        counts: dict[str, int] = defaultdict(int)
        feasible = set()
        for node in made:
            found = oracle.reasons(pod, node, storage)
            for reason in found:
                counts[reason] += 1
            if not found:
                feasible.add(node["metadata"]["name"])
        assert {tables.nodes.name(int(row)) for row in evaluation.feasible} == feasible
        assert dict(diagnose(shape, tables, evaluation.masks).counts) == dict(counts)
        for row in evaluation.feasible:
            _check_choice(cluster, pod, made, int(row), storage)


def _check_choice(
    cluster: Cluster, pod: Tree, made: list[Tree], row: int, storage: oracle.Storage
) -> None:
    """The volumes that are chosen on a node that passes are those of the oracle."""
    tables = cluster.tables
    shape = cluster.shapes.of(decode_scheduling_pod(_encode(pod)))
    allocation = VolumeBinding().allocate(shape, tables, row, NO_ALLOCATION)
    assert isinstance(allocation, Allocation)
    (node,) = (each for each in made if each["metadata"]["name"] == tables.nodes.name(row))
    waiting = [
        storage.claims[name]
        for name in oracle.claims_of(pod)
        if not storage.claims[name]["spec"].get("volumeName")
    ]
    free = [each for each in waiting if oracle.SELECTED not in each["metadata"]["annotations"]]
    expected: dict[str, str] = {}
    for claim in sorted(
        free, key=lambda each: oracle.size(each["spec"]["resources"]["requests"]["storage"])
    ):
        volume = oracle.choice(claim, node, storage, set(expected.values()))
        if volume is not None:
            expected[f"default/{claim['metadata']['name']}"] = volume
    planned = allocation.volumes
    assert dict(planned.binds) == expected
    assert {*expected, *planned.provisions} == {
        f"default/{each['metadata']['name']}" for each in waiting
    }


class Lives(RuleBasedStateMachine):
    """Claims, volumes and pods come and go; what is planned is written, or given back."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()
        self.cluster.storage_class("wait")
        for number in range(3):
            self.cluster.node(f"n{number}")
        self.claims: dict[str, str] = {}
        """Name -> the volume that the claim is bound to, or ""."""
        self.volumes: dict[str, tuple[int, int, str]] = {}
        """Name -> size, number of its node, claim."""
        self.pods: set[str] = set()

    @rule(number=st.integers(0, 5))
    def claim_comes(self, number: int) -> None:
        self.claims.setdefault(f"c{number}", "")
        self._show_claim(f"c{number}")

    @rule(number=st.integers(0, 5))
    def claim_goes(self, number: int) -> None:
        volume = self.claims.pop(f"c{number}", "")
        if volume:
            self.volumes.pop(volume, None)
            self.cluster.tables.volumes.delete_volume(volume)
        self.cluster.tables.volumes.delete_claim(f"default/c{number}")

    @rule(number=st.integers(0, 6), size=st.integers(1, 3), node=st.integers(0, 2))
    def volume_comes(self, number: int, size: int, node: int) -> None:
        known = self.volumes.get(f"v{number}")
        self.volumes[f"v{number}"] = (size, node, known[2] if known else "")
        self._show_volume(f"v{number}")

    @rule(number=st.integers(0, 5), of=st.sets(st.integers(0, 5), min_size=1, max_size=3))
    def pod_is_tried(self, number: int, of: set[int]) -> None:
        name = f"p{number}"
        if name not in self.pods:
            pod: SchedulingPod = pod_with(name, *(f"c{each}" for each in sorted(of)))
            if isinstance(self.cluster.place(pod), Placed):
                self.pods.add(name)

    @rule(number=st.integers(0, 5))
    def pod_goes(self, number: int) -> None:
        self.pods.discard(f"p{number}")
        self.cluster.tables.remove(f"uid-default-p{number}")

    @rule(number=st.integers(0, 5))
    def pod_is_bound(self, number: int) -> None:
        """Its volumes are bound first; then the pod is read as bound."""
        booking = self.cluster.tables.bookings.get(f"uid-default-p{number}")
        if booking is None:
            return
        for key, volume in booking.allocation.volumes.binds:
            claim = key.partition("/")[2]
            if claim not in self.claims or volume not in self.volumes:
                return
        for key, volume in booking.allocation.volumes.binds:
            claim = key.partition("/")[2]
            size, node, holder = self.volumes[volume]
            assert holder in ("", claim), "a volume was written for two claims"
            self.volumes[volume] = (size, node, claim)
            self._show_volume(volume)
            self.claims[claim] = volume
            self._show_claim(claim)
        claims = [each.name for each in booking.shape.claims]
        pod = pod_with(f"p{number}", *claims, node=booking.node)
        shown = booking_of(pod, self.cluster.shapes.of(pod)).booking
        self.cluster.tables.place(shown)

    @rule(name=st.sampled_from(["n0", "n1", "n2"]))
    def node_goes_and_comes(self, name: str) -> None:
        self.cluster.tables.delete_node(name)
        self.cluster.node(name)

    def _show_claim(self, name: str) -> None:
        self.cluster.claim(name, volume=self.claims[name])

    def _show_volume(self, name: str) -> None:
        size, node, claim = self.volumes[name]
        self.cluster.volume(name, size=f"{size}Gi", terms=on(HOST, f"n{node}"), claim=claim)

    @invariant()
    def no_volume_is_for_two_claims(self) -> None:
        holders: dict[str, set[str]] = defaultdict(set)
        for name, (_, _, claim) in self.volumes.items():
            if claim:
                holders[name].add(f"default/{claim}")
        for booking in self.cluster.tables.bookings.values():
            for key, volume in booking.allocation.volumes.binds:
                holders[volume].add(key)
        assert all(len(claims) <= 1 for claims in holders.values()), holders

    @invariant()
    def tables_equal_those_made_from_the_objects(self) -> None:
        fresh = Cluster()
        fresh.storage_class("wait")
        for number in range(3):
            fresh.node(f"n{number}")
        for name, volume in self.claims.items():
            fresh.claim(name, volume=volume)
        for name, (size, node, claim) in self.volumes.items():
            fresh.volume(name, size=f"{size}Gi", terms=on(HOST, f"n{node}"), claim=claim)
        for booking in self.cluster.tables.bookings.values():
            fresh.tables.place(booking)
        shape = fresh.shapes.of(pod_with("q", "probe"))
        for cluster in (self.cluster, fresh):
            cluster.claim("probe")
        known, anew = (
            {
                cluster.tables.nodes.name(row): int(mask)
                for row, mask in enumerate(
                    VolumeBinding().filter(shape, cluster.tables, slice(None))
                )
            }
            for cluster in (self.cluster, fresh)
        )
        self.cluster.tables.volumes.delete_claim("default/probe")
        assert known == anew


Lives.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLives = Lives.TestCase
