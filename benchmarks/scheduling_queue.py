"""What the scheduling queue costs for each pod and each event, in time and memory.

    python -m benchmarks.scheduling_queue [--pods 100000] [--shapes 200] [--rounds 5]

Prints the median over the rounds of each operation, and the memory of the queue alone (the pods are
made before). No process, no file and no network is used.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.running import run_main
from cluster.scheduler.cycle.events import POD, Action, ClusterEvent, EventTable, Registration
from cluster.scheduler.cycle.queue import SchedulingQueue
from cluster.scheduler.cycle.waiting import Gate, scheduling_gates
from cluster.scheduler.tables.pending import PendingPod

REFUSED = 0.2
"""Part of the pods that fits nowhere; they must cost the others nothing."""
MEMBERS = 100
"""Members of a gang."""


@dataclass(frozen=True, eq=False)
class Shape:
    """A shape that is equal to itself only, as those of the scheduler are."""

    gates: tuple[str, ...] = ()


Pod = PendingPod[Shape]
Queue = SchedulingQueue[Shape]

FREED = ClusterEvent(POD, Action.DELETE)


def new_queue() -> Queue:
    return SchedulingQueue(
        EventTable({"NodeResourcesFit": [Registration(POD, Action.DELETE, lambda p, o, n: False)]}),
        gates=[Gate("SchedulingGates", scheduling_gates)],
    )


def make_pods(count: int, shapes: int, *, members: int = 0) -> list[Pod]:
    """Return pods of several shapes; with `members`, in gangs of so many."""
    kinds = [Shape() for _ in range(shapes)]
    return [
        PendingPod(
            key=f"default/pod-{n}",
            uid=f"uid-{n}",
            priority=n % 3,
            shape=kinds[n // members % shapes if members else n % shapes],
            created=n / 1000,
            gang=f"default/gang-{n // members}" if members else "",
        )
        for n in range(count)
    ]


def timed(work: Callable[[], object], count: int) -> float:
    """Return microseconds for each of `count` operations."""
    gc.collect()
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) / count * 1e6


def add_all(queue: Queue, pods: Iterable[Pod]) -> None:
    for pod in pods:
        queue.add(pod, 1000.0)


def schedule_all(queue: Queue) -> None:
    while (pod := queue.pop(1000.0)) is not None:
        queue.remove(pod.uid)


def refuse_all(queue: Queue) -> None:
    while (pod := queue.pop(1000.0)) is not None:
        queue.refuse(pod.uid, {"NodeResourcesFit"}, 1000.0)


def one_round(pods: list[Pod], shapes: int) -> dict[str, float]:
    """Return microseconds by operation."""
    result = {}
    queue = new_queue()
    result["add a pod"] = timed(lambda: add_all(queue, pods), len(pods))
    result["see an unchanged pod again"] = timed(lambda: add_all(queue, pods), len(pods))
    result["pop and place a pod"] = timed(lambda: schedule_all(queue), len(pods))
    add_all(queue, pods)
    result["pop and refuse a pod"] = timed(lambda: refuse_all(queue), len(pods))
    events = 1000
    result[f"an event, {len(pods):,} refused pods of {shapes} shapes"] = timed(
        lambda: [queue.cluster_event(FREED, 1010.0) for _ in range(events)], events
    )
    wake = new_queue()
    add_all(wake, pods)
    refuse_all(wake)
    result["activate a refused pod with its replicas"] = timed(
        lambda: wake.activate([pod.uid for pod in pods], 1010.0), len(pods)
    )
    gangs = make_pods(len(pods), shapes, members=MEMBERS)
    ganged = new_queue()
    result["add a member of a gang"] = timed(lambda: add_all(ganged, gangs), len(gangs))

    def refuse_gangs() -> None:
        while (pod := ganged.pop(1000.0)) is not None:
            ganged.refuse_gangs(pod.uid, {"NodeResourcesFit"}, [pod.gang], (), 1000.0)

    result[f"refuse a gang of {MEMBERS} at its first member"] = timed(
        refuse_gangs, len(gangs) // MEMBERS
    )
    ganged.activate([pod.uid for pod in gangs], 1010.0)
    result[f"refuse a gang of {MEMBERS} once more"] = timed(refuse_gangs, len(gangs) // MEMBERS)
    return result


def mixed(pods: list[Pod], refused: float) -> float:
    """Return microseconds for each placed pod, with an event after each placement.

    refused: part of the pods that waits, refused, beside them.
    """
    queue = new_queue()
    waiting = int(len(pods) * refused)
    add_all(queue, pods[:waiting])
    refuse_all(queue)
    add_all(queue, pods[waiting:])

    def run() -> None:
        while (pod := queue.pop(1000.0)) is not None:
            queue.cluster_event(FREED, 1000.0)
            queue.remove(pod.uid)

    return timed(run, len(pods) - waiting)


def memory(pods: list[Pod], prepare: Callable[[Queue], None]) -> float:
    """Return bytes for each pod."""
    gc.collect()
    tracemalloc.start()
    queue = new_queue()
    add_all(queue, pods)
    prepare(queue)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / len(pods)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=100_000)
    parser.add_argument("--shapes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pods = make_pods(options.pods, options.shapes)
    rounds = [one_round(pods, options.shapes) for _ in range(options.rounds)]
    print(f"{options.pods:,} pods, {options.shapes} shapes, median of {options.rounds} rounds")
    for name in rounds[0]:
        print(f"  {statistics.median(r[name] for r in rounds):8.2f} us  {name}")
    few = make_pods(options.pods, 5)
    for part in (0.0, REFUSED):
        cost = statistics.median(mixed(few, part) for _ in range(options.rounds))
        print(f"  {cost:8.2f} us  place a pod and see an event; {part:.0%} refused, 5 shapes")
    print(f"  {memory(pods, lambda queue: None):8.0f} bytes for each active pod")
    print(f"  {memory(pods, refuse_all):8.0f} bytes for each refused pod")


if __name__ == "__main__":
    run_main(main)
