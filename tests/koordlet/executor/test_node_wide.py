"""What the executor does to processes and to the node: scores, cookies, switches, directories."""

from __future__ import annotations

import errno

import pytest

from hooks.state import State
from koordlet.executor.node_wide import make_host_directory
from koordlet.executor.slots import Want
from linux.resources import Resource
from tests.koordlet.executor.bed import TWO_CORES, Bed, claim_of
from tests.simulated import (
    ANOLIS_8,
    INTEL_RDT,
    RHEL_9,
)


def test_oom_scores_of_all_processes_are_set_and_put_back() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    child = bed.kernel.fork(container.task)
    for task in (container.task, child):
        task.oom_score_adj = 900
    bed.want("container/1", (container.cgroup, Resource.OOM_SCORE_ADJ, 500))
    assert bed.run().written == 2
    assert (container.task.oom_score_adj, child.oom_score_adj) == (500, 500)
    assert bed.run().written == 0
    late = bed.kernel.fork(container.task)
    late.oom_score_adj = 0
    assert bed.run().written == 1
    bed.want("container/1")
    bed.run()
    bed.run()
    assert {container.task.oom_score_adj, child.oom_score_adj, late.oom_score_adj} == {900}
    assert not len(bed.journal)


def _cookie(bed: Bed, subject: str, cgroup: str, group: str) -> None:
    bed.want(subject, (cgroup, Resource.CORE_SCHED_COOKIE, group))


def test_containers_of_a_group_share_one_cookie_and_groups_do_not() -> None:
    bed = Bed(RHEL_9)
    pods = [bed.kubelet.add_pod(TWO_CORES) for _ in range(3)]
    made = [pod.start(TWO_CORES) for pod in pods]
    for number, (container, group) in enumerate(zip(made, ("g", "g", "h"), strict=True)):
        _cookie(bed, f"container/{number}", container.cgroup, group)
    assert bed.run().failed == 0
    cookies = [container.task.cookie for container in made]
    assert cookies[0] and cookies[0] == cookies[1] != cookies[2]
    assert bed.run().written == 0
    # A restart knows the cookies from the processes themselves.
    bed.restart()
    for number, (container, group) in enumerate(zip(made, ("g", "g", "h"), strict=True)):
        _cookie(bed, f"container/{number}", container.cgroup, group)
    assert bed.run().written == 0
    # Leaving the group takes the cookie away.
    bed.want("container/0")
    bed.run()
    assert made[0].task.cookie == 0 and made[1].task.cookie == cookies[1]
    # Moving to another group takes that group's cookie.
    _cookie(bed, "container/1", made[1].cgroup, "h")
    bed.run()
    assert made[1].task.cookie == cookies[2]


@pytest.mark.parametrize("groups", [("g", "h"), ("h", "g")])
def test_a_container_that_changes_its_group_leaves_the_cookie_to_the_old_one(
    groups: tuple[str, str],
) -> None:
    """The new group has no member yet whose cookie could be taken."""
    old, new = groups
    bed = Bed(RHEL_9)
    made = [bed.kubelet.add_pod(TWO_CORES).start(TWO_CORES) for _ in range(3)]
    for number, container in enumerate(made):
        _cookie(bed, f"container/{number}", container.cgroup, old)
    bed.run()
    assert bed.run().written == 0
    shared = made[0].task.cookie
    child = bed.kernel.fork(made[2].task)
    assert child.cookie == shared
    _cookie(bed, "container/2", made[2].cgroup, new)
    assert bed.run().failed == 0
    assert [container.task.cookie for container in made[:2]] == [shared, shared]
    assert made[2].task.cookie not in (0, shared)
    assert child.cookie == made[2].task.cookie
    assert bed.run().written == 0
    _cookie(bed, "container/2", made[2].cgroup, old)
    bed.run()
    assert made[2].task.cookie == child.cookie == shared


def test_without_core_scheduling_the_state_says_so() -> None:
    bed = Bed()
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    _cookie(bed, "container/1", container.cgroup, "g")
    bed.run()
    assert bed.view("container/1", Resource.CORE_SCHED_COOKIE).state is State.UNSUPPORTED


def test_a_container_whose_cgroup_is_not_known_yet_waits_for_it() -> None:
    bed = Bed(RHEL_9)
    _cookie(bed, "container/1", "", "g")
    assert bed.run().failed == 0
    view = bed.view("container/1", Resource.CORE_SCHED_COOKIE)
    assert (view.state, view.detail) == (State.PENDING, "its cgroup is not known yet")


def test_a_container_is_blocked_while_its_control_group_is_missing() -> None:
    bed = Bed(INTEL_RDT)
    container = bed.kubelet.add_pod(TWO_CORES).start(TWO_CORES)
    bed.want("container/1", (container.cgroup, Resource.RESCTRL_GROUP, "LS"))
    assert bed.run().failed == 0
    view = bed.view("container/1", Resource.RESCTRL_GROUP)
    assert (view.state, view.detail) == (State.BLOCKED, "there is no control group 'LS'")


def _node(bed: Bed, *wishes: tuple[Resource, str, str]) -> None:
    bed.executor.want(
        "node",
        [
            Want("node", "", resource, key, value, claim_of(resource, value, key=key))
            for resource, key, value in wishes
        ],
    )


IDENTITY, CORE = "kernel.sched_group_identity_enabled", "kernel.sched_core"


