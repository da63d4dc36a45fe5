"""A simulated node with a reconciler, whose snapshot the test sets, and a policy for its shares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from apis.errors import InputError
from apis.qos import KubeQoS
from hooks.claim import Claim
from hooks.engine import Engine
from hooks.facts import NodeInputs, NodeMeta
from hooks.policy import Off, OffBecause, Policy
from hooks.subject import ContainerSubject, Level, PodSubject, Subject, make_pod
from koordlet.reconciler.reconciler import Reconciler
from koordlet.state.snapshot import Snapshot
from linux.resources import Resource
from tests.koordlet.executor.bed import TWO_CORES, Bed
from tests.simulated import DEBIAN_12_V1, Profile

SHARES, QUOTA = Resource.CPU_SHARES, Resource.CPU_CFS_QUOTA


def _parse(inputs: NodeInputs) -> Any:
    mode = inputs.node.annotations.get("mode", "on")
    if mode == "off":
        return Off(OffBecause.NODESLO, "switched off")
    if mode == "bad":
        raise InputError(obj="Node", field="mode", value=mode, problem="is bad")
    return int(mode) if mode.isdigit() else 700


def _claim(rule: int, subject: PodSubject | ContainerSubject) -> Iterator[Claim]:
    if subject.pod.annotations.get("bad"):
        raise InputError(obj=subject.pod.obj, field="bad", value="x", problem="is bad")
    if not subject.pod.annotations.get("skip"):
        yield Claim(resource=SHARES, value=rule, policy="shares", reason="r", source="s")
        yield Claim(
            resource=Resource.ENV, key="A", value="b", policy="shares", reason="r", source="s"
        )


POLICY = Policy(
    name="shares",
    gate="Shares",
    gate_default=True,
    summary="a test's policy",
    parse=_parse,
    claims={Level.POD: _claim, Level.CONTAINER: _claim},
)


@dataclass
class Node:
    """A simulated node with a reconciler whose snapshot the test sets."""

    bed: Bed
    engine: Engine
    subjects: tuple[Subject, ...]
    reconciler: Reconciler
    complete: bool = True
    requests: int = 0

    def snapshot(self) -> Snapshot:
        return Snapshot(self.engine, self.subjects, self.complete, self.requests)

    def mode(self, mode: str) -> None:
        inputs = NodeInputs(node=NodeMeta(annotations={"mode": mode}))
        self.engine = Engine.build([POLICY], inputs, previous=self.engine)

    def annotate(self, index: int, **annotations: str) -> None:
        subject = self.subjects[index]
        assert isinstance(subject, PodSubject)
        pod = make_pod(
            namespace="default",
            name=subject.pod.name,
            uid=subject.pod.uid,
            labels={},
            annotations=annotations,
            kube_qos=KubeQoS.BURSTABLE,
            cgroup=subject.pod.cgroup,
        )
        changed = list(self.subjects)
        changed[index] = PodSubject(pod)
        self.subjects = tuple(changed)

    def passes(self, count: int = 3) -> None:
        for _ in range(count):
            self.reconciler.run_once("test")

    def shares(self, index: int) -> str:
        file = "cpu.shares" if self.bed.kernel.profile.cgroup == 1 else "cpu.weight"
        return self.bed.text(self.subjects[index].cgroup, file)


def make_node(
    profile: Profile = DEBIAN_12_V1, *, pods: int = 3, journal_path: str | None = None
) -> Node:
    bed = Bed(profile, journal_path=journal_path)
    subjects: list[Subject] = []
    for number in range(pods):
        made = bed.kubelet.add_pod(TWO_CORES)
        pod = make_pod(
            namespace="default",
            name=f"p{number}",
            uid=made.uid,
            labels={},
            annotations={},
            kube_qos=KubeQoS.BURSTABLE,
            cgroup=made.cgroup,
        )
        subjects.append(PodSubject(pod))
    engine = Engine.build([POLICY], NodeInputs())
    holder: list[Node] = []
    reconciler = Reconciler(bed.executor, bed.journal, lambda: holder[0].snapshot())
    node = Node(bed, engine, tuple(subjects), reconciler)
    holder.append(node)
    return node
