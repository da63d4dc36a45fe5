"""Docker mode: what hooks are sent for each call, and what of their answers reaches dockerd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from protos.runtimehook.v1alpha1 import api_pb2 as hook
from runtime_proxy.docker.intercept import Refusal
from runtime_proxy.hook_server import GivenUp, HookError
from runtime_proxy.model import Container, Pod, PodChanges, PodMeta, Resources
from runtime_proxy.stages import Stage
from tests.runtime_proxy.processes import answering, echo
from tests.runtime_proxy.scripted import ScriptedServer, World

SANDBOX: dict[str, Any] = {
    "Image": "pause",
    "Labels": {
        "app": "web",
        "annotation.note": "n",
        "io.kubernetes.docker.type": "podsandbox",
    },
    "HostConfig": {"CgroupParent": "/kubepods/pod-u-1", "CpuShares": 2, "Other": [1]},
}
CONTAINER: dict[str, Any] = {
    "Image": "busybox",
    "Env": ["A=1", "B=2", "BARE", "A=3", "C=a=b"],
    "Labels": {
        "own": "label",
        "annotation.kept": "k",
        "io.kubernetes.docker.type": "container",
        "io.kubernetes.sandbox.id": "p1",
    },
    "HostConfig": {
        "CgroupParent": "/kubepods/pod-u-1",
        "CpuPeriod": 100_000,
        "CpuQuota": 50_000,
        "CpuShares": 512,
        "Memory": 1 << 30,
        "MemorySwap": 1 << 31,
        "OomScoreAdj": 900,
        "CpusetCpus": "0-3",
        "CpusetMems": "0",
        "Binds": ["/a:/b"],
    },
    "Unknown": {"kept": [None, 1.5]},
}
RESOURCES = hook.LinuxContainerResources(
    cpu_period=100_000,
    cpu_quota=50_000,
    cpu_shares=512,
    memory_limit_in_bytes=1 << 30,
    memory_swap_limit_in_bytes=1 << 31,
    oom_score_adj=900,
    cpuset_cpus="0-3",
    cpuset_mems="0",
)
POD_META = hook.PodSandboxMetadata(name="web-0", uid="u-1", namespace="prod", attempt=3)


def run(world: World, document: dict[str, Any] = SANDBOX) -> Any:
    return world.ask_docker(
        "POST",
        "/v1.41/containers/create?name=k8s_POD_web-0_prod_u-1_3",
        document,
        status=201,
        answer={"Id": "p1"},
    )


def create(world: World, document: dict[str, Any] = CONTAINER) -> Any:
    return world.ask_docker(
        "POST",
        "/containers/create?name=k8s_main_web-0_prod_u-1_2",
        document,
        status=201,
        answer={"Id": "c1"},
    )


def ready(*servers: ScriptedServer, driver: str = "cgroupfs") -> World:
    """Return a world with the sandbox p1 and the container c1 in it."""
    world = World(*servers, driver=driver)
    answers = [server.answers for server in servers]
    for server in servers:
        server.answers = {}
    assert run(world) is None
    assert create(world) is None
    for server, its in zip(servers, answers, strict=True):
        server.answers = its
    return world


def test_a_hook_is_sent_all_of_a_sandbox() -> None:
    server = ScriptedServer({Stage.PRE_RUN_POD_SANDBOX: echo})
    assert run(World(server)) is None
    ((_, sent),) = server.asked
    assert sent == hook.PodSandboxHookRequest(
        pod_meta=POD_META,
        runtime_handler="docker",
        labels={"app": "web", "io.kubernetes.docker.type": "podsandbox"},
        annotations={"note": "n"},
        cgroup_parent="/kubepods/pod-u-1",
        resources=hook.LinuxContainerResources(cpu_shares=2),
    )


def container_request(identifier: str) -> hook.ContainerResourceHookRequest:
    return hook.ContainerResourceHookRequest(
        pod_meta=POD_META,
        container_meta=hook.ContainerMetadata(name="main", attempt=2, id=identifier),
        container_annotations={"kept": "k"},
        container_resources=RESOURCES,
        pod_resources=hook.LinuxContainerResources(cpu_shares=2),
        pod_annotations={"note": "n"},
        pod_labels={"app": "web", "io.kubernetes.docker.type": "podsandbox"},
        pod_cgroup_parent="/kubepods/pod-u-1",
        container_envs={"A": "3", "B": "2", "C": "a=b"},
    )


def test_a_hook_is_sent_all_of_a_container() -> None:
    server = ScriptedServer({Stage.PRE_CREATE_CONTAINER: echo})
    world = World(server)
    run(world)
    assert create(world) is None
    assert server.asked == [(Stage.PRE_CREATE_CONTAINER, container_request(""))]


CALLS: dict[str, tuple[Stage, str, str, dict[str, Any] | None]] = {
    "start": (Stage.PRE_START_CONTAINER, "POST", "/containers/c1/start", None),
    "started": (Stage.POST_START_CONTAINER, "POST", "/containers/c1/start", None),
    "update": (Stage.PRE_UPDATE_CONTAINER_RESOURCES, "POST", "/containers/c1/update", {}),
    "stop": (Stage.POST_STOP_CONTAINER, "POST", "/v1.41/containers/c1/stop?t=1", None),
    "delete": (Stage.POST_STOP_CONTAINER, "DELETE", "/containers/c1?force=1", None),
    "stop its sandbox": (Stage.POST_STOP_CONTAINER, "POST", "/containers/p1/stop", None),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("status", [204, 304, 500])
def test_a_hook_of_each_later_stage_is_sent_the_same_container(name: str, status: int) -> None:
    stage, method, target, document = CALLS[name]
    server = ScriptedServer({stage: echo})
    world = ready(server)
    assert world.ask_docker(method, target, document, status=status) is None
    # An after-stage runs only for what dockerd has done.
    expected = [(stage, container_request("c1"))]
    assert server.asked == (expected if status < 500 or stage.value.startswith("Pre") else [])


def test_an_end_is_reported_once_for_each_start() -> None:
    server = ScriptedServer({Stage.POST_STOP_CONTAINER: echo})
    world = ready(server)
    for count in (1, 2):
        for _ in range(2):
            world.ask_docker("POST", "/containers/c1/stop")
            assert len(server.asked) == count
        world.ask_docker("POST", "/containers/c1/start")


@pytest.mark.parametrize(
    ("method", "target"), [("POST", "/containers/p1/stop"), ("DELETE", "/containers/p1")]
)
def test_the_end_of_a_sandbox_is_reported_once(method: str, target: str) -> None:
    server = ScriptedServer({Stage.POST_STOP_POD_SANDBOX: echo})
    world = ready(server)
    world.ask_docker(method, target)
    world.ask_docker(method, target)
    ((_, sent),) = server.asked
    assert (sent.pod_meta, sent.cgroup_parent) == (POD_META, "/kubepods/pod-u-1")
    assert (world.store.pod("p1") is None) is (method == "DELETE")
    world.ask_docker("DELETE", "/containers/c1")
    assert world.store.container("c1") is None


Change = Callable[[Any], object]
NOTHING: Change = lambda document: None  # noqa: E731 - a table's cell


def set_resource(name: str, value: object) -> Change:
    return lambda answer: setattr(answer.container_resources, name, value)


def host(**members: Any) -> Change:
    return lambda document: document["HostConfig"].update(members)


def env(*entries: str) -> Change:
    return lambda document: document.update({"Env": list(entries)})


AT_CREATION: dict[str, tuple[Change, Change]] = {
    "nothing": (NOTHING, NOTHING),
    "cpu_period": (set_resource("cpu_period", 1), host(CpuPeriod=1)),
    "cpu_quota": (set_resource("cpu_quota", -1), host(CpuQuota=-1)),
    "cpu_shares": (set_resource("cpu_shares", 3), host(CpuShares=3)),
    "memory": (set_resource("memory_limit_in_bytes", 4), host(Memory=4)),
    "swap": (set_resource("memory_swap_limit_in_bytes", 5), host(MemorySwap=5)),
    "oom_score_adj": (set_resource("oom_score_adj", -999), host(OomScoreAdj=-999)),
    "cpuset_cpus": (set_resource("cpuset_cpus", "7"), host(CpusetCpus="7")),
    "cpuset_cpus, opened": (set_resource("cpuset_cpus", ""), host(CpusetCpus="")),
    "cpuset_mems": (set_resource("cpuset_mems", "1"), host(CpusetMems="1")),
    **{
        f"{name} {value!r} is not taken": (set_resource(name, value), NOTHING)
        for name, value in (
            ("cpu_period", 0),
            ("cpu_period", -1),
            ("cpu_quota", 0),
            ("cpu_shares", 0),
            ("cpu_shares", -1),
            ("memory_limit_in_bytes", 0),
            ("memory_limit_in_bytes", -1),
            ("memory_swap_limit_in_bytes", 0),
            ("memory_swap_limit_in_bytes", -1),
            ("oom_score_adj", -1001),
            ("oom_score_adj", 1001),
        )
    },
    "oom_score_adj, unset": (set_resource("oom_score_adj", 0), host(OomScoreAdj=0)),
    # Docker's API has no member for these.
    "unified": (
        lambda answer: answer.container_resources.unified.update({"memory.high": "9"}),
        NOTHING,
    ),
    "huge pages": (
        lambda answer: answer.container_resources.hugepage_limits.add(page_size="1GB", limit=1),
        NOTHING,
    ),
    "no resources": (lambda answer: answer.ClearField("container_resources"), NOTHING),
    "a cgroup parent": (
        lambda answer: setattr(answer, "pod_cgroup_parent", "/koord/other"),
        host(CgroupParent="/koord/other"),
    ),
    "an empty cgroup parent": (lambda answer: setattr(answer, "pod_cgroup_parent", ""), NOTHING),
    "a cgroup parent above the root": (
        lambda answer: setattr(answer, "pod_cgroup_parent", "/kubepods/../.."),
        NOTHING,
    ),
    "a cgroup parent with a zero byte": (
        lambda answer: setattr(answer, "pod_cgroup_parent", "/a\0b"),
        NOTHING,
    ),
    "a cgroup parent that is not a path": (
        lambda answer: setattr(answer, "pod_cgroup_parent", "/" + "x" * 4096),
        NOTHING,
    ),
    "a variable": (
        lambda answer: answer.container_envs.update({"Z": "26", "D": "4"}),
        env("A=1", "B=2", "BARE", "A=3", "C=a=b", "D=4", "Z=26"),
    ),
    "a variable's value, at its last place": (
        lambda answer: answer.container_envs.update({"A": "5", "C": ""}),
        env("A=1", "B=2", "BARE", "A=5", "C="),
    ),
    "a variable left out": (
        lambda answer: answer.container_envs.pop("B"),
        env("A=1", "BARE", "A=3", "C=a=b"),
    ),
    "a variable left out that is there twice": (
        lambda answer: answer.container_envs.pop("A"),
        env("B=2", "BARE", "C=a=b"),
    ),
    "a bare variable": (
        lambda answer: answer.container_envs.update({"BARE": "now"}),
        env("A=1", "B=2", "BARE=now", "A=3", "C=a=b"),
    ),
    "no variables": (lambda answer: answer.container_envs.clear(), NOTHING),
    # dockerd has labels, which are fixed at creation; annotations are for later hooks.
    "an annotation": (lambda answer: answer.container_annotations.update({"a": "b"}), NOTHING),
    "an annotation left out": (lambda answer: answer.container_annotations.clear(), NOTHING),
}


@pytest.mark.parametrize("name", AT_CREATION)
def test_an_answer_at_creation_changes_what_it_names_and_nothing_else(name: str) -> None:
    answer, change = AT_CREATION[name]
    expected = copy.deepcopy(CONTAINER)
    change(expected)
    world = World(ScriptedServer({Stage.PRE_CREATE_CONTAINER: answering(answer)}))
    run(world)
    sent = create(world)
    assert sent == (None if expected == CONTAINER else expected)


@pytest.mark.parametrize("name", AT_CREATION)
def test_what_a_hook_changed_is_what_the_next_one_is_sent(name: str) -> None:
    """The next server of the stage, and the next stage: the same as what dockerd was sent."""
    answer, _ = AT_CREATION[name]
    first = ScriptedServer({Stage.PRE_CREATE_CONTAINER: answering(answer)}, "1.json")
    second = ScriptedServer(
        {Stage.PRE_CREATE_CONTAINER: echo, Stage.PRE_START_CONTAINER: echo}, "2.json"
    )
    world = World(first, second)
    run(world)
    sent = create(world) or CONTAINER
    world.ask_docker("POST", "/containers/c1/start")
    assert len(second.asked) == 2
    for _, asked in second.asked:
        found = asked.container_resources
        assert {member: getattr(found, one) for member, one in MEMBERS.items()} == {
            member: sent["HostConfig"][member] for member in MEMBERS
        }
        assert asked.pod_cgroup_parent == sent["HostConfig"]["CgroupParent"]
        texts = (entry.partition("=") for entry in sent["Env"])
        assert asked.container_envs == {key: value for key, equals, value in texts if equals}
        added = {"a": "b"} if name == "an annotation" else {}
        assert asked.container_annotations == {"kept": "k", **added}


MEMBERS = {
    "CpuPeriod": "cpu_period",
    "CpuQuota": "cpu_quota",
    "CpuShares": "cpu_shares",
    "Memory": "memory_limit_in_bytes",
    "MemorySwap": "memory_swap_limit_in_bytes",
    "OomScoreAdj": "oom_score_adj",
    "CpusetCpus": "cpuset_cpus",
    "CpusetMems": "cpuset_mems",
}

AT_RUN: dict[str, tuple[Change, Change]] = {
    "nothing": (NOTHING, NOTHING),
    "a resource": (
        lambda answer: setattr(answer.resources, "cpu_shares", 77),
        host(CpuShares=77),
    ),
    "no resources": (lambda answer: answer.ClearField("resources"), NOTHING),
    # dockerd has labels alone, by which kubelet finds its pods.
    "a label": (lambda answer: answer.labels.update({"new": "l", "app": "other"}), NOTHING),
    "a label left out": (lambda answer: answer.labels.clear(), NOTHING),
    "an annotation": (lambda answer: answer.annotations.update({"note": "other"}), NOTHING),
    "an annotation left out": (lambda answer: answer.annotations.clear(), NOTHING),
    "a cgroup parent": (
        lambda answer: setattr(answer, "cgroup_parent", "/other"),
        host(CgroupParent="/other"),
    ),
    "an empty cgroup parent": (lambda answer: setattr(answer, "cgroup_parent", ""), NOTHING),
    "a cgroup parent above the root": (
        lambda answer: setattr(answer, "cgroup_parent", "/kubepods/../.."),
        NOTHING,
    ),
}


@pytest.mark.parametrize("name", AT_RUN)
def test_an_answer_for_a_sandbox_reaches_it_and_the_hooks_of_its_containers(name: str) -> None:
    answer, change = AT_RUN[name]
    expected = copy.deepcopy(SANDBOX)
    change(expected)
    server = ScriptedServer(
        {Stage.PRE_RUN_POD_SANDBOX: answering(answer), Stage.PRE_CREATE_CONTAINER: echo}
    )
    world = World(server)
    assert run(world) == (None if expected == SANDBOX else expected)
    create(world)
    (asked,) = server.requests(Stage.PRE_CREATE_CONTAINER)
    assert asked.pod_cgroup_parent == expected["HostConfig"]["CgroupParent"]
    assert asked.pod_resources.cpu_shares == expected["HostConfig"]["CpuShares"]
    assert asked.pod_labels == {"app": "web", "io.kubernetes.docker.type": "podsandbox"}
    assert asked.pod_annotations == {"note": "n"}


@pytest.mark.parametrize(
    ("driver", "kubelets", "hooks", "written"),
    [
        ("cgroupfs", "/kubepods/pod-u-1", "/koord/other", "/koord/other"),
        ("systemd", "kubepods-podu_1.slice", "/koord.slice/koord-x.slice", "koord-x.slice"),
        ("systemd", "kubepods-podu_1.slice", "/koord.slice/koord-x.slice/", "koord-x.slice"),
    ],
)
def test_a_sandboxes_cgroup_parent_moves_it_and_its_containers(
    driver: str, kubelets: str, hooks: str, written: str
) -> None:
    server = ScriptedServer(
        {
            Stage.PRE_RUN_POD_SANDBOX: answering(lambda a: setattr(a, "cgroup_parent", hooks)),
            Stage.PRE_CREATE_CONTAINER: echo,
        }
    )
    world = World(server, driver=driver)
    sandbox = copy.deepcopy(SANDBOX)
    sandbox["HostConfig"]["CgroupParent"] = kubelets
    moved = run(world, sandbox)
    assert moved["HostConfig"] == {**sandbox["HostConfig"], "CgroupParent": written}
    container = copy.deepcopy(CONTAINER)
    container["HostConfig"]["CgroupParent"] = kubelets
    assert create(world, container)["HostConfig"]["CgroupParent"] == written
    (asked,) = server.requests(Stage.PRE_CREATE_CONTAINER)
    assert asked.pod_cgroup_parent == hooks


def test_a_sandboxes_resources_are_a_hooks_to_change() -> None:
    def change(answer: Any) -> None:
        answer.resources.cpu_shares = 77
        answer.labels["new"] = "not taken"

    world = World(ScriptedServer({Stage.PRE_RUN_POD_SANDBOX: answering(change)}))
    expected = copy.deepcopy(SANDBOX)
    expected["HostConfig"]["CpuShares"] = 77
    assert run(world) == expected
    pod = world.store.pod("p1")
    assert pod is not None
    assert pod.resources is not None
    assert pod.resources.cpu_shares == 77
    assert "new" not in pod.labels


@pytest.mark.parametrize(
    ("asked", "answer", "sent"),
    [
        ({"CpuShares": 7}, NOTHING, None),
        ({"CpuShares": 7}, set_resource("cpu_shares", 8), {"CpuShares": 8}),
        ({"CpuShares": 7}, set_resource("cpu_quota", -1), {"CpuShares": 7, "CpuQuota": -1}),
        ({"X": 1}, set_resource("cpuset_cpus", ""), {"X": 1, "CpusetCpus": ""}),
        # dockerd takes this one at creation only.
        ({}, set_resource("oom_score_adj", 5), None),
    ],
)
def test_an_update_carries_what_was_asked_and_what_a_hook_changed(
    asked: dict[str, Any], answer: Change, sent: dict[str, Any] | None
) -> None:
    server = ScriptedServer({Stage.PRE_UPDATE_CONTAINER_RESOURCES: answering(answer)})
    world = ready(server)
    assert world.ask_docker("POST", "/containers/c1/update", asked, status=200) == sent
    ((_, seen),) = server.asked
    assert seen.container_resources.cpu_shares == asked.get("CpuShares", 512)
    assert seen.container_resources.memory_limit_in_bytes == 1 << 30
    # The next one begins with what dockerd accepted.
    world.ask_docker("POST", "/containers/c1/update", {}, status=500)
    ((_, _), (_, again)) = server.asked
    effective = {**asked, **(sent or {})}
    assert again.container_resources.cpu_shares == effective.get("CpuShares", 512)
    assert again.container_resources.cpuset_cpus == effective.get("CpusetCpus", "0-3")


STAGES: dict[Stage, Callable[[World], Any]] = {
    Stage.PRE_RUN_POD_SANDBOX: run,
    Stage.PRE_CREATE_CONTAINER: create,
    Stage.PRE_START_CONTAINER: lambda world: world.ask_docker("POST", "/containers/c1/start"),
    Stage.PRE_UPDATE_CONTAINER_RESOURCES: lambda world: world.ask_docker(
        "POST", "/containers/c1/update", {"CpuShares": 1}
    ),
}


def fails(request: Any) -> HookError:
    return HookError("/run/scripted.sock: out of order")


def given_up(request: Any) -> HookError:
    return GivenUp("/run/scripted.sock: connection refused")


def unreadable(request: Any) -> bytes:
    return b"\xff\xff\xff"


def huge(request: Any) -> Any:
    return answering(
        lambda answer: (
            answer.resources if hasattr(answer, "resources") else answer.container_resources
        ).unified.update({"x": "y" * (1 << 18)})
    )(request)


FAILURES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an error": (fails, "out of order"),
    "a server that is given up": (given_up, "connection refused"),
    "an unreadable answer": (unreadable, "is unreadable"),
    "a huge answer": (huge, "is too large"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("stage", STAGES)
def test_without_an_answer_the_policy_decides(name: str, stage: Stage) -> None:
    answer, reason = FAILURES[name]
    ignoring = ScriptedServer({stage: answer})
    assert STAGES[stage](ready(ignoring)) is None
    failing = ScriptedServer({stage: answer}, fail=True)
    refused = STAGES[stage](ready(failing))
    assert isinstance(refused, Refusal)
    assert refused.text.startswith("/run/scripted.sock: ")
    assert reason in refused.text
    assert len(ignoring.asked) == len(failing.asked) == 1


def test_what_kubelet_sends_is_never_too_large() -> None:
    large = copy.deepcopy(CONTAINER)
    large["Labels"]["annotation.x"] = "y" * (1 << 18)
    server = ScriptedServer({Stage.PRE_CREATE_CONTAINER: echo}, fail=True)
    world = World(server)
    run(world)
    assert create(world, large) is None
    server.answers = {
        Stage.PRE_CREATE_CONTAINER: answering(
            lambda answer: answer.container_annotations.update({"one": "more"})
        )
    }
    assert isinstance(create(world, large), Refusal)


def test_a_container_of_an_unknown_sandbox_goes_on_and_is_counted() -> None:
    server = ScriptedServer({Stage.PRE_CREATE_CONTAINER: echo})
    world = World(server)
    assert create(world) is None
    assert server.asked == []
    assert world.hooks.skipped.unknown_object == 1


@pytest.mark.parametrize("name", CALLS)
def test_a_call_about_an_unknown_container_goes_on(name: str) -> None:
    """One of an unknown sandbox is counted; most others that dockerd has are not Kubernetes'."""
    stage, method, target, document = CALLS[name]
    server = ScriptedServer({stage: echo})
    world = World(server)
    assert world.ask_docker(method, target, document) is None
    assert world.hooks.skipped.unknown_object == 0
    world.store.put_container(Container(id="c1", pod_id="gone"))
    assert world.ask_docker(method, target, document) is None
    asked_before = name in ("start", "started", "update")
    assert world.hooks.skipped.unknown_object == int(asked_before)
    assert server.asked == []


