"""The questions that a simulation answers, each as JSON has the answer.

What would happen to these pods; what would happen to all pods under this configuration, alone or
beside another one; how many more of a pod fit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from apis.errors import InputError
from apis.meta import format_time
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.simulation.claims import default_class, kept_of_cluster
from cluster.scheduler.simulation.objects import FileObject, Progress, tree_of
from cluster.scheduler.simulation.pods import Defaults, PodFile, pods_of, priorities_of
from cluster.scheduler.simulation.simulation import Capacity, PodResult, Simulation, emptied
from kube.resources import PERSISTENT_VOLUME_CLAIMS, PRIORITY_CLASSES


@dataclass(frozen=True, slots=True)
class Question:
    """cluster: its objects. now: the moment that is simulated, seconds since 1970. seed: fixes how
    ties are drawn. scheduler_name: given to all pods that are scheduled; "" leaves theirs."""

    cluster: tuple[FileObject, ...]
    configuration: SchedulerConfiguration
    now: float
    seed: int = 0
    scheduler_name: str = ""

    @property
    def profiles(self) -> tuple[str, ...]:
        """Names of the profiles."""
        return tuple(profile.scheduler_name for profile in self.configuration.profiles)


def check(question: Question) -> None:
    """Raises InputError if the pods are to be given a scheduler name without a profile."""
    name = question.scheduler_name
    if name and name not in question.profiles:
        raise InputError(
            obj="command line",
            field="--as",
            value=name,
            problem="the configuration has no profile of this name",
            hint=f"its profiles: {' '.join(question.profiles)}",
        )


def place_pods(
    question: Question, objects: Iterable[FileObject], *, progress: Progress
) -> dict[str, Any]:
    """Return what would happen to the pods of a file. Raises InputError."""
    check(question)
    simulation, file, notes = _prepared(question, objects)
    simulation.run(progress=progress)
    was = _nodes_of(question.cluster, {each.key for each in file.pods})
    results = [simulation.result(each.key, was=was.get(each.key, "")) for each in file.pods]
    given = {each.key for each in file.pods}
    return _answer(question, simulation, notes) | {
        "pods": [_plain(each) for each in results],
        "evicted": [
            {"pod": key, "was": node}
            for key, node in sorted(simulation.evicted.items())
            if key not in given
        ],
    }


def count_capacity(
    question: Question, objects: Iterable[FileObject], *, limit: int, progress: Progress
) -> dict[str, Any]:
    """Return how many of each pod of a file fit, each pod asked on its own. Raises InputError."""
    check(question)
    given = tuple(objects)
    _, file, notes = _prepared(question, given)
    capacities: list[Capacity] = []
    seen: set[bytes] = set()
    for pod in file.pods:
        # One question for all replicas of a workload.
        from_templates = file.from_templates.get(pod.key, ())
        content = _without_name(pod, {claim.name for claim in from_templates})
        if content in seen:
            continue
        seen.add(content)
        simulation, _, _ = _prepared(question, given)
        simulation.now = question.now
        claims = (*from_templates, *file.ephemeral.get(pod.key, ()))
        capacities.append(
            simulation.capacity(pod.key, limit=limit, claims=claims, progress=progress)
        )
    return _answer(question, simulation, notes) | {
        "capacity": [_capacity_plain(each) for each in capacities]
    }


def place_all(
    question: Question, *, against: SchedulerConfiguration | None, progress: Progress
) -> dict[str, Any]:
    """Return where all pods of the profiles' schedulers would be, placed again from scratch.

    against: another configuration, whose placements are compared. Raises InputError.
    """
    check(question)
    simulation, notes, results = _placed_again(question, progress)
    answer = _answer(question, simulation, notes) | {
        "pods": [_plain(each) for each in results],
        "nodesUsed": len({each.node for each in results if each.node}),
        "nodesUsedNow": len({each.was for each in results if each.was}),
    }
    if against is None:
        return answer
    other = Question(
        question.cluster, against, question.now, question.seed, question.scheduler_name
    )
    check(other)
    progress("placing all pods under the other configuration")
    _, other_notes, others = _placed_again(other, progress)
    by_pod = {each.pod: each for each in others}
    answer["nodesUsedAgainst"] = len({each.node for each in others if each.node})
    answer["notes"] = list(dict.fromkeys((*answer["notes"], *other_notes)))
    answer["differences"] = [
        {
            "pod": each.pod,
            "node": each.node,
            "state": each.state,
            "againstNode": by_pod[each.pod].node,
            "againstState": by_pod[each.pod].state,
        }
        for each in results
        if each.pod in by_pod
        and (each.node, each.state) != (by_pod[each.pod].node, by_pod[each.pod].state)
    ]
    return answer


def _placed_again(
    question: Question, progress: Progress
) -> tuple[Simulation, tuple[str, ...], list[PodResult]]:
    cluster = emptied(question.cluster, question.profiles, scheduler_name=question.scheduler_name)
    if not cluster.moved:
        raise InputError(
            obj="the cluster",
            field="spec.schedulerName",
            value=" ".join(question.profiles),
            problem="no pod names a scheduler of the configuration",
            hint="--as NAME treats all pods as those of profile NAME",
        )
    simulation = Simulation(question.configuration, seed=question.seed, now=question.now)
    notes = simulation.load(cluster.objects)
    simulation.run(progress=progress)
    pods = simulation.core.pods.items
    results = [
        simulation.result(key, was=node)
        for key, node in cluster.moved.items()
        if key in pods or key in simulation.evicted
    ]
    return simulation, notes, results


def _prepared(
    question: Question, objects: Iterable[FileObject]
) -> tuple[Simulation, PodFile, tuple[str, ...]]:
    """Return a simulation of the cluster in which the pods of the file wait."""
    classes = [each for each in question.cluster if each.kind == PRIORITY_CLASSES.kind]
    defaults = Defaults(
        scheduler_names=question.profiles,
        priorities=priorities_of(classes),
        created=format_time(datetime.fromtimestamp(question.now, UTC)),
        scheduler_name=question.scheduler_name,
        storage_class=default_class(question.cluster),
    )
    file = pods_of(objects, defaults)
    if not file.pods:
        raise InputError(
            obj="the file of pods", field="", value="", problem="has no Pod and no workload"
        )
    added, kept = kept_of_cluster(file.others, question.cluster)
    others = (*added, *_made_claims(question, file))
    given = {(each.group, each.kind, each.key) for each in (*file.pods, *others)}
    rest = [each for each in question.cluster if (each.group, each.kind, each.key) not in given]
    simulation = Simulation(question.configuration, seed=question.seed, now=question.now)
    notes = simulation.load((*rest, *others, *file.pods))
    missing = [each for each in file.pods if each.key in simulation.core.pods.undecodable]
    if missing:
        raise InputError(
            obj=missing[0].ref,
            field="",
            value="",
            problem=simulation.core.pods.undecodable[missing[0].key],
        )
    stay = [f"{each.ref} counts as the cluster has it" for each in kept]
    return simulation, file, (*file.notes, *stay, *notes)


def _made_claims(question: Question, file: PodFile) -> list[FileObject]:
    """Return the claims that Kubernetes would make for the pods of a file.

    A replica of a StatefulSet uses the claim of its name that exists already, with its volume.
    The claims of ephemeral volumes are made again, as they end with their pod.
    """
    kind = PERSISTENT_VOLUME_CLAIMS.kind
    known = {each.key for each in (*question.cluster, *file.others) if each.kind == kind}
    made = [claim for claims in file.ephemeral.values() for claim in claims]
    for claims in file.from_templates.values():
        made += (claim for claim in claims if claim.key not in known)
    return made


def _without_name(pod: FileObject, claims: Container[str]) -> bytes:
    """Return the content of a pod that its replicas share. claims: names of its claims that are
    made from templates."""
    tree = msgspec.json.decode(pod.raw)
    for member in ("name", "uid"):
        tree["metadata"].pop(member, None)
    for volume in tree["spec"].get("volumes") or ():
        source = volume.get("persistentVolumeClaim")
        if source and source.get("claimName") in claims:
            del source["claimName"]
    return msgspec.json.encode(tree, order="deterministic")


def _nodes_of(cluster: Iterable[FileObject], keys: set[str]) -> dict[str, str]:
    """Return the nodes that pods with these keys have in the cluster."""
    result: dict[str, str] = {}
    for each in cluster:
        if each.kind == "Pod" and not each.group and each.key in keys:
            spec = tree_of(each).get("spec")
            node = spec.get("nodeName") if isinstance(spec, dict) else None
            result[each.key] = node if isinstance(node, str) else ""
    return result


def _answer(question: Question, simulation: Simulation, notes: Sequence[str]) -> dict[str, Any]:
    tables = simulation.core.tables
    return {
        "at": format_time(datetime.fromtimestamp(question.now, UTC)),
        "seed": question.seed,
        "nodes": tables.nodes.count,
        "notes": list(dict.fromkeys(notes)),
    }


def _plain(result: PodResult) -> dict[str, Any]:
    plain: dict[str, Any] = {"pod": result.pod, "state": result.state, "node": result.node}
    if result.was:
        plain["was"] = result.was
    if result.explained is not None:
        plain |= result.explained.plain()
    if result.message:
        plain["message"] = result.message
    return plain


def _capacity_plain(capacity: Capacity) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "pod": capacity.pod,
        "count": capacity.count,
        "more": capacity.more,
        "nodes": dict(capacity.nodes),
    }
    if capacity.explained is not None:
        plain |= capacity.explained.plain()
    return plain
