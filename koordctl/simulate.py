"""`koordctl simulate`: koord-scheduler's decisions over a dump, or a cluster that is only read.

This module reads what the command line names and prints the answer;
`cluster.scheduler.simulation` has the questions.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.gates import read_gates
from cluster.scheduler.configuration.reading import (
    LARGEST_FILE,
    default_configuration,
    read_configuration,
)
from cluster.scheduler.simulation.answers import Question, count_capacity, place_all, place_pods
from cluster.scheduler.simulation.objects import FileObject, is_kubeconfig, read_objects
from cluster.scheduler.simulation.reading import read_cluster
from cluster.scheduler.simulation.simulation import collections_read, moment_of
from koordctl.errors import CommandError
from koordctl.tables import heading, table
from koordctl.why import score_lines
from service.manifest import NotYaml, documents

_KIND: Final = "KubeSchedulerConfiguration"
_MOST_VALUES: Final = 50_000
"""Values of a configuration, as its reader allows."""
_SHOWN: Final = 50
"""Rows of a table; `-o json` has all. Chosen: a screen."""
_QUIET_S: Final = 1.0
"""Without progress before this: a short run shows its answer alone."""


def answer(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the options ask for. Raises InputError(s) or CommandError."""
    # What is left out is in the answer's notes.
    with _quiet("kube", "cluster"):
        return _answer(options)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Have these loggers pass errors alone, until the block ends."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _answer(options: argparse.Namespace) -> dict[str, Any]:
    if options.capacity and not options.pods:
        raise CommandError("--capacity counts the pods of a file: add --pods FILE")
    if options.against and options.pods:
        raise CommandError("--against compares all pods of the cluster: leave --pods out")
    progress = _progress()
    gates = read_gates(options.feature_gates, obj="command line", field="--feature-gates").on
    configuration = _configuration(options.config, gates)
    against = _configuration(options.against, gates) if options.against else None
    configurations = [each for each in (configuration, against) if each is not None]
    cluster, notes, now = _cluster(options, configurations, progress)
    question = Question(
        cluster=tuple(cluster),
        configuration=configuration,
        now=now,
        seed=options.seed,
        scheduler_name=options.scheduler_name,
    )
    if options.capacity:
        pods = read_objects(options.pods)
        found = count_capacity(question, pods, limit=options.limit, progress=progress)
    elif options.pods:
        found = place_pods(question, read_objects(options.pods), progress=progress)
    else:
        found = place_all(question, against=against, progress=progress)
    found["notes"] = [*notes, *found["notes"]]
    if not options.scores:
        for each in found.get("pods", ()):
            each.pop("scores", None)
    return found


