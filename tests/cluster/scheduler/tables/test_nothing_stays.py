"""Objects that come and go under names of their own leave nothing behind in the tables.

A scheduler runs for months while millions of pods, claims, gangs and nodes come and go. Each life
below makes every kind of object and deletes it again; the count of entries in all tables after a
life must be that after the one before.
"""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from apis.cpuset import CpuSet
from apis.meta import LabelSelector
from apis.scheduling_pod import SchedulingNode
from apis.storage import StorageClass, decode_claim, decode_volume
from cluster.scheduler.configuration.koordinator_arguments import GangMatchPolicy
from cluster.scheduler.cycle.evaluation import Evaluator
from cluster.scheduler.plugins.contract import Refusal
from cluster.scheduler.profiles import Plugins, make_plugins
from cluster.scheduler.tables.booking import Allocation, Booking, PlannedVolumes
from cluster.scheduler.tables.disruption_budgets import Budget, DisruptionBudgets
from cluster.scheduler.tables.gang_definitions import GangDefinition, GangMode
from cluster.scheduler.tables.gangs import Gangs, Step
from cluster.scheduler.tables.numa.facts import parse_numa_facts
from cluster.scheduler.tables.quotas.table import QuotaTable
from cluster.scheduler.tables.reservations import table as reservation_table
from cluster.scheduler.tables.shapes import Shapes
from cluster.scheduler.tables.tables import Tables
from cluster.scheduler.tables.volumes.attachments import DriverLimits
from cluster.scheduler.tables.volumes.objects import claim_of, class_of, volume_of
from cluster.scheduler.tables.volumes.places import place_of_selector
from tests.cluster.scheduler.configuration.files import chart_file, load
from tests.cluster.scheduler.devices.making import a_device_object, a_gpu, parsed_allocation
from tests.cluster.scheduler.load.making import make_metric
from tests.cluster.scheduler.making import make_node, make_pod
from tests.cluster.scheduler.numa.making import SMALL, SMALL_ZONES, make_topology
from tests.cluster.scheduler.quotas.making import make_quota
from tests.cluster.scheduler.reservations.making import make_facts
from tests.cluster.scheduler.volumes.making import claim_json, on, volume_json

_BOUNDED = frozenset(
    {
        "NodeTable._taint_sets",
        "NodeTable._taint_numbers",
        "NodeTable._recent",
        "LabelColumn._numbers",
        "LabelColumn._texts",
    }
)
"""Made again from what is there when they are too long; see their own tests."""


def _reached(*roots: object) -> Iterator[tuple[str, object]]:
    """Yield what belongs to tables, once each, with where it is: Class.attribute."""
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque(("", root) for root in roots)
    while waiting:
        at, each = waiting.popleft()
        if id(each) in seen or isinstance(each, (str, bytes)):
            continue
        seen.add(id(each))
        yield at, each
        if isinstance(each, (Mapping, set, frozenset, list, tuple, deque)):
            waiting.extend((at, inner) for inner in each)
            if isinstance(each, Mapping):
                waiting.extend((at, inner) for inner in each.values())
        elif type(each).__module__.startswith("cluster.scheduler.tables"):
            waiting.extend(
                (f"{type(each).__name__}.{name}", inner) for name, inner in _attributes(each)
            )


def _entries(*roots: object) -> Counter[str]:
    """Count the entries of all containers that belong to tables, by where they are."""
    counts: Counter[str] = Counter()
    for at, each in _reached(*roots):
        if at not in _BOUNDED and isinstance(each, (Mapping, set, frozenset, list, tuple, deque)):
            counts[at] += len(each)
    return +counts


def _attributes(of: object) -> Iterator[tuple[str, object]]:
    yield from getattr(of, "__dict__", {}).items()
    for kind in type(of).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(of, name):
                yield name, getattr(of, name)