def test_the_store_has_what_dockerd_accepted() -> None:
    world = ready()
    assert world.store.pod("p1") == Pod(
        id="p1",
        meta=PodMeta(name="web-0", uid="u-1", namespace="prod", attempt=3),
        runtime_handler="docker",
        labels={"app": "web", "io.kubernetes.docker.type": "podsandbox"},
        annotations={"note": "n"},
        cgroup_parent="/kubepods/pod-u-1",
        resources=Resources(cpu_shares=2),
        changes=PodChanges(),
    )
    assert world.store.container("c1") == Container(
        id="c1",
        pod_id="p1",
        name="main",
        attempt=2,
        annotations={"kept": "k"},
        resources=Resources(**{name: CONTAINER["HostConfig"][at] for at, name in MEMBERS.items()}),
        cgroup_parent="/kubepods/pod-u-1",
        envs={"A": "3", "B": "2", "C": "a=b"},
    )


@pytest.mark.parametrize("stage", STAGES)
def test_the_label_keeps_hooks_away(stage: Stage) -> None:
    server = ScriptedServer({stage: answering(set_nothing)})
    world = World(server)
    labelled = copy.deepcopy(SANDBOX)
    labelled["Labels"]["skip"] = "true"
    assert run(world, labelled) is None
    assert create(world) is None
    STAGES[stage](world) if stage is not Stage.PRE_RUN_POD_SANDBOX else None
    assert server.asked == []
    assert world.hooks.skipped.labelled > 0


