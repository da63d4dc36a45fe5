"""When the files of terway-qos exist, and what bad input does to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from apis.effective_nodeslo import decode_nodeslo
from hooks.facts import NodeInputs, Settings
from hooks.subject import Pod
from koordlet.daemon.reports.terway import Terway
from koordlet.reporters.terway import GLOBAL, PODS
from service.events import Events
from tests.koordlet.configured import configured
from tests.koordlet.prediction.pods import pod


class Bed:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "qos"
        self.pods: list[tuple[Pod, bool]] = [(replace(pod("a"), cgroup="kubepods/poda"), False)]
        self.events = Events()
        self.listed = True
        self.gate = True
        self.ask()
        self.terway = Terway(
            configured(terwayQos={"directory": str(self.folder)}),
            inputs=lambda: self.inputs,
            pods=lambda: self.pods,
            layout=lambda: None,
            listed=lambda: self.listed,
            events=self.events,
        )

    def ask(self, *, policy: str = "terway-qos", total: str = "8k", **qos: Any) -> None:
        spec = {
            "systemStrategy": {"totalNetworkBandwidth": total},
            "resourceQOSStrategy": {
                "policies": {"netQOSPolicy": policy},
                "beClass": {"networkQOS": {"enable": True} | qos},
            },
        }
        self.inputs = NodeInputs(
            slo=decode_nodeslo({"spec": spec}, obj="NodeSLO n1"),
            settings=Settings(feature_gates={"TerwayQoS": self.gate}),
        )

    def look(self) -> str:
        """Look once; return the node's file, "" if there is none."""
        self.terway.look()
        path = self.folder / GLOBAL
        return path.read_text() if path.exists() else ""


@pytest.fixture
def bed(tmp_path: Path) -> Bed:
    return Bed(tmp_path)


def test_files_exist_while_gate_and_nodeslo_ask_for_them(bed: Bed) -> None:
    assert bed.look().startswith("hw_tx_bps_max 1000\n")
    assert "podName" in (bed.folder / PODS).read_text()
    bed.ask(policy="tc")
    assert bed.look() == "" and not list(bed.folder.iterdir())
    bed.ask()
    assert bed.look()
    bed.gate = False
    bed.ask()
    assert bed.look() == "" and not list(bed.folder.iterdir())


def test_files_of_an_earlier_run_are_removed_too(bed: Bed, tmp_path: Path) -> None:
    assert bed.look()
    again = Bed(tmp_path)
    again.ask(policy="tc")
    assert again.look() == ""


def test_nothing_is_written_before_the_pods_are_listed(bed: Bed) -> None:
    bed.listed = False
    assert bed.look() == ""


def test_a_bad_nodeslo_leaves_the_last_rates_and_pods_go_on(bed: Bed) -> None:
    before = bed.look()
    bed.ask(egressLimit="9k")
    bed.pods = []
    assert bed.look() == before
    assert (bed.folder / PODS).read_text() == "{}"
    assert any("egressLimit" in event.message for event in bed.events.latest())


def test_a_directory_that_cannot_be_written_is_an_event_and_tried_again(bed: Bed) -> None:
    bed.folder.write_text("a file")
    bed.terway.look()
    assert bed.events.totals["terway-qos"] == 1
    bed.folder.unlink()
    assert bed.look()
