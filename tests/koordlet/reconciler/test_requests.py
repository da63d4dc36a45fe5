"""Kubelet requests other values of a running container: nothing undoes what the runtime writes.

From the reply until the reconciler has the container as of the reply, its own desired values follow
from the former request.
"""

from __future__ import annotations

import msgspec
import pytest

from apis.qos import KubeQoS
from hooks.claim import Claim
from hooks.engine import Engine
from hooks.facts import NodeInputs
from hooks.policy import Policy
from hooks.subject import ContainerSubject, Level, Requested, make_pod
from koordlet.executor.requests_ahead import RequestsAhead
from koordlet.reconciler.reconciler import Reconciler
from koordlet.state.snapshot import Snapshot
from linux.resources import Resource
from tests.koordlet.executor.bed import TWO_CORES, Bed

POLICY = Policy(
    name="half",
    gate="Half",
    gate_default=True,
    summary="half of the quota that kubelet requests",
    parse=lambda inputs: 2,
    claims={
        Level.CONTAINER: lambda rule, subject: [
            Claim(
                resource=Resource.CPU_CFS_QUOTA,
                value=subject.requested.cfs_quota_us // rule,
                policy="half",
                reason="r",
                source="s",
            )
        ]
    },
)
ENGINE = Engine.build([POLICY], NodeInputs())


class Node:
    """A node with one container, whose quota a policy halves."""

    def __init__(self) -> None:
        self.bed = Bed()
        made = self.bed.kubelet.add_pod(TWO_CORES)
        self.uid = made.uid
        container = made.start(TWO_CORES)
        self.pod = make_pod(
            namespace="default",
            name="p",
            uid=made.uid,
            labels={},
            annotations={},
            kube_qos=KubeQoS.BURSTABLE,
            cgroup=made.cgroup,
        )
        self.bed.set(made.cgroup, "cpu.cfs_quota_us", "-1")
        self.subject = ContainerSubject(
            pod=self.pod,
            name="main",
            id=container.id,
            cgroup=container.cgroup,
            requested=Requested(cfs_quota_us=200_000),
        )
        self.requests = 0
        self.reconciler = Reconciler(
            self.bed.executor,
            self.bed.journal,
            lambda: Snapshot(ENGINE, (self.subject,), requests=self.requests),
        )
        self.reconciler.run_once("test")
        assert self.quota == "100000"

    @property
    def quota(self) -> str:
        return self.bed.text(self.subject.cgroup, "cpu.cfs_quota_us")

    def reply(self, number: int) -> None:
        """A hook's reply to another request; the reconciler is not given the container yet."""
        self.reconciler.requested(self.subject.cgroup, number)

    def runtime_writes(self, quota: str) -> None:
        self.bed.set(self.subject.cgroup, "cpu.cfs_quota_us", quota, writer="runtime")

    def follow(self, requested_us: int, number: int) -> None:
        """Queue the container as of a reply."""
        requested = Requested(cfs_quota_us=requested_us)
        self.subject = msgspec.structs.replace(self.subject, requested=requested)
        self.requests = number
        self.reconciler.pods_changed(ENGINE, {self.uid: (self.subject,)}, requests=number)


def test_a_pass_with_an_older_snapshot_leaves_what_the_runtime_wrote() -> None:
    node = Node()
    node.reply(1)
    node.runtime_writes("150000")
    report = node.reconciler.run_once("test")
    assert (report.written, node.quota) == (0, "150000")


def test_an_update_by_standing_claims_or_outside_writes_leaves_it_too() -> None:
    node = Node()
    node.reply(1)
    node.runtime_writes("150000")
    node.reconciler.pods_changed(ENGINE, {node.uid: (node.subject,)})  # as it was before the reply
    report = node.reconciler.update_once()
    assert report is not None
    assert (report.written, node.quota) == (0, "150000")


@pytest.mark.parametrize("by_pass", [False, True])
def test_the_container_as_of_the_reply_is_kept_in_its_state_again(by_pass: bool) -> None:
    node = Node()
    node.reply(1)
    node.runtime_writes("150000")
    node.follow(300_000, 1)
    if by_pass:
        node.reconciler.snapshot_made()
        node.reconciler.run_once("test")
    else:
        node.reconciler.update_once()
    node.runtime_writes("-1")
    node.reconciler.run_once("test")
    assert node.quota == "150000"


def test_a_reply_that_the_runtime_does_not_carry_out_is_carried_out() -> None:
    node = Node()
    node.reply(1)
    node.follow(300_000, 1)
    node.reconciler.update_once()
    assert node.quota == "150000"


def test_a_container_as_of_an_older_reply_does_not_count() -> None:
    node = Node()
    node.reply(1)
    node.follow(300_000, 1)
    node.reply(2)
    node.runtime_writes("40000")
    node.reconciler.update_once()
    assert node.quota == "40000"
    node.follow(80_000, 2)
    node.reconciler.update_once()
    assert node.quota == "40000"


def test_a_request_between_the_plan_and_its_write_holds_the_write_back() -> None:
    node = Node()
    node.runtime_writes("70000")  # to be repaired
    path = node.bed.kubelet.path(node.subject.cgroup, "cpu.cfs_quota_us")
    node.bed.kernel.faults.after("read", lambda: node.reply(1), path=path)
    node.bed.kernel.writes.clear()
    node.reconciler.run_once("test")
    assert node.quota == "70000"
    assert not node.bed.kernel.writes


def test_replies_are_not_taken_for_a_writer_that_fights_for_the_file() -> None:
    node = Node()
    for number in range(1, 8):
        node.reply(number)
        node.runtime_writes(f"{number}0000")
        node.reconciler.run_once("test")
        node.follow(number * 20_000, number)
        node.reconciler.update_once()
    node.runtime_writes("-1")
    node.reconciler.run_once("test")
    assert node.quota == "70000"
    node.reconciler.restore_all()
    assert node.quota == "140000"


def test_requests_are_followed_up_to_a_number() -> None:
    ahead = RequestsAhead()
    assert not ahead
    ahead.add("a", 1)
    ahead.add("b", 2)
    ahead.follow(1, ["b", "unknown"])
    assert "a" in ahead and "b" in ahead
    ahead.follow(1)
    assert "a" not in ahead and "b" in ahead
    ahead.follow(2, ["b"])
    assert not ahead


def test_a_request_for_a_container_without_a_known_cgroup_holds_nothing_back() -> None:
    ahead = RequestsAhead()
    ahead.add("", 1)
    assert not ahead and "" not in ahead
