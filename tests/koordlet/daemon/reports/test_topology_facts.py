"""Gathering the facts of the topology: what is read when, and what stays when it cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hooks.facts import NodeMeta
from hooks.subject import Pod
from koordlet.daemon.reports.topology_facts import TopologyFacts
from koordlet.node.hardware import Machine, read_machine
from koordlet.sources.kubelet_settings import KubeletSettings
from koordlet.sources.polling import SourceError
from tests.koordlet.configured import configured
from tests.koordlet.prediction.pods import pod
from tests.simulated import UBUNTU_24_04, SimulatedKernel


class Kubelet:
    """Answers with its settings, or with an error."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: KubeletSettings | SourceError = KubeletSettings("static")

    def fetch_settings(self) -> KubeletSettings:
        self.asked += 1
        if isinstance(self.answer, SourceError):
            raise self.answer
        return self.answer


class Bed:
    def __init__(self, folder: Path, *, kubelet: Kubelet | None = None, **changes: Any) -> None:
        self.now = 1000.0
        self.kernel = SimulatedKernel(UBUNTU_24_04)
        self.machine: Machine | None = read_machine(self.kernel)
        self.pods: list[tuple[Pod, bool]] = []
        self.gates = {"NodeTopologyReport": True, "HugePageReport": False}
        self.listed = True
        changes["kubelet"] = {"directory": str(folder)}
        self.facts = TopologyFacts(
            configured(runDir=str(folder), **changes),
            self.kernel,
            machine=lambda: self.machine,
            pods=lambda: self.pods,
            node=lambda: NodeMeta("n1"),
            kubelet=lambda: kubelet,  # type: ignore[arg-type,return-value]
            gate=lambda name: self.gates[name],
            listed=lambda: self.listed,
            monotonic=lambda: self.now,
        )

    def annotation(self, name: str) -> Any:
        found = self.facts.gather()
        assert found is not None
        return json.loads(found.wanted.annotations[f"node.koordinator.sh/{name}"])


def ready(bed: Bed) -> Bed:
    """The first round sees that the pods are listed."""
    assert bed.facts.gather() is None
    return bed


def test_nothing_is_reported_before_all_pods_are_listed(tmp_path: Path) -> None:
    bed = Bed(tmp_path)
    bed.listed = False
    assert [bed.facts.gather() for _ in range(3)] == [None] * 3
    bed.listed = True
    assert bed.facts.gather() is None
    assert bed.facts.gather() is not None


def test_the_gate_and_an_unknown_machine_switch_it_off(tmp_path: Path) -> None:
    bed = ready(Bed(tmp_path))
    assert bed.facts.gather() is not None
    bed.gates["NodeTopologyReport"] = False
    assert bed.facts.gather() is None
    bed.gates["NodeTopologyReport"] = True
    bed.machine = None
    assert bed.facts.gather() is None


def test_unchanged_facts_give_the_same_value(tmp_path: Path) -> None:
    bed = ready(Bed(tmp_path))
    first = bed.facts.gather()
    assert bed.facts.gather() is first
    bed.pods = [(pod("a"), False)]
    second = bed.facts.gather()
    assert second is not first
    assert second == first


def test_kubelets_settings_are_kept_while_it_does_not_answer(tmp_path: Path) -> None:
    kubelet = Kubelet()
    bed = ready(Bed(tmp_path, kubelet=kubelet))
    (tmp_path / "cpu_manager_state").write_text('{"entries":{"uid-1":{"c":"1"}}}')
    assert bed.annotation("pod-cpu-allocs")[0]["cpuset"] == "1"
    kubelet.answer = SourceError("away")
    bed.now += 301
    assert bed.annotation("pod-cpu-allocs")[0]["cpuset"] == "1"
    assert kubelet.asked == 2


def test_without_a_first_answer_of_kubelet_nothing_is_computed(tmp_path: Path) -> None:
    kubelet = Kubelet()
    kubelet.answer = SourceError("kubelet answered 403")
    bed = ready(Bed(tmp_path, kubelet=kubelet))
    for _ in range(3):
        with pytest.raises(SourceError, match="403"):
            bed.facts.gather()
    assert kubelet.asked == 1
    kubelet.answer = KubeletSettings()
    bed.now += 10
    assert bed.facts.gather() is not None


def test_kubelet_is_not_asked_where_the_configuration_says_so(tmp_path: Path) -> None:
    kubelet = Kubelet()
    bed = ready(Bed(tmp_path, kubelet=kubelet, reports={"disableQueryKubeletConfig": True}))
    assert bed.facts.gather() is not None
    assert kubelet.asked == 0
