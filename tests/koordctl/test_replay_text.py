"""What `koordctl replay` prints of changes and differences, and what it counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from koordctl import replay
from koordctl.errors import CommandError
from koordctl.main import main
from koordctl.replay import nodeslo_of, run, text
from koordlet.qos.recording.replay import Reading, Replayed

pytestmark = pytest.mark.usefixtures("terminal")

_AT = 1_000_000_000.0


def _row(claims: int = 1, summary: str = "load", evictions: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "at": _AT,
        "strategy": "CPUBurst",
        "summary": summary,
        "claims": [f"claim {number}" for number in range(claims)],
        "evictions": list(evictions),
    }


_WHOLE: dict[str, Any] = {"rounds": 40, "damagedFrames": 0, "unusableFiles": []}


def test_changes_are_shown_with_up_to_three_claims_each() -> None:
    rows = [_row(0), _row(3), _row(5, evictions=("MemoryEvict for memory",))]
    wants = "MemoryEvict for memory, claim 0, claim 1, claim 2, and 2 more"
    assert text({**_WHOLE, "changes": rows}).splitlines() == [
        f"AT        STRATEGY  {'WANTS':{len(wants)}}  BECAUSE",
        f"01:46:40  CPUBurst  {'nothing':{len(wants)}}  load",
        f"01:46:40  CPUBurst  {'claim 0, claim 1, claim 2':{len(wants)}}  load",
        f"01:46:40  CPUBurst  {wants}  load",
        "3 changes in 40 rounds",
    ]


def test_differences_are_shown_side_by_side() -> None:
    difference = {
        "at": _AT,
        "strategy": "CPUBurst",
        "recorded": _row(1, "then"),
        "other": _row(0, "now"),
    }
    answer = {
        "differences": [difference],
        "decisionsThatDiffer": 3,
        "decisionsThatAgree": 77,
        "rounds": 40,
        "damagedFrames": 2,
        "unusableFiles": ["a: empty", "b: torn"],
    }
    assert text(answer).splitlines() == [
        "AT        STRATEGY  WANTS                              THE OTHER BECAUSE",
        "01:46:40  CPUBurst  recorded: claim 0; other: nothing  now",
        "3 decisions of 40 rounds differ, 77 agree",
        "2 damaged parts of the recording were left out",
        "left out: a: empty",
        "left out: b: torn",
    ]
    none = {**answer, **_WHOLE, "differences": [], "decisionsThatDiffer": 0}
    assert text(none) == "0 decisions of 40 rounds differ, 77 agree"


def _replays(monkeypatch: pytest.MonkeyPatch, *, rounds: int = 3, unusable: str = "") -> None:
    """Replay rounds of one strategy: another NodeSLO differs in each but the first."""

    def replayed(paths: list[str], _: Any, *, slo: Any = None, reading: Any = None) -> Any:
        reading = reading or Reading()
        if unusable:
            reading.unusable.append(unusable)
        for number in range(rounds):
            reading.rounds += 1
            claim = "three" if slo is not None and number else "one"
            yield (
                Replayed(
                    wall=_AT + number,
                    strategy="CPUBurst",
                    summary=f"of {number}",
                    claims=(claim,),
                    evictions=(),
                ),
            )

    monkeypatch.setattr(replay, "replay", replayed)
    monkeypatch.setattr(replay, "paths_of", lambda path: [path])


def test_decisions_that_differ_and_agree_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    _replays(monkeypatch)
    slo: Any = object()
    answer = run("r", slo)
    assert (answer["decisionsThatDiffer"], answer["decisionsThatAgree"]) == (2, 1)
    first = answer["differences"][0]
    assert (first["at"], first["other"]["claims"]) == (_AT + 1, ["three"])
    assert first["recorded"] == {
        "at": _AT + 1,
        "strategy": "CPUBurst",
        "summary": "of 1",
        "claims": ["one"],
        "evictions": [],
    }
    assert (answer["rounds"], answer["damagedFrames"], answer["unusableFiles"]) == (3, 0, [])


def test_the_changes_of_a_recording_are_plain_data(monkeypatch: pytest.MonkeyPatch) -> None:
    _replays(monkeypatch, rounds=1, unusable="b: torn")
    assert run("r", None) == {
        "changes": [
            {
                "at": _AT,
                "strategy": "CPUBurst",
                "summary": "of 0",
                "claims": ["one"],
                "evictions": [],
            }
        ],
        "rounds": 1,
        "damagedFrames": 0,
        "unusableFiles": ["b: torn"],
    }


@pytest.mark.parametrize(
    ("unusable", "why"), [("", "it holds no whole round"), ("a: empty", "a: empty")]
)
def test_a_recording_without_a_round_is_refused_with_the_reason(
    unusable: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replays(monkeypatch, rounds=0, unusable=unusable)
    with pytest.raises(CommandError) as refused:
        run("r", None)
    assert str(refused.value) == f"cannot replay r: {why}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"kind: Pod", "{path} is not a NodeSLO: its `kind` says otherwise"),
        (b"[1]", "{path} is not a NodeSLO: its `kind` says otherwise"),
        (b"spec: {}", "{path} is not a NodeSLO: its `kind` says otherwise"),
        (b"\xff", "{path} is not a manifest: "),
        (None, "cannot read {path}: No such file or directory"),
    ],
)
def test_a_nodeslo_that_is_none_is_named(
    content: bytes | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "slo.yaml"
    if content is not None:
        path.write_bytes(content)
    assert main(["replay", "r", "--nodeslo", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"koordctl: {said.format(path=path)}")


def test_a_nodeslo_is_read_with_its_spec(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(
        "kind: NodeSLO\nmetadata: {name: n1}\n"
        "spec: {resourceUsedThresholdWithBE: {enable: true, cpuSuppressThresholdPercent: 41}}"
    )
    used = nodeslo_of(str(path)).resource_used_threshold_with_be
    assert (used.enable, used.cpu_suppress_threshold_percent) == (True, 41)