def set_nothing(answer: Any) -> None:
    """An echo."""


@pytest.mark.parametrize("document", [[], "text", None, 5])
def test_a_body_that_is_no_object_goes_on_as_it_is(document: Any) -> None:
    server = ScriptedServer({Stage.PRE_RUN_POD_SANDBOX: echo})
    world = World(server)
    assert run(world, document) is None
    assert server.asked == []
    assert world.hooks.skipped.unreadable == 1


@pytest.mark.parametrize("answer", [{"Id": ""}, {"Id": 5}, {}, None])
def test_an_answer_without_an_id_stores_nothing(answer: Any) -> None:
    world = World()
    world.ask_docker(
        "POST",
        "/containers/create?name=k8s_POD_web-0_prod_u-1_3",
        SANDBOX,
        status=201,
        answer=answer,
    )
    assert world.store.sizes == (0, 0)


def test_what_a_hook_changes_at_a_start_counts_once_dockerd_has_started_it() -> None:
    server = ScriptedServer(
        {
            Stage.PRE_START_CONTAINER: answering(set_resource("cpu_shares", 9)),
            Stage.PRE_UPDATE_CONTAINER_RESOURCES: echo,
        }
    )
    world = ready(server)
    for status, shares in ((500, 512), (204, 9)):
        world.ask_docker("POST", "/containers/c1/start", status=status)
        world.ask_docker("POST", "/containers/c1/update", {}, status=500)
        asked = server.requests(Stage.PRE_UPDATE_CONTAINER_RESOURCES)[-1]
        assert asked.container_resources.cpu_shares == shares
