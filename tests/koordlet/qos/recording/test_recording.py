"""A recording gives the same decisions again, and those of another NodeSLO beside them."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from apis.effective_nodeslo import decode_nodeslo
from hooks.claim import Claim
from hooks.facts import NodeInputs, NodeMeta, Settings
from hooks.standing import Standing
from hooks.subject import ContainerSubject
from koordctl import main as koordctl
from koordlet.measurement.series import Metric, Series
from koordlet.measurement.store import Store
from koordlet.qos import strategies
from koordlet.qos.board import Board
from koordlet.qos.recording import frames, recorder
from koordlet.qos.recording.recorder import Recorder, files, name
from koordlet.qos.recording.replay import (
    Reading,
    Replayed,
    changes,
    claim_lines,
    compared,
    names_of,
    paths_of,
    replay,
)
from koordlet.qos.runner import Runner
from koordlet.qos.strategies.registry import STRATEGIES
from koordlet.qos.strategy import PodOnNode, Situation, Strategy, Verdict
from linux.resources import Resource
from service.events import Events
from tests.hooks.making import a_pod, be_pod
from tests.koordlet.qos.situations import a_situation

_SLO: dict[str, Any] = {
    "resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressThresholdPercent": 65},
}
_WEB = a_pod("LS", name="web")
_BATCH = be_pod(name="batch", labels={"team": "secret", "koordinator.sh/x": "kept"})


def _inputs(spec: dict[str, Any]) -> NodeInputs:
    return NodeInputs(
        slo=decode_nodeslo({"spec": spec}, obj="NodeSLO n1"),
        node=NodeMeta(
            labels={"rack": "secret", "node.koordinator.sh/y": "kept"},
            annotations={"cni/key": "secret", "node.koordinator.sh/z": "kept"},
        ),
        settings=Settings(feature_gates={"BECPUSuppress": True, "CPUBurst": True}),
    )


class _Daemon:
    """Strategies that are stepped and recorded, as the sampling thread does it.

    after: the daemon before a restart, and the moment of the start.
    """

    def __init__(
        self,
        directory: Path,
        *,
        most_bytes: int = 8 << 20,
        after: tuple[_Daemon, float] | None = None,
    ) -> None:
        self.recorder = Recorder(str(directory), most_bytes=most_bytes)
        self._store = Store()
        self._store.add_table("all", interval_s=1.0, retention_s=1800.0)
        self._board = Board([each.name for each in STRATEGIES], lambda standing: None)
        self._runner = Runner(STRATEGIES, self._board, Events(), intervals={})
        if after is not None:
            before, now = after
            self._runner.resume(before._runner.kept_states)
            self._board.resume(
                {
                    name: msgspec.structs.replace(lease, until=now + 10, resumed=True)
                    for name, lease in before._board.leases.items()
                }
            )
        self._inputs = _inputs(_SLO)
        self._pods = (PodOnNode(_WEB), PodOnNode(_BATCH))
        self.wanted: list[dict[str, tuple[str, ...]]] = []

    def round(self, now: float, ls_cores: float) -> None:
        be_cores = max(10.0 - ls_cores, 0.5)
        samples = {
            Series(Metric.NODE_CPU): ls_cores + be_cores + 0.5,
            Series(Metric.SYSTEM_CPU): 0.5,
            Series(Metric.POD_CPU, _WEB.uid): ls_cores,
            Series(Metric.POD_CPU, _BATCH.uid): be_cores,
        }
        self._store.record("all", now, samples)
        self._board.expire(now)
        situation = msgspec.structs.replace(
            a_situation({}, inputs=self._inputs, now=now),
            wall=now + 1e9,
            pods=self._pods,
            measurements=self._store.view(now),
        )
        self.recorder.round(situation)
        self._runner.run(situation, lambda: self._inputs.settings)
        names = names_of(self._pods)
        self.wanted.append(
            {
                each.name: claim_lines(lease.standing, names) if lease is not None else ()
                for each in STRATEGIES
                for lease in [self._board.lease(each.name)]
            }
        )

    def live(self, rounds: int, *, begin: float = 100.0) -> None:
        for step in range(rounds):
            self.round(begin + step, 5.0 + 4.0 * math.sin(step / 10))


def _suppress(rounds: Sequence[tuple[Replayed, ...]]) -> list[tuple[str, ...]]:
    return [
        each.claims for decided in rounds for each in decided if each.strategy == "BECPUSuppress"
    ]


def test_a_replay_wants_in_every_round_what_the_daemon_wanted(tmp_path: Path) -> None:
    daemon = _Daemon(tmp_path)
    daemon.live(120)
    assert len(set(map(str, daemon.wanted))) > 3  # the load moves the claims
    reading = Reading()
    rounds = list(replay(paths_of(str(tmp_path)), STRATEGIES, reading=reading))
    assert (reading.rounds, reading.damaged, reading.unusable) == (120, 0, [])
    assert _suppress(rounds) == [each["BECPUSuppress"] for each in daemon.wanted]


def test_a_recording_has_what_the_strategies_read_and_nothing_else() -> None:
    sources = Path(strategies.__file__).parent.glob("*.py")
    read = {name for path in sources for name in re.findall(r"Metric\.(\w+)", path.read_text())}
    assert read == {metric.name for metric in recorder.METRICS}


def test_another_nodeslo_leads_to_other_decisions_beside_the_recorded_ones(tmp_path: Path) -> None:
    daemon = _Daemon(tmp_path)
    daemon.live(60)
    paths = paths_of(str(tmp_path))
    wider = json.loads(json.dumps(_SLO))
    wider["resourceUsedThresholdWithBE"]["cpuSuppressThresholdPercent"] = 90
    counts = [0, 0]

    def count(same: bool) -> None:
        counts[same] += 1

    found = list(
        compared(
            replay(paths, STRATEGIES),
            replay(paths, STRATEGIES, slo=_inputs(wider).slo),
            counted=count,
        )
    )
    assert found and counts[False] > 30
    assert {each.strategy for each in found} == {"BECPUSuppress"}
    assert all(each.one.claims != each.other.claims for each in found)
    same = list(
        compared(replay(paths, STRATEGIES), replay(paths, STRATEGIES, slo=_inputs(_SLO).slo))
    )
    assert same == []


def test_changes_are_shown_once(tmp_path: Path) -> None:
    daemon = _Daemon(tmp_path)
    for step in range(30):
        daemon.round(100.0 + step, 5.0)
    found = list(changes(replay(paths_of(str(tmp_path)), STRATEGIES)))
    assert 1 <= len(found) <= 6  # growing to its place, and then nothing
    assert found[0].strategy == "BECPUSuppress"


def test_private_labels_and_annotations_are_not_in_the_file(tmp_path: Path) -> None:
    _Daemon(tmp_path).live(3)
    [path] = paths_of(str(tmp_path))
    with open(path, "rb") as file:
        recorded = [each for each in frames.unpack(file) if isinstance(each, frames.Pods)]
    with open(path, "rb") as file:
        inputs = [each.inputs for each in frames.unpack(file) if isinstance(each, frames.Inputs)]
    assert [(dict(each.node.labels), dict(each.node.annotations)) for each in inputs] == [
        ({"node.koordinator.sh/y": "kept"}, {"node.koordinator.sh/z": "kept"})
    ]
    labels = [dict(pod.pod.labels) for pod in recorded[0].pods]
    assert not any("team" in each for each in labels)
    assert any(each.get("koordinator.sh/x") == "kept" for each in labels)
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_the_ring_is_bounded_and_each_of_its_files_stands_alone(tmp_path: Path) -> None:
    daemon = _Daemon(tmp_path, most_bytes=1)  # the smallest ring
    for step in range(9000):
        daemon.recorder.round(
            msgspec.structs.replace(
                a_situation({}, inputs=_inputs(_SLO), now=float(step)),
                measurements=_one_value(float(step)),
            )
        )
    numbers = files(str(tmp_path))
    assert len(numbers) <= 8 and max(numbers) > 8
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 9 * (1 << 16) + (1 << 16)
    reading = Reading()
    newest = str(tmp_path / name(max(numbers)))
    assert list(replay([newest], STRATEGIES, reading=reading))
    assert reading.damaged == 0


def _one_value(value: float) -> Any:
    store = Store()
    store.add_table("all", interval_s=1.0, retention_s=10.0)
    store.record("all", value, {Series(Metric.NODE_CPU): value})
    return store.view(value)


def test_a_damaged_frame_and_a_cut_end_cost_themselves_only(tmp_path: Path) -> None:
    daemon = _Daemon(tmp_path)
    daemon.live(50)
    [path] = map(Path, paths_of(str(tmp_path)))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data[:-3])
    reading = Reading()
    rounds = list(replay([str(path)], STRATEGIES, reading=reading))
    assert reading.damaged == 1
    assert len(rounds) == 48  # without the damaged and the last one


@pytest.mark.parametrize("content", [b"", b"koordlet recording 9\n", b"\x00" * 100])
def test_a_file_that_is_no_recording_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / name(1)
    path.write_bytes(content)
    reading = Reading()
    assert list(replay([str(path)], STRATEGIES, reading=reading)) == []
    assert str(path) in reading.unusable[0]


def test_rounds_without_what_they_are_about_count_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / name(1)
    lonely = frames.pack(frames.Round(1.0, 1.0, b""))
    path.write_bytes(frames.HEADER + lonely)
    reading = Reading()
    assert list(replay([str(path)], STRATEGIES, reading=reading)) == []
    assert reading.damaged == 1


def test_a_full_disk_costs_rounds_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = _Daemon(tmp_path)
    daemon.live(5)
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    daemon.live(3, begin=200.0)
    assert "No space left" in daemon.recorder.problem
    monkeypatch.setattr(os, "write", write)
    daemon.live(4, begin=300.0)
    assert daemon.recorder.problem == ""
    reading = Reading()
    list(replay(paths_of(str(tmp_path)), STRATEGIES, reading=reading))
    assert reading.rounds == 9


def test_a_reboot_in_a_recording_begins_from_nothing(tmp_path: Path) -> None:
    daemon = _Daemon(tmp_path)
    daemon.live(10, begin=5000.0)
    later = _Daemon(tmp_path)
    later.live(10, begin=50.0)
    rounds = list(replay(paths_of(str(tmp_path)), STRATEGIES))
    assert _suppress(rounds)[10:] == [each["BECPUSuppress"] for each in later.wanted]


def test_strategies_go_on_over_files_and_restarts_as_the_daemons_do(tmp_path: Path) -> None:
    daemon = _Daemon(tmp_path)
    daemon.live(20)
    daemon.recorder.close()  # the next round begins another file
    daemon.live(20, begin=120.0)
    later = _Daemon(tmp_path, after=(daemon, 139.5))
    for step in range(5):
        later.round(140.0 + step, 1.0)
    assert len({each["BECPUSuppress"] for each in later.wanted}) > 1  # it grows in steps
    rounds = list(replay(paths_of(str(tmp_path)), STRATEGIES))
    wanted = [each["BECPUSuppress"] for each in (*daemon.wanted, *later.wanted)]
    assert _suppress(rounds) == wanted


class _Counted(msgspec.Struct, frozen=True):
    rounds: int = 0


def _count(state: _Counted, situation: Situation) -> tuple[_Counted, Verdict]:
    """A strategy whose state outlasts a restart, and that cannot judge in its fifth round."""
    return _Counted(state.rounds + 1), Verdict(
        standing=Standing({"pod/u1": (claim_on_shares(100 + state.rounds),)}),
        summary=f"round {state.rounds}",
        unmeasured=state.rounds == 4,
    )


def claim_on_shares(value: int) -> Claim:
    return Claim(
        resource=Resource.CPU_SHARES, value=value, policy="counted", reason="r", source="s"
    )


def test_a_state_that_outlasts_a_restart_does_so_in_a_replay(tmp_path: Path) -> None:
    counted = Strategy(
        name="counted",
        gates={"BECPUSuppress": True},
        interval_s=1.0,
        ttl_s=10.0,
        initial=_Counted,
        step=_count,
        kept=_Counted,
    )
    daemon = _Daemon(tmp_path)
    daemon.live(4)
    _Daemon(tmp_path).live(3, begin=110.0)
    _Daemon(tmp_path).live(2, begin=10.0)  # the machine was restarted
    found = [each.claims[0][-3:] for (each,) in replay(paths_of(str(tmp_path)), (counted,))]
    # The claim of before stays while nothing can be judged, and with it the state.
    assert found == ["100", "101", "102", "103", "103", "103", "103", "100", "101"]


def test_claims_name_pods_and_containers_as_people_do() -> None:
    claim = claim_on_shares(100)
    pod = _WEB
    one = PodOnNode(pod, containers=(ContainerSubject(pod, "main", "c1c1"),))
    keys = (f"pod/{pod.uid}", "container/c1c1", "kubeqos/BestEffort", "container/gone")
    standing = Standing(dict.fromkeys(keys, (claim,)))
    name = f"{pod.namespace}/{pod.name}"
    assert claim_lines(standing, names_of([one])) == (
        f"container {name}/main cpu.shares set 100",
        "container/gone cpu.shares set 100",
        "kubeqos/BestEffort cpu.shares set 100",
        f"pod {name} cpu.shares set 100",
    )


# --- koordctl ----------------------------------------------------------------------------------


def _koordctl(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = koordctl.main(["replay", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_koordctl_shows_changes_and_comparisons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "recording"
    _Daemon(recording).live(40)
    status, out, _ = _koordctl(str(recording), capsys=capsys)
    assert status == 0
    assert "BECPUSuppress" in out and "changes in 40 rounds" in out
    other = tmp_path / "nodeslo.yaml"
    spec = {"resourceUsedThresholdWithBE": {"enable": True, "cpuSuppressThresholdPercent": 95}}
    other.write_text(yaml.safe_dump({"kind": "NodeSLO", "metadata": {"name": "n"}, "spec": spec}))
    status, out, _ = _koordctl(str(recording), "--nodeslo", str(other), capsys=capsys)
    assert status == 0
    assert "decisions of 40 rounds differ" in out and "recorded: " in out
    status, out, _ = _koordctl(str(recording), "-o", "json", capsys=capsys)
    assert json.loads(out)["rounds"] == 40


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        ("kind: Pod", "not a NodeSLO"),
        ("a: [", "not a manifest"),
        ("kind: NodeSLO\nspec: {resourceUsedThresholdWithBE: {cpuSuppressThresholdPercent: 300}}",
         "cpuSuppressThresholdPercent"),
    ],
)  # fmt: skip
def test_a_bad_nodeslo_is_named(
    tmp_path: Path, manifest: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = tmp_path / "recording"
    _Daemon(recording).live(3)
    path = tmp_path / "bad.yaml"
    path.write_text(manifest)
    status, out, err = _koordctl(str(recording), "--nodeslo", str(path), capsys=capsys)
    assert (status, out) == (2, "")
    assert problem in err


def test_a_directory_without_a_recording_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = _koordctl(str(tmp_path), capsys=capsys)
    assert status == 2 and str(tmp_path) in err
    status, _, err = _koordctl(str(tmp_path / "none"), capsys=capsys)
    assert status == 2 and "No such file" in err
