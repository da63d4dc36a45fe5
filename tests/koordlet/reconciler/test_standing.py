"""Standing claims in the reconciler: only what they change is looked at, and it goes with them."""

from __future__ import annotations

import errno
from pathlib import Path

from apis.cpuset import CpuSet
from apis.qos import KubeQoS
from hooks.claim import Claim, Op, Rank
from hooks.standing import NOTHING_STANDS, Standing
from hooks.state import State
from hooks.subject import Level, PodSubject, QosSubject, SandboxSubject
from koordlet.executor.executor import Executor
from koordlet.reconciler.reconciler import Reconciler
from koordlet.reconciler.wishes import plan_for
from linux.resources import Resource, Value
from tests.koordlet.executor.bed import BOTH, TWO_CORES
from tests.koordlet.reconciler.bed import QUOTA, SHARES, Node, make_node
from tests.simulated import DEBIAN_12_V1, Profile
from tests.waiting import wait_until


def claim(resource: Resource, value: Value, reason: str = "node 62 %", *, op: Op = Op.SET) -> Claim:
    return Claim(
        resource=resource,
        value=value,
        policy="cpu-suppress",
        reason=reason,
        source="NodeSLO",
        op=op,
        rank=Rank.EMERGENCY,
    )


def stand(node: Node, index: int, *claims: Claim) -> None:
    node.reconciler.standing_changed(Standing(by_subject={node.subjects[index].key: claims}))


def test_only_the_subjects_with_other_claims_are_written() -> None:
    node = make_node()
    node.passes()
    node.bed.kernel.faults.fail("read", errno.EIO, path=f"*{node.subjects[0].key[4:]}*")
    stand(node, 1, claim(SHARES, 900))
    report = node.reconciler.update_once()
    assert report is not None
    assert (report.decided, report.written) == (1, 1)
    assert [node.shares(index) for index in range(3)] == ["700", "900", "700"]
    assert node.reconciler.stats.standing_updates == 1
    assert node.reconciler.update_once() is None


def test_a_pass_uses_the_standing_claims_too_and_they_are_explained_like_all_others() -> None:
    node = make_node()
    stand(node, 0, claim(SHARES, 900))
    node.passes()
    assert node.shares(0) == "900"
    view = node.reconciler.explain(node.subjects[0].key)
    assert view is not None
    outcome = view.decision.outcomes[SHARES, ""]
    assert (outcome.winner.policy, outcome.winner.reason) == ("cpu-suppress", "node 62 %")
    assert [each.policy for each in outcome.losers] == ["shares"]
    assert "cpu-suppress: node 62 %" in view.resources[0].writes[-1].why


def test_claims_that_go_leave_the_policies_value_and_the_original_where_there_is_none() -> None:
    node = make_node()
    before = node.bed.text(node.subjects[0].cgroup, "cpu.cfs_quota_us")
    node.passes()
    stand(node, 0, claim(SHARES, 900), claim(QUOTA, 50_000))
    node.reconciler.update_once()
    assert node.bed.text(node.subjects[0].cgroup, "cpu.cfs_quota_us") == "50000"
    node.reconciler.standing_changed(NOTHING_STANDS)
    node.reconciler.update_once()
    assert node.shares(0) == "700"
    assert node.bed.text(node.subjects[0].cgroup, "cpu.cfs_quota_us") == before
    assert len(node.bed.journal) == 3


def test_another_reason_alone_reads_and_writes_nothing_and_is_explained() -> None:
    node = make_node()
    node.passes()
    stand(node, 0, claim(SHARES, 900))
    node.reconciler.update_once()
    node.bed.kernel.faults.fail("read", errno.EIO, path="*cpu.shares")
    stand(node, 0, claim(SHARES, 900, "node 63 %"))
    report = node.reconciler.update_once()
    assert report is not None
    assert (report.decided, report.written, report.failed) == (0, 0, 0)
    view = node.reconciler.explain(node.subjects[0].key)
    assert view is not None
    assert view.decision.outcomes[SHARES, ""].winner.reason == "node 63 %"
    assert [each.state for each in view.resources] == [State.APPLIED]


def test_another_reason_does_not_end_the_rest_of_a_refused_value() -> None:
    node = make_node()
    node.passes()
    node.bed.kernel.faults.fail("write", errno.EINVAL, path="*cpu.cfs_quota_us")
    stand(node, 0, claim(QUOTA, 50_000))
    report = node.reconciler.update_once()
    assert report is not None and report.failed == 1
    stand(node, 0, claim(QUOTA, 50_000, "node 63 %"), claim(Resource.CPU_CFS_BURST, 0))
    report = node.reconciler.update_once()
    assert report is not None and report.failed == 0