def test_group_identity_and_core_scheduling_are_never_on_together() -> None:
    bed = Bed(ANOLIS_8)
    pod = bed.kubelet.add_pod(TWO_CORES)
    container = pod.start(TWO_CORES)
    both: list[tuple[int, int]] = []
    bed.kernel.sysctls.update({IDENTITY: 0, CORE: 0})
    bed.kernel.on_write(
        lambda write: both.append((bed.kernel.sysctls[IDENTITY], bed.kernel.sysctls[CORE]))
    )
    sysctl = Resource.SYSCTL
    for _ in range(2):
        _node(bed, (sysctl, IDENTITY, "0"), (sysctl, CORE, "1"))
        bed.want("pod/a")
        _cookie(bed, "container/1", container.cgroup, "g")
        assert bed.run().failed == 0
        assert container.task.cookie
        _node(bed, (sysctl, IDENTITY, "1"), (sysctl, CORE, "0"))
        bed.want("container/1")
        bed.want("pod/a", (pod.cgroup, Resource.CPU_BVT, 2))
        assert bed.run().failed == 0
        assert container.task.cookie == 0
        assert bed.text(pod.cgroup, "cpu.bvt_warp_ns") == "2"
    assert (1, 1) not in both
    _node(bed)
    bed.want("pod/a")
    bed.run()
    bed.run()
    assert (bed.kernel.sysctls[IDENTITY], bed.kernel.sysctls[CORE]) == (0, 0)
    assert not len(bed.journal)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EINVAL, errno.EROFS])
@pytest.mark.parametrize("refused", [IDENTITY, CORE])
def test_identities_wait_for_a_switch_that_the_kernel_refuses(refused: str, error: int) -> None:
    """One refusal a pass, not one for each pod; and nothing beside core scheduling."""
    bed = Bed(ANOLIS_8)
    pods = [bed.kubelet.add_pod(TWO_CORES) for _ in range(3)]
    bed.kernel.sysctls.update({IDENTITY: 0, CORE: 1})
    bed.kernel.faults.fail("write", error, path=f"/proc/sys/{refused.replace('.', '/')}", nth=0)
    _node(bed, (Resource.SYSCTL, IDENTITY, "1"), (Resource.SYSCTL, CORE, "0"))
    for pod in pods:
        bed.want(f"pod/{pod.uid}", (pod.cgroup, Resource.CPU_BVT, 2))
    assert bed.run().failed == 1
    tried = []
    for _ in range(20):
        bed.kernel.clock.advance(1)
        bed.executor.look_again()
        tried.append(bed.run().failed)
    assert sum(tried) <= 4  # after 1, 2, 4 and 8 s
    assert all(bed.text(pod.cgroup, "cpu.bvt_warp_ns") == "0" for pod in pods)
    views = [bed.view(f"pod/{pod.uid}", Resource.CPU_BVT) for pod in pods]
    assert {view.state for view in views} == {State.BLOCKED}
    name = errno.errorcode[error] if refused == IDENTITY else "waits for kernel.sched_core"
    assert all(view.detail.startswith(f"{IDENTITY} is 0, ") for view in views)
    assert all(name in view.detail for view in views)
    bed.kernel.faults.clear()
    bed.kernel.clock.advance(400)
    for _ in range(2):
        bed.executor.look_again()
        bed.run()
    assert (bed.kernel.sysctls[IDENTITY], bed.kernel.sysctls[CORE]) == (1, 0)
    assert all(bed.text(pod.cgroup, "cpu.bvt_warp_ns") == "2" for pod in pods)


def test_identities_are_written_on_a_kernel_without_their_switch() -> None:
    bed = Bed(ANOLIS_8)
    pod = bed.kubelet.add_pod(TWO_CORES)
    bed.kernel.faults.fail("read", errno.ENOENT, path="*/sched_group_identity_enabled", nth=0)
    bed.want("pod/a", (pod.cgroup, Resource.CPU_BVT, 2))
    assert bed.run().failed == 0
    assert bed.text(pod.cgroup, "cpu.bvt_warp_ns") == "2"


def test_an_unknown_switch_is_not_written() -> None:
    bed = Bed()
    _node(bed, (Resource.SYSCTL, "kernel.core_pattern", "|/bin/sh"))
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes
    assert bed.executor.views("node")[0].state is State.BLOCKED


def test_a_host_directory_whose_path_climbs_is_not_made() -> None:
    bed = Bed()
    _node(bed, (Resource.HOST_DIRECTORY, "/usr/local/vgpu/../../etc", "511"))
    with bed.kernel.recording() as writes:
        bed.run()
    assert not writes
    assert bed.executor.views("node")[0].state is State.BLOCKED


def test_a_host_directory_is_made_and_goes_with_its_claim() -> None:
    bed = Bed()
    path = "/usr/local/vgpu/containers/u1_main"
    wish = Want(
        "container/1", "", Resource.HOST_DIRECTORY, path, 0o777,
        claim_of(Resource.HOST_DIRECTORY, 0o777, key=path),
    )  # fmt: skip
    bed.executor.want("container/1", [wish])
    bed.run()
    assert bed.kernel.is_dir(path)
    assert bed.executor.views("container/1")[0].state is State.APPLIED
    assert bed.run().written == 0
    bed.executor.want("container/1", [])
    bed.run()
    bed.run()
    assert not bed.kernel.is_dir(path) and bed.kernel.is_dir("/usr/local/vgpu/containers")
    assert not len(bed.journal)
    # The hook makes it before it replies; it goes with the container all the same.
    make_host_directory(bed.kernel, path, 0o777)
    bed.executor.want("container/1", [wish])
    assert bed.run().written == 0
    bed.executor.want("container/1", [])
    bed.run()
    assert not bed.kernel.is_dir(path)
