"""`koordctl replay`: decisions again from a recording, and those under another NodeSLO."""

from __future__ import annotations

import time
from typing import Any

from apis.effective_nodeslo import decode_nodeslo
from apis.nodeslo import NodeSLOSpec
from koordctl.errors import CommandError
from koordctl.tables import table
from koordlet.qos.recording.replay import (
    Compared,
    Reading,
    Replayed,
    changes,
    compared,
    paths_of,
    replay,
)
from koordlet.qos.strategies.registry import STRATEGIES
from service import manifest

_MOST_BYTES = 1 << 20
"""Read of a NodeSLO's manifest. Chosen: etcd takes objects of 1.5 MiB, and a NodeSLO has some KB.
Twice the value: a wrong file is read for twice as long before it is refused."""
_MOST_VALUES = 100_000
"""Of the manifest's members and items. Chosen: more than fit in `_MOST_BYTES` of a real one; it
bounds the memory of a file with nothing but aliases or brackets."""
_MOST_CLAIMS = 3
"""Claims that one line of a table shows; `-o json` has all. Chosen: the line fits a terminal."""


def nodeslo_of(path: str) -> NodeSLOSpec:
    """Read a NodeSLO manifest. Raises CommandError, InputError and InputErrors."""
    try:
        with open(path, encoding="utf-8") as file:
            tree = manifest.document(file.read(_MOST_BYTES), most_values=_MOST_VALUES)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, manifest.NotYaml) as error:
        raise CommandError(f"{path} is not a manifest: {error}") from None
    if not isinstance(tree, dict) or tree.get("kind") != "NodeSLO":
        raise CommandError(f"{path} is not a NodeSLO: its `kind` says otherwise")
    return decode_nodeslo(tree, obj=f"NodeSLO in {path}")


def run(path: str, slo: NodeSLOSpec | None) -> dict[str, Any]:
    """Replay a recording; return what `-o json` prints. Raises CommandError."""
    try:
        paths = paths_of(path)
        reading = Reading()
        recorded = replay(paths, STRATEGIES, reading=reading)
        if slo is None:
            rows = [_decision(each) for each in changes(recorded)]
            answer: dict[str, Any] = {"changes": rows}
        else:
            same = [0, 0]

            def count(equal: bool) -> None:
                same[equal] += 1

            other = replay(paths, STRATEGIES, slo=slo)
            found = compared(recorded, other, counted=count)
            answer = {
                "differences": [_difference(each) for each in found],
                "decisionsThatDiffer": same[False],
                "decisionsThatAgree": same[True],
            }
    except OSError as error:
        raise CommandError(f"cannot replay {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise CommandError(f"cannot replay {path}: {error}") from None
    if not reading.rounds:
        why = "; ".join(reading.unusable) or "it holds no whole round"
        raise CommandError(f"cannot replay {path}: {why}")
    return answer | {
        "rounds": reading.rounds,
        "damagedFrames": reading.damaged,
        "unusableFiles": reading.unusable,
    }


def _decision(each: Replayed) -> dict[str, Any]:
    return {
        "at": each.wall,
        "strategy": each.strategy,
        "summary": each.summary,
        "claims": list(each.claims),
        "evictions": list(each.evictions),
    }


def _difference(each: Compared) -> dict[str, Any]:
    return {
        "at": each.wall,
        "strategy": each.strategy,
        "recorded": _decision(each.one),
        "other": _decision(each.other),
    }


def text(answer: dict[str, Any]) -> str:
    """Return the answer of `run` for people."""
    if "changes" in answer:
        rows = [
            (_at(row["at"]), row["strategy"], _wants(row), row["summary"])
            for row in answer["changes"]
        ]
        shown = table(("AT", "STRATEGY", "WANTS", "BECAUSE"), rows)
        what = f"{len(rows)} changes in {answer['rounds']} rounds"
    else:
        rows = [
            (
                _at(row["at"]),
                row["strategy"],
                f"recorded: {_wants(row['recorded'])}; other: {_wants(row['other'])}",
                row["other"]["summary"],
            )
            for row in answer["differences"]
        ]
        shown = table(("AT", "STRATEGY", "WANTS", "THE OTHER BECAUSE"), rows)
        what = (
            f"{answer['decisionsThatDiffer']} decisions of {answer['rounds']} rounds differ,"
            f" {answer['decisionsThatAgree']} agree"
        )
    lines = [shown, what] if shown else [what]
    if answer["damagedFrames"]:
        lines.append(f"{answer['damagedFrames']} damaged parts of the recording were left out")
    lines += [f"left out: {each}" for each in answer["unusableFiles"]]
    return "\n".join(lines)


def _at(wall: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(wall))


def _wants(row: dict[str, Any]) -> str:
    claims = row["claims"]
    shown = [*row["evictions"], *claims[:_MOST_CLAIMS]]
    if len(claims) > _MOST_CLAIMS:
        shown.append(f"and {len(claims) - _MOST_CLAIMS} more")
    return ", ".join(shown) or "nothing"