def test_claims_before_the_first_pass_wait_for_it() -> None:
    node = make_node()
    stand(node, 0, claim(SHARES, 900))
    assert node.reconciler.update_once() is None
    node.passes(1)
    assert node.shares(0) == "900"


def test_a_plan_shows_what_the_standing_claims_lead_to() -> None:
    node = make_node()
    node.passes()
    executor = Executor(node.bed.kernel, node.bed.layout, node.bed.journal.copy_in_memory())
    standing = Standing(by_subject={node.subjects[0].key: (claim(SHARES, 900),)})
    writes = plan_for(executor, node.snapshot(), standing=standing)
    assert [(write.old, write.new, write.why) for write in writes] == [
        ("700", "900", "cpu-suppress: node 62 %")
    ]
    assert node.shares(0) == "700"


def test_what_a_strategy_left_is_restored_after_a_restart(tmp_path: Path) -> None:
    node = make_node(journal_path=str(tmp_path / "journal"))
    before = node.bed.text(node.subjects[0].cgroup, "cpu.cfs_quota_us")
    node.passes()
    stand(node, 0, claim(QUOTA, 50_000), claim(SHARES, 900))
    node.reconciler.update_once()
    node.bed.restart()
    node.reconciler = Reconciler(node.bed.executor, node.bed.journal, node.snapshot)
    node.passes()
    assert node.bed.text(node.subjects[0].cgroup, "cpu.cfs_quota_us") == before
    assert node.shares(0) == "700"


def test_claims_that_are_resumed_before_the_first_pass_leave_the_value_alone(
    tmp_path: Path,
) -> None:
    node = make_node(journal_path=str(tmp_path / "journal"))
    before = node.bed.text(node.subjects[0].cgroup, "cpu.cfs_quota_us")
    node.passes()
    stand(node, 0, claim(QUOTA, 50_000))
    node.reconciler.update_once()
    node.bed.restart()
    node.reconciler = Reconciler(node.bed.executor, node.bed.journal, node.snapshot)
    stand(node, 0, claim(QUOTA, 50_000))
    writes = len(node.bed.kernel.writes)
    node.passes()
    assert len(node.bed.kernel.writes) == writes
    node.reconciler.standing_changed(NOTHING_STANDS)
    node.reconciler.update_once()
    assert node.bed.text(node.subjects[0].cgroup, "cpu.cfs_quota_us") == before


def test_an_uninstall_restores_what_stood() -> None:
    node = make_node()
    before = node.bed.text(node.subjects[0].cgroup, "cpu.cfs_quota_us")
    node.passes()
    stand(node, 0, claim(QUOTA, 50_000))
    node.reconciler.update_once()
    report = node.reconciler.restore_all()
    assert report.failed == 0
    assert node.bed.text(node.subjects[0].cgroup, "cpu.cfs_quota_us") == before
    assert not len(node.bed.journal)


def test_the_thread_follows_the_standing_claims_without_a_pass() -> None:
    node = make_node()
    node.reconciler.interval_s = 3600.0
    node.reconciler.start()
    try:
        wait_until(lambda: node.reconciler.stats.passes == 1, "the first pass")
        stand(node, 0, claim(SHARES, 900))
        wait_until(lambda: node.shares(0) == "900", "the claim in force")
        assert node.reconciler.stats.passes == 1
    finally:
        assert node.reconciler.stop()
        node.reconciler.close()


# -- a QoS directory above its pods --------------------------------------------------------------


def with_class(profile: Profile, journal_path: str | None = None) -> tuple[Node, QosSubject]:
    """A node whose subjects are a QoS directory, its pods and their sandboxes."""
    node = make_node(profile, journal_path=journal_path)
    pods = [subject.pod for subject in node.subjects if isinstance(subject, PodSubject)]
    sandboxes = []
    for pod in pods:
        made = node.bed.kubelet.pods[pod.uid].sandbox
        assert made is not None
        sandboxes.append(SandboxSubject(pod=pod, id=made.id, cgroup=made.cgroup))
    cgroup = node.bed.kubelet.qos_dir("Burstable")
    qos = QosSubject(kube_qos=KubeQoS.BURSTABLE, cgroup=cgroup, pods=tuple(pods))
    node.subjects = (qos, *node.subjects, *sandboxes)
    node.passes()
    return node, qos


def refused(node: Node) -> list[str]:
    return [write.path for write in node.bed.kernel.writes_of() if write.error]