def _configuration(path: str | None, gates: Mapping[str, bool]) -> SchedulerConfiguration:
    """Return the configuration of a file, which may be the ConfigMap that holds it."""
    if not path:
        return msgspec.structs.replace(default_configuration(), gates=gates)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(LARGEST_FILE + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {path}: {error}") from None
    obj = path
    try:
        found = documents(text, most_values=_MOST_VALUES)
    except NotYaml:
        # The reader of configurations says what is wrong, and where.
        found = []
    if len(found) == 1 and isinstance(found[0], dict) and found[0].get("kind") == "ConfigMap":
        data = found[0].get("data")
        texts = data if isinstance(data, dict) else {}
        names = [name for name, value in texts.items() if _KIND in str(value)]
        if len(names) != 1:
            raise CommandError(f"{path}: the ConfigMap holds {len(names)} texts with a {_KIND}")
        text, obj = str(texts[names[0]]), f"{path}: data.{names[0]}"
    return msgspec.structs.replace(read_configuration(text, obj=obj), gates=gates)


def _cluster(
    options: argparse.Namespace,
    configurations: Sequence[SchedulerConfiguration],
    progress: Callable[[str], None],
) -> tuple[list[FileObject], tuple[str, ...], float]:
    """Return the objects, what is missing of them, and the moment that is simulated.

    configurations: a cluster is asked for all that one of them reads.
    """
    path = options.cluster
    if path != "kubeconfig" and not os.path.exists(path):
        raise CommandError(
            f"{path} does not exist; --cluster takes a folder of `kubectl get -o json` output,"
            " the path of a kubeconfig, or the word kubeconfig for the usual one"
        )
    if path != "kubeconfig" and not is_kubeconfig(path):
        objects = read_objects(path, progress=progress)
        return objects, (), moment_of(objects)
    # The API server's client takes long to import.
    from kube.client import ApiError, Client, Unreachable
    from kube.connection import ConnectionConfigError, load_connection

    async def read() -> tuple[list[FileObject], tuple[str, ...]]:
        file = os.environ.get("KUBECONFIG") or None if path == "kubeconfig" else path
        connection = load_connection(file, context=options.context)
        async with Client(connection, user_agent="koordctl") as client:
            return await read_cluster(client, collections_read(configurations), progress=progress)

    try:
        objects, notes = asyncio.run(read())
    except (ApiError, Unreachable, ConnectionConfigError) as error:
        raise CommandError(str(error)) from None
    return objects, notes, time.time()


def _progress() -> Callable[[str], None]:
    """Return a function that shows what a long run is doing, where people watch."""
    began = time.monotonic()

    def show(text: str) -> None:
        if sys.stderr.isatty() and time.monotonic() - began > _QUIET_S:
            print(f"... {text}", file=sys.stderr)

    return show


# --- text ----------------------------------------------------------------------------------------


def text(found: Mapping[str, Any]) -> str:
    """Return the answer for people."""
    lines = [f"{found['nodes']} nodes, as of {found['at']}, seed {found['seed']}"]
    if "capacity" in found:
        for each in found["capacity"]:
            lines += ["", *_capacity_lines(each)]
    elif "nodesUsedNow" in found:
        lines += ["", *_cluster_lines(found)]
    else:
        lines += ["", *_pod_lines(found["pods"])]
        if found["evicted"]:
            rows = ((each["pod"], each["was"]) for each in found["evicted"])
            lines += ["", "pods that would be evicted for them", *_rows(("POD", "NOW ON"), rows)]
    if found["notes"]:
        lines += ["", heading("notes"), *(f"  {note}" for note in found["notes"])]
    return "\n".join(lines)


def _pod_lines(pods: list[Mapping[str, Any]]) -> list[str]:
    placed = [each for each in pods if each["state"] == "placed"]
    lines = [f"{len(placed)} of {len(pods)} pods get a node"]
    if placed:
        if any("was" in each for each in placed):
            rows: Iterable[tuple[str, ...]] = (
                (each["pod"], each["node"], each.get("was", "")) for each in placed
            )
            lines += ["", *_rows(("POD", "NODE", "NOW ON"), rows)]
        else:
            lines += ["", *_rows(("POD", "NODE"), ((p["pod"], p["node"]) for p in placed))]
    lines += _refused_lines(pods)
    for each in placed:
        if "scores" in each:
            lines += ["", heading(each["pod"]), *score_lines(each["scores"])]
    return lines


def _refused_lines(pods: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the pods without a node, those with one reason together."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in pods:
        if each["state"] != "placed":
            key = each["state"], each.get("message", "")
            reasons.setdefault(key, []).append(each["pod"])
    if not reasons:
        return []
    rows = ((len(names), names[0], state, message) for (state, message), names in reasons.items())
    return ["", *_rows(("PODS", "SUCH AS", "STATE", "WHY"), rows)]


def _cluster_lines(found: Mapping[str, Any]) -> list[str]:
    pods = found["pods"]
    placed = [each for each in pods if each["state"] == "placed"]
    same = sum(each["node"] == each.get("was") for each in placed)
    lines = [
        f"placed again from scratch: {len(placed)} of {len(pods)} pods get a node, {same} of them"
        f" the one that they have",
        f"nodes with such pods: {found['nodesUsed']}, now {found['nodesUsedNow']}",
    ]
    lines += _refused_lines(pods)
    lost = [each for each in pods if each["state"] != "placed" and each.get("was")]
    if lost:
        lines += ["", f"{len(lost)} of the pods without a node have one now"]
    if "differences" in found:
        differences = found["differences"]
        lines += [
            "",
            f"{len(differences)} pods differ from the other configuration, which uses"
            f" {found['nodesUsedAgainst']} nodes",
        ]
        rows = (
            (
                each["pod"],
                each["node"] or each["state"],
                each["againstNode"] or each["againstState"],
            )
            for each in differences
        )
        if differences:
            lines += ["", *_rows(("POD", "HERE", "THERE"), rows)]
    return lines


def _capacity_lines(each: Mapping[str, Any]) -> list[str]:
    count = f"at least {each['count']}" if each["more"] else f"{each['count']}"
    lines = [heading(f"{each['pod']}: {count} more fit")]
    by_count = Counter(each["nodes"].values())
    if each["nodes"]:
        rows = (
            (number, nodes, _example(each["nodes"], number))
            for number, nodes in sorted(by_count.items(), reverse=True)
        )
        lines += _rows(("EACH", "NODES", "SUCH AS"), rows)
    if each["more"]:
        lines.append("the count ended at --limit")
    else:
        lines.append(f"the next one: {each.get('message', '')}")
    return lines


def _example(nodes: Mapping[str, int], number: int) -> str:
    return next(node for node, count in nodes.items() if count == number)


def _rows(header: tuple[str, ...], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    every = list(rows)
    lines = [table(header, every[:_SHOWN])]
    if len(every) > _SHOWN:
        lines.append(f"... and {len(every) - _SHOWN} more (-o json shows all)")
    return lines
