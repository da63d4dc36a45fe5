"""Metrics that are read from a process when they are asked for. Names and labels are upstream's,
except koord_scheduler_faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from apis.keys import CPU, MEMORY
from apis.scheduling import Reservation
from cluster.exposition import head_lines, label_text, number_text
from cluster.scheduler.process import SchedulerProcess
from cluster.scheduler.serving.client_metrics import request_lines, work_queue_lines
from cluster.scheduler.tables.amounts import Amounts, amounts_of
from kube.faults import Faults

_PHASES: Final = ("Pending", "Available", "Succeeded", "Failed")
_UNITS: Final = {CPU: ("core", 1000.0), MEMORY: ("Gi", float(1 << 30))}
"""Resource -> unit, and how many of our units it has. Others are shown as they are ("raw")."""


def show_state(process: SchedulerProcess) -> None:
    """Add these metrics to those of the process."""
    registry = process.metrics.registry
    registry.also(lambda: _gauges(process))
    registry.also(lambda: _unschedulable(process))
    registry.also(lambda: _phases(process.reservations.items.values()))
    registry.also(lambda: _amounts(process.reservations.items.values()))
    registry.also(lambda: _faults(process))
    registry.also(lambda: request_lines((process.client.counts,)))
    registry.also(lambda: work_queue_lines(process.work_queues()))
    # CPU, memory and descriptors.
    own = CollectorRegistry()
    ProcessCollector(registry=own)
    registry.also(lambda: iter((generate_latest(own).decode(),)))


def _gauges(process: SchedulerProcess) -> Iterator[str]:
    name = "leader_election_master_status"
    yield head_lines(name, "1 on the replica that schedules.")
    lease = label_text(("name",), (process.configuration.leader_election.resource_name,))
    yield f"{name}{{{lease}}} {int(process.leading)}\n"
    name = "scheduler_goroutines"
    yield head_lines(name, "Work under way in the background: bindings.")
    yield f'{name}{{operation="binding"}} {process.binder.in_flight}\n'
    name = "scheduler_waiting_gang_group_number"
    yield head_lines(name, "Groups of gangs with pods that wait on a node for the others.")
    yield f"{name} {process.permit.waiting_groups()}\n"
    name = "scheduler_cache_size"
    yield head_lines(
        name, "Nodes, pods on nodes, and of these the ones that are not seen bound yet."
    )
    for kind, count in (
        ("nodes", process.tables.nodes.count),
        ("pods", len(process.tables.bookings)),
        ("assumed_pods", process.attempts.held),
    ):
        yield f'{name}{{type="{kind}"}} {count}\n'


def _unschedulable(process: SchedulerProcess) -> Iterator[str]:
    name = "scheduler_unschedulable_pods"
    yield head_lines(name, "Unschedulable pods by the plugins that refused them.")
    counts: Counter[tuple[str, str]] = Counter()
    for plugin, shape, count in process.queue.refusing():
        counts[plugin, shape.scheduler_name] += count
    for plugin, shape in process.queue.gated_by():
        counts[plugin, shape.scheduler_name] += 1
    for key, count in sorted(counts.items()):
        yield f"{name}{{{label_text(('plugin', 'profile'), key)}}} {count}\n"


def _phases(reservations: Iterable[Reservation]) -> Iterator[str]:
    name = "scheduler_reservation_status_phase"
    yield head_lines(name, "1 for the phase of a reservation.")
    for each in tuple(reservations):
        for phase in _PHASES:
            labels = label_text(("name", "phase"), (each.metadata.name, phase))
            yield f"{name}{{{labels}}} {int(each.status.phase == phase)}\n"


def _amounts(reservations: Iterable[Reservation]) -> Iterator[str]:
    name = "scheduler_reservation_resource"
    yield head_lines(name, "What a reservation reserves, what its pods use of it, and the ratio.")
    for each in tuple(reservations):
        allocatable = amounts_of(each.status.allocatable)
        allocated = amounts_of(each.status.allocated)
        for kind, amounts in (("allocatable", allocatable), ("allocated", allocated)):
            for resource, amount in amounts.items():
                unit, size = _UNITS.get(resource, ("raw", 1.0))
                yield _amount(name, kind, each, resource, unit, amount / size)
        yield from _utilization(name, each, allocatable, allocated)


def _utilization(
    name: str, of: Reservation, allocatable: Amounts, allocated: Amounts
) -> Iterator[str]:
    for resource, amount in allocatable.items():
        if amount > 0:
            ratio = allocated.get(resource, 0) / amount
            yield _amount(name, "utilization", of, resource, "ratio", ratio)


def _amount(name: str, kind: str, of: Reservation, resource: str, unit: str, amount: float) -> str:
    labels = label_text(
        ("type", "name", "resource", "unit"), (kind, of.metadata.name, resource, unit)
    )
    return f"{name}{{{labels}}} {number_text(amount)}\n"


def _faults(process: SchedulerProcess) -> Iterator[str]:
    name = "koord_scheduler_faults"
    yield head_lines(
        name, "Caught exceptions in the scheduler's own code; the log has them.", "counter"
    )
    parts: list[Faults] = [
        process.attempts.faults,
        process.binder.faults,
        process.statuses.faults,
        process.events.faults,
        process.reservation_writer.faults,
        process.volume_binder.faults,
        process.node_locks.faults,
        process.evictor.faults,
        process.explanations.faults,
        *(cache.faults for cache in (*process.caches, process.pods, process.asked)),
    ]
    if process.reservation_controller is not None:
        parts.append(process.reservation_controller.queue.faults)
    if process.network_status is not None:
        parts.append(process.network_status.faults)
    if process.pod_group_statuses is not None:
        parts.append(process.pod_group_statuses.queue.faults)
    if process.quota_upkeep is not None:
        parts += (process.quota_upkeep.faults, process.quota_upkeep.statuses.queue.faults)
    if process.extenders is not None:
        parts.append(process.extenders.faults)
    # Two caches may be of one type: Prometheus refuses a series that occurs twice.
    counts: Counter[str] = Counter()
    for each in parts:
        counts[each.part] += each.count
    for part, count in counts.items():
        yield f"{name}{{{label_text(('part',), (part,))}}} {number_text(count)}\n"