@BOTH
def test_a_directory_and_its_pods_get_other_cpus_in_an_order_that_the_kernel_takes(
    profile: Profile,
) -> None:
    node, qos = with_class(profile)
    groups = [subject.cgroup for subject in node.subjects]
    for cpus in (CpuSet({0, 1}), CpuSet({2, 3}), CpuSet({1, 2, 3}), CpuSet({0})):
        narrowed = (claim(Resource.CPUSET_CPUS, cpus),)
        node.reconciler.standing_changed(
            Standing(
                by_subject={qos.key: narrowed},
                by_class={
                    (Level.POD, KubeQoS.BURSTABLE): narrowed,
                    (Level.SANDBOX, KubeQoS.BURSTABLE): narrowed,
                },
            )
        )
        report = node.reconciler.update_once()
        assert report is not None and report.failed == 0
        assert {node.bed.text(group, "cpuset.cpus") for group in groups} == {str(cpus)}
    assert not refused(node)
    node.reconciler.standing_changed(NOTHING_STANDS)
    node.reconciler.update_once()
    assert {node.bed.text(group, "cpuset.cpus") for group in groups} == {"0-3"}
    assert not refused(node)


def test_a_directory_alone_is_kept_around_groups_without_a_claim_on_v1() -> None:
    node, qos = with_class(DEBIAN_12_V1)
    cpus = claim(Resource.CPUSET_CPUS, CpuSet({0, 1}))
    node.reconciler.standing_changed(Standing(by_subject={qos.key: (cpus,)}))
    report = node.reconciler.update_once()
    assert report is not None and report.failed == 0
    assert not refused(node)
    view = node.reconciler.explain(qos.key)
    assert view is not None
    assert view.resources[0].state is State.DEGRADED
    assert "not managed here" in view.resources[0].detail


@BOTH
def test_a_directorys_quota_bounds_the_managed_quotas_below_it(profile: Profile) -> None:
    """The kernel of v1 refuses a child's quota above its parent's."""
    node, qos = with_class(profile)
    pod = node.subjects[1]
    wide = claim(QUOTA, 200_000)
    node.reconciler.standing_changed(Standing(by_subject={pod.key: (wide,)}))
    node.reconciler.update_once()
    narrow = claim(QUOTA, 150_000)
    others = {subject.key: (narrow,) for subject in node.subjects[2:4]}
    node.reconciler.standing_changed(
        Standing(by_subject={qos.key: (narrow,), pod.key: (wide,), **others})
    )
    report = node.reconciler.update_once()
    assert report is not None and report.failed == 0
    assert not refused(node)
    if profile.cgroup == 1:
        assert node.bed.text(qos.cgroup, "cpu.cfs_quota_us") == "150000"
        assert node.bed.text(pod.cgroup, "cpu.cfs_quota_us") == "150000"
    else:
        assert node.bed.text(qos.cgroup, "cpu.max") == "150000 100000"
        assert node.bed.text(pod.cgroup, "cpu.max") == "200000 100000"
    node.reconciler.standing_changed(Standing(by_subject={pod.key: (wide,)}))
    node.reconciler.update_once()
    file = "cpu.cfs_quota_us" if profile.cgroup == 1 else "cpu.max"
    assert node.bed.text(pod.cgroup, file).startswith("200000")
    assert not refused(node)


def test_a_pod_that_was_made_under_narrowed_cpus_while_koordlet_was_away_gets_all_back(
    tmp_path: Path,
) -> None:
    """On v1 kubelet and runtime copy the set of the directory above to the pod's groups."""
    node, qos = with_class(DEBIAN_12_V1, str(tmp_path / "journal"))
    narrowed = (claim(Resource.CPUSET_CPUS, CpuSet({0, 1})),)
    levels = (Level.POD, Level.SANDBOX)
    by_class = {(level, KubeQoS.BURSTABLE): narrowed for level in levels}
    node.reconciler.standing_changed(Standing({qos.key: narrowed}, by_class))
    node.reconciler.update_once()
    later = node.bed.kubelet.add_pod(TWO_CORES)
    container = later.start(TWO_CORES)
    assert node.bed.text(container.cgroup, "cpuset.cpus") == "0-1"
    node.bed.restart()
    node.reconciler = Reconciler(node.bed.executor, node.bed.journal, node.snapshot)
    node.passes()
    groups = [*(subject.cgroup for subject in node.subjects), later.cgroup, container.cgroup]
    assert {node.bed.text(group, "cpuset.cpus") for group in groups} == {"0-3"}
    assert not refused(node)
    assert not [one for one in node.bed.journal.records() if one.resource is Resource.CPUSET_CPUS]
