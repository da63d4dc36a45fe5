"""Docker mode: what hooks are sent for each call, and what of their answers reaches dockerd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from protos.runtimehook.v1alpha1 import api_pb2 as hook
from runtime_proxy.docker.intercept import Refusal
from runtime_proxy.hook_server import HookError
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
    "zeros": (set_resource("cpu_shares", 0), NOTHING),
    "no resources": (lambda answer: answer.ClearField("container_resources"), NOTHING),
    "a cgroup parent": (
        lambda answer: setattr(answer, "pod_cgroup_parent", "/koord/other"),
        host(CgroupParent="/koord/other"),
    ),
    "an empty cgroup parent": (lambda answer: setattr(answer, "pod_cgroup_parent", ""), NOTHING),
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


@pytest.mark.parametrize("stage", STAGES)
def test_without_an_answer_the_policy_decides(stage: Stage) -> None:
    def fails(request: Any) -> HookError:
        return HookError("/run/scripted.sock: out of order")

    assert STAGES[stage](ready(ScriptedServer({stage: fails}))) is None
    refused = STAGES[stage](ready(ScriptedServer({stage: fails}, fail=True)))
    assert refused == Refusal("/run/scripted.sock: out of order")


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