class _Cluster:
    """Every table, and one life after the other in it."""

    def __init__(self) -> None:
        self.tables = Tables()
        self.plugins: Plugins = make_plugins(load(chart_file()), self.tables)
        self.gangs = Gangs()
        self.budgets = DisruptionBudgets()
        self.shapes = Shapes()

    def entries(self) -> Counter[str]:
        gc.collect()
        return _entries(*self.roots())

    def roots(self) -> tuple[object, ...]:
        plugins = self.plugins
        return (
            self.tables,
            plugins.loads,
            plugins.numa,
            plugins.devices,
            plugins.quotas,
            self.gangs,
            self.budgets,
            self.shapes,
        )

    def live(self, life: str) -> None:
        """Make objects whose names have the suffix `life`, and delete them again."""
        self._end(life, self.begin(life))

    def begin(self, life: str) -> Booking:
        """Make the objects; return the booking of the pod."""
        node, pod, reservation = f"node-{life}", f"pod-{life}", f"r-{life}"
        self.add_node(node, life)
        self._add_volumes(life)
        self._add_quotas(life)
        self.tables.namespaces.set(f"ns-{life}", {"team": life})
        facts = make_facts(reservation, {"cpu": "2"}, owners=({"labelSelector": {}},))
        self.tables.reservations.upsert(facts)
        self.budgets.set(
            Budget("default", f"b-{life}", LabelSelector(match_labels={"app": life}), 1)
        )
        booking = self._booking(pod, node, life)
        self._schedule(booking)
        self.budgets.spend(booking)
        self.tables.place(booking)
        return booking

    def _end(self, life: str, booking: Booking) -> None:
        self.budgets.delete("default", f"b-{life}")
        self.tables.remove(booking.uid)
        self._quota_table.unwant(booking.uid)
        self.gangs.leave(booking.uid)
        self.gangs.undefine(f"default/gang-{life}")
        self.tables.reservations.delete(f"uid-r-{life}")
        self.tables.namespaces.delete(f"ns-{life}")
        for name in ("low", "top"):
            self._quota_table.delete_quota(f"team/{name}-{life}")
        self._delete_volumes(life)
        self._delete_node(f"node-{life}")

    # --- nodes ---------------------------------------------------------------------------------

    def add_node(self, name: str, life: str) -> None:
        row = self.tables.upsert_node(
            make_node(
                name,
                labels={"zone": life},
                taints=[{"key": life, "effect": "PreferNoSchedule"}],
                images=[{"names": [f"image-{life}"], "sizeBytes": 1}],
                annotations={
                    "scheduling.koordinator.sh/usage-thresholds": "{",
                },
            )
        )
        topology = make_topology(name, cpus=SMALL.cpus(), zones=SMALL_ZONES)
        numa, _ = parse_numa_facts(self.node(name), topology)
        self.plugins.numa.set_node(row, numa)
        self.plugins.devices.set_device(a_device_object(name, [a_gpu(0), a_gpu(1)]))
        for table in self.plugins.loads:
            table.set_report(row, make_metric("1", pods={f"pod-{life}": ("1", "koord-prod")}))

    def node(self, name: str) -> SchedulingNode:
        return make_node(name, labels={"zone": name})

    def _delete_node(self, name: str) -> None:
        row = self.tables.nodes.row(name)
        assert row is not None
        self.plugins.numa.forget(row)
        for table in self.plugins.loads:
            table.set_report(row, None)
        self.tables.delete_node(name)
        self.plugins.devices.delete_device(name)
        self.tables.attachments.delete_attachment(f"attachment-{name}")
        self.tables.attachments.set_limits(name, None)

    # --- volumes -------------------------------------------------------------------------------

    def _add_volumes(self, life: str) -> None:
        volumes, attachments = self.tables.volumes, self.tables.attachments
        volumes.set_driver(f"driver-{life}", reports_storage=True)
        volumes.set_class(
            class_of(
                msgspec.convert(
                    {
                        "metadata": {"name": f"class-{life}"},
                        "provisioner": f"driver-{life}",
                        "volumeBindingMode": "WaitForFirstConsumer",
                    },
                    StorageClass,
                )
            )
        )
        for name in ("free", "bound"):
            volume = volume_json(
                f"{name}-{life}",
                class_name=f"class-{life}",
                claim=f"bound-{life}" if name == "bound" else "",
                terms=on("zone", life),
                csi=(f"driver-{life}", f"handle-{life}"),
            )
            volumes.set_volume(volume_of(decode_volume(msgspec.json.encode(volume))))
            claim = claim_json(
                f"{name}-{life}",
                class_name=f"class-{life}",
                volume=f"bound-{life}" if name == "bound" else "",
            )
            volumes.set_claim(claim_of(decode_claim(msgspec.json.encode(claim))))
        place = place_of_selector(LabelSelector(match_labels={"zone": life}))
        volumes.set_storage(f"storage-{life}", f"class-{life}", place, 1 << 40)
        attachments.set_limits(f"node-{life}", DriverLimits({f"driver-{life}": 5}, frozenset()))
        attachments.set_attachment(
            f"attachment-node-{life}", f"node-{life}", f"driver-{life}", f"bound-{life}"
        )

    def _delete_volumes(self, life: str) -> None:
        volumes = self.tables.volumes
        volumes.delete_storage(f"storage-{life}")
        for name in ("free", "bound"):
            volumes.delete_claim(f"default/{name}-{life}")
            volumes.delete_volume(f"{name}-{life}")
        volumes.delete_class(f"class-{life}")
        volumes.set_driver(f"driver-{life}", reports_storage=False)

    # --- pods ----------------------------------------------------------------------------------

    @property
    def _quota_table(self) -> QuotaTable:
        assert self.plugins.quotas is not None
        return self.plugins.quotas

    def _add_quotas(self, life: str) -> None:
        top, low = f"top-{life}", f"low-{life}"
        assert not self._quota_table.set_quota(
            make_quota(top, labels={"is-parent": "true"}, annotations={"namespaces": f'["{life}"]'})
        )
        assert not self._quota_table.set_quota(make_quota(low, parent=top))

    def _booking(self, pod: str, node: str, life: str) -> Booking:
        made = make_pod(
            pod,
            requests={"cpu": "1", "koordinator.sh/gpu": "50"},
            labels={"app": life, "quota.scheduling.koordinator.sh/name": f"low-{life}"},
            containers=[
                {
                    "name": "c",
                    "resources": {"requests": {"cpu": "1"}},
                    "ports": [{"containerPort": 80, "hostPort": 80 + ord(life)}],
                }
            ],
            affinity={
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "topologyKey": "zone",
                            "labelSelector": {"matchLabels": {"app": life}},
                            "namespaceSelector": {"matchLabels": {"team": life}},
                        }
                    ]
                }
            },
            topologySpreadConstraints=[
                {
                    "maxSkew": 1,
                    "topologyKey": "zone",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"app": life}},
                }
            ],
            volumes=[
                {"name": "a", "persistentVolumeClaim": {"claimName": f"free-{life}"}},
                {"name": "b", "persistentVolumeClaim": {"claimName": f"bound-{life}"}},
                {"name": "c", "rbd": {"monitors": ["m"], "image": life, "pool": "p"}},
            ],
        )
        gpu = {"minor": 0, "resources": {"koordinator.sh/gpu-core": "50"}}
        return Booking(
            f"default/{pod}",
            made.metadata.uid,
            self.shapes.of(made),
            node,
            Allocation(
                cpus=CpuSet.parse("0-1"),
                numa=((0, {"cpu": 1000}),),
                devices=parsed_allocation({"gpu": [gpu]}),
                reservation=f"uid-r-{life}",
                volumes=PlannedVolumes(
                    binds=((f"default/free-{life}", f"free-{life}"),),
                    provisions=(f"default/other-{life}",),
                ),
            ),
        )

    def _schedule(self, booking: Booking) -> None:
        """Have everything looked up that is kept for a pod."""
        (profile,) = self.plugins.profiles.values()
        with suppress(Refusal):
            Evaluator(profile, self.tables).evaluate(booking.shape)
        self.budgets.of(booking.shape)
        self._quota_table.want(booking.uid, booking.shape)
        life = booking.key.rpartition("-")[2]
        definition = GangDefinition(
            id=f"default/gang-{life}",
            min_member=1,
            total=1,
            mode=GangMode.STRICT,
            wait_s=1.0,
            group=(f"default/gang-{life}", f"default/other-{life}"),
            match_policy=GangMatchPolicy.ONCE_SATISFIED,
        )
        self.gangs.define(definition)
        self.gangs.join(booking.uid, definition.id, Step.WAITING)


def test_each_life_leaves_no_more_than_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is known of the shapes asked about last is kept, of a bounded number.
    monkeypatch.setattr(reservation_table, "_MOST_KEPT", 1)
    cluster = _Cluster()
    for life in ("a", "b"):
        cluster.live(life)
    before = cluster.entries()
    cluster.live("c")
    assert cluster.entries() == before


def test_columns_hold_integers_and_truth_values() -> None:
    cluster = _Cluster()
    cluster.live("a")
    # More than the columns have room for at first.
    for number in range(100):
        cluster.add_node(f"node-{number}", "b")
        cluster.tables.reservations.upsert(make_facts(f"r{number}"))
    cluster.begin("c")
    kinds = {
        at: column.dtype.kind
        for at, column in _reached(*cluster.roots())
        if isinstance(column, np.ndarray)
    }
    assert len(kinds) > 60
    # Alone times are fractions.
    assert {at for at, kind in kinds.items() if kind not in "biu"} == {"Occupants.starts"}
