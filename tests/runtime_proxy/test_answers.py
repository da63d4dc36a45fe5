"""What hooks are sent for each CRI call, and what of their answers reaches the runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protos.cri.v1 import api_pb2 as cri
from protos.runtimehook.v1alpha1 import api_pb2 as hook
from runtime_proxy.hook_server import GivenUp, HookError
from runtime_proxy.http2.grpc import Code, Status
from runtime_proxy.model import Container, Pod, PodChanges, PodMeta, Resources
from runtime_proxy.stages import Stage
from tests.runtime_proxy.processes import answering, echo
from tests.runtime_proxy.scripted import ScriptedServer, World

SANDBOX = cri.PodSandboxConfig(
    metadata=cri.PodSandboxMetadata(name="web-0", uid="u-1", namespace="prod", attempt=3),
    labels={"app": "web", "io.kubernetes.pod.name": "web-0"},
    annotations={"note": "n"},
    linux=cri.LinuxPodSandboxConfig(
        cgroup_parent="/kubepods/pod-u-1",
        overhead=cri.LinuxContainerResources(cpu_shares=11),
        resources=cri.LinuxContainerResources(cpu_shares=12, unified={"memory.high": "1"}),
    ),
)
RESOURCES = cri.LinuxContainerResources(
    cpu_period=100_000,
    cpu_quota=50_000,
    cpu_shares=512,
    memory_limit_in_bytes=1 << 30,
    oom_score_adj=900,
    cpuset_cpus="0-3",
    cpuset_mems="0",
    hugepage_limits=[cri.HugepageLimit(page_size="2MB", limit=4096)],
    unified={"memory.min": "5"},
    memory_swap_limit_in_bytes=1 << 31,
)
CONTAINER = cri.ContainerConfig(
    metadata=cri.ContainerMetadata(name="main", attempt=2),
    image=cri.ImageSpec(image="busybox"),
    envs=[
        cri.KeyValue(key="A", value=b"1"),
        cri.KeyValue(key="B", value=b"2"),
        cri.KeyValue(key="A", value=b"3"),
        cri.KeyValue(key="RAW", value=b"\xff"),
    ],
    annotations={"kept": "k"},
    linux=cri.LinuxContainerConfig(resources=RESOURCES),
)
CREATE = cri.CreateContainerRequest(pod_sandbox_id="p1", config=CONTAINER, sandbox_config=SANDBOX)


def run(world: World) -> Any:
    return world.call(
        "RunPodSandbox",
        cri.RunPodSandboxRequest(config=SANDBOX, runtime_handler="kata"),
        cri.RunPodSandboxResponse(pod_sandbox_id="p1"),
    )


def create(world: World, request: cri.CreateContainerRequest = CREATE) -> Any:
    return world.call("CreateContainer", request, cri.CreateContainerResponse(container_id="c1"))


def ready(*servers: ScriptedServer) -> World:
    """Return a world with the sandbox p1 and the container c1 in it."""
    world = World(*servers)
    quiet = [server.answers for server in servers]
    for server in servers:
        server.answers = {}
    run(world)
    create(world)
    for server, answers in zip(servers, quiet, strict=True):
        server.answers = answers
    return world


def hook_resources(resources: cri.LinuxContainerResources) -> hook.LinuxContainerResources:
    """The same resources for a hook: the fields have the same numbers."""
    return hook.LinuxContainerResources.FromString(resources.SerializeToString())


POD_META = hook.PodSandboxMetadata(name="web-0", uid="u-1", namespace="prod", attempt=3)


def test_a_hook_is_sent_all_of_a_sandbox() -> None:
    server = ScriptedServer({Stage.PRE_RUN_POD_SANDBOX: echo})
    run(World(server))
    assert server.asked == [
        (
            Stage.PRE_RUN_POD_SANDBOX,
            hook.PodSandboxHookRequest(
                pod_meta=POD_META,
                runtime_handler="kata",
                labels=SANDBOX.labels,
                annotations=SANDBOX.annotations,
                cgroup_parent="/kubepods/pod-u-1",
                overhead=hook_resources(SANDBOX.linux.overhead),
                resources=hook_resources(SANDBOX.linux.resources),
            ),
        )
    ]


def container_request(**fields: Any) -> hook.ContainerResourceHookRequest:
    return hook.ContainerResourceHookRequest(
        **{
            "pod_meta": POD_META,
            "container_meta": hook.ContainerMetadata(name="main", attempt=2, id="c1"),
            "container_annotations": CONTAINER.annotations,
            "container_resources": hook_resources(RESOURCES),
            "pod_resources": hook_resources(SANDBOX.linux.resources),
            "pod_annotations": SANDBOX.annotations,
            "pod_labels": SANDBOX.labels,
            "pod_cgroup_parent": "/kubepods/pod-u-1",
            # The last of a name counts, and what is not UTF-8 cannot be sent.
            "container_envs": {"A": "3", "B": "2"},
            **fields,
        }
    )


def test_a_hook_is_sent_all_of_a_container() -> None:
    server = ScriptedServer({Stage.PRE_CREATE_CONTAINER: echo})
    world = World(server)
    run(world)
    create(world)
    no_id = hook.ContainerMetadata(name="main", attempt=2)
    assert server.asked == [(Stage.PRE_CREATE_CONTAINER, container_request(container_meta=no_id))]


CALLS: dict[str, tuple[Stage, str, Any]] = {
    "start": (
        Stage.PRE_START_CONTAINER,
        "StartContainer",
        cri.StartContainerRequest(container_id="c1"),
    ),
    "started": (
        Stage.POST_START_CONTAINER,
        "StartContainer",
        cri.StartContainerRequest(container_id="c1"),
    ),
    "update": (
        Stage.PRE_UPDATE_CONTAINER_RESOURCES,
        "UpdateContainerResources",
        cri.UpdateContainerResourcesRequest(container_id="c1"),
    ),
    "stop": (
        Stage.POST_STOP_CONTAINER,
        "StopContainer",
        cri.StopContainerRequest(container_id="c1"),
    ),
    "stop, by a beginning of the id": (
        Stage.POST_STOP_CONTAINER,
        "StopContainer",
        cri.StopContainerRequest(container_id="c"),
    ),
    "remove a running one": (
        Stage.POST_STOP_CONTAINER,
        "RemoveContainer",
        cri.RemoveContainerRequest(container_id="c1"),
    ),
    "stop its sandbox": (
        Stage.POST_STOP_CONTAINER,
        "StopPodSandbox",
        cri.StopPodSandboxRequest(pod_sandbox_id="p1"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_hook_of_each_later_stage_is_sent_the_same_container(name: str) -> None:
    stage, method, request = CALLS[name]
    server = ScriptedServer({stage: echo})
    world = ready(server)
    assert world.call(method, request, cri.StartContainerResponse()) == request
    assert server.asked == [(stage, container_request())]
    # An end is reported once; an update or a start is one each time.
    world.call(method, request, cri.StartContainerResponse())
    ends = stage is Stage.POST_STOP_CONTAINER
    assert len(server.asked) == (1 if ends else 2)


POD_CALLS: dict[str, tuple[Stage, str, Any]] = {
    "stop": (
        Stage.POST_STOP_POD_SANDBOX,
        "StopPodSandbox",
        cri.StopPodSandboxRequest(pod_sandbox_id="p1"),
    ),
    "remove a running one": (
        Stage.POST_STOP_POD_SANDBOX,
        "RemovePodSandbox",
        cri.RemovePodSandboxRequest(pod_sandbox_id="p1"),
    ),
    "remove": (
        Stage.PRE_REMOVE_POD_SANDBOX,
        "RemovePodSandbox",
        cri.RemovePodSandboxRequest(pod_sandbox_id="p1"),
    ),
    "resize": (
        Stage.PRE_UPDATE_POD_SANDBOX_RESOURCES,
        "UpdatePodSandboxResources",
        cri.UpdatePodSandboxResourcesRequest(pod_sandbox_id="p1"),
    ),
}


@pytest.mark.parametrize("name", POD_CALLS)
def test_a_hook_of_each_later_stage_is_sent_the_same_sandbox(name: str) -> None:
    stage, method, request = POD_CALLS[name]
    server = ScriptedServer({stage: echo})
    world = ready(server)
    assert world.call(method, request, cri.StopPodSandboxResponse()) == request
    ((asked, sent),) = server.asked
    assert asked is stage
    assert (sent.pod_meta, sent.labels, sent.annotations) == (
        POD_META,
        SANDBOX.labels,
        SANDBOX.annotations,
    )
    assert sent.cgroup_parent == "/kubepods/pod-u-1"
    assert sent.runtime_handler == "kata"
    assert sent.overhead == hook_resources(SANDBOX.linux.overhead)
    assert sent.resources == hook_resources(SANDBOX.linux.resources)
    if "remove" in name:
        assert world.store.sizes == (0, 0)


def changed(request: Any, change: Callable[[Any], object]) -> Any:
    copy = type(request)()
    copy.CopyFrom(request)
    change(copy)
    return copy


def set_resource(name: str, value: object) -> Callable[[Any], object]:
    return lambda answer: setattr(answer.container_resources, name, value)


def at_create(name: str, value: object) -> Callable[[Any], object]:
    return lambda request: setattr(request.config.linux.resources, name, value)


NOTHING: Callable[[Any], object] = lambda request: None  # noqa: E731 - a table's cell


def envs(*pairs: tuple[str, bytes]) -> Callable[[Any], object]:
    def change(request: Any) -> None:
        del request.config.envs[:]
        request.config.envs.extend(cri.KeyValue(key=key, value=value) for key, value in pairs)

    return change


AT_CREATION: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "nothing": (NOTHING, NOTHING),
    **{
        f"{name} {value!r}": (set_resource(name, value), at_create(name, value))
        for name, value in (
            ("cpu_period", 1),
            ("cpu_quota", -1),
            ("cpu_quota", 1),
            ("cpu_shares", 1),
            ("memory_limit_in_bytes", 1),
            ("memory_swap_limit_in_bytes", 1),
            ("oom_score_adj", 0),
            ("oom_score_adj", -1000),
            ("oom_score_adj", 1000),
            ("cpuset_cpus", ""),
            ("cpuset_cpus", "7"),
            ("cpuset_mems", ""),
            ("cpuset_mems", "1"),
        )
    },
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
    "unified, by key": (
        lambda answer: answer.container_resources.unified.update({"memory.high": "9"}),
        lambda request: request.config.linux.resources.unified.update({"memory.high": "9"}),
    ),
    "unified, a value": (
        lambda answer: answer.container_resources.unified.update({"memory.min": "6"}),
        lambda request: request.config.linux.resources.unified.update({"memory.min": "6"}),
    ),
    "unified, a key left out": (
        lambda answer: answer.container_resources.unified.clear(),
        NOTHING,
    ),
    "huge pages": (
        lambda answer: answer.container_resources.hugepage_limits.add(page_size="1GB", limit=1),
        NOTHING,
    ),
    "no resources": (lambda answer: answer.ClearField("container_resources"), NOTHING),
    "an annotation": (
        lambda answer: answer.container_annotations.update({"new": "n"}),
        lambda request: request.config.annotations.update({"new": "n"}),
    ),
    "an annotation's value": (
        lambda answer: answer.container_annotations.update({"kept": "other"}),
        lambda request: request.config.annotations.update({"kept": "other"}),
    ),
    "an annotation made empty": (
        lambda answer: answer.container_annotations.update({"kept": ""}),
        lambda request: request.config.annotations.update({"kept": ""}),
    ),
    "an annotation left out": (lambda answer: answer.container_annotations.clear(), NOTHING),
    "a cgroup parent": (
        lambda answer: setattr(answer, "pod_cgroup_parent", "/other"),
        lambda request: setattr(request.sandbox_config.linux, "cgroup_parent", "/other"),
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
        lambda answer: answer.container_envs.update({"Z": "26", "C": "4"}),
        envs(("A", b"1"), ("B", b"2"), ("A", b"3"), ("RAW", b"\xff"), ("C", b"4"), ("Z", b"26")),
    ),
    "a variable's value, at its last place": (
        lambda answer: answer.container_envs.update({"A": "5"}),
        envs(("A", b"1"), ("B", b"2"), ("A", b"5"), ("RAW", b"\xff")),
    ),
    "a variable that cannot be sent": (
        lambda answer: answer.container_envs.update({"RAW": "text"}),
        envs(("A", b"1"), ("B", b"2"), ("A", b"3"), ("RAW", b"text")),
    ),
    "a variable left out": (
        lambda answer: answer.container_envs.pop("B"),
        envs(("A", b"1"), ("A", b"3"), ("RAW", b"\xff")),
    ),
    "a variable left out that is there twice": (
        lambda answer: answer.container_envs.pop("A"),
        envs(("B", b"2"), ("RAW", b"\xff")),
    ),
    "no variables": (lambda answer: answer.container_envs.clear(), NOTHING),
}


@pytest.mark.parametrize("name", AT_CREATION)
def test_an_answer_at_creation_changes_what_it_names_and_nothing_else(name: str) -> None:
    answer, expected = AT_CREATION[name]
    world = World(ScriptedServer({Stage.PRE_CREATE_CONTAINER: answering(answer)}))
    run(world)
    assert create(world) == changed(CREATE, expected)


@pytest.mark.parametrize("name", AT_CREATION)
def test_what_a_hook_changed_is_what_the_next_one_is_sent(name: str) -> None:
    """The next server of the stage, and the next stage: the same as what the runtime was sent."""
    answer, _ = AT_CREATION[name]
    first = ScriptedServer({Stage.PRE_CREATE_CONTAINER: answering(answer)}, "1.json")
    second = ScriptedServer(
        {Stage.PRE_CREATE_CONTAINER: echo, Stage.PRE_START_CONTAINER: echo}, "2.json"
    )
    world = World(first, second)
    run(world)
    sent = create(world)
    world.call(
        "StartContainer", cri.StartContainerRequest(container_id="c1"), cri.StartContainerResponse()
    )
    for _, asked in second.asked:
        config = sent.config
        assert asked.container_annotations == config.annotations
        assert asked.container_resources == hook_resources(config.linux.resources)
        assert asked.pod_cgroup_parent == sent.sandbox_config.linux.cgroup_parent
        texts = {env.key: env.value for env in config.envs if env.value != b"\xff"}
        assert asked.container_envs == {key: value.decode() for key, value in texts.items()}
    assert len(second.asked) == 2


AT_RUN: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "nothing": (NOTHING, NOTHING),
    "a label": (
        lambda answer: answer.labels.update({"new": "l"}),
        lambda config: config.labels.update({"new": "l"}),
    ),
    "a label's value": (
        lambda answer: answer.labels.update({"app": "other"}),
        lambda config: config.labels.update({"app": "other"}),
    ),
    "a label of kubelet's": (
        lambda answer: answer.labels.update({"io.kubernetes.pod.name": "other"}),
        NOTHING,
    ),
    "a label left out": (lambda answer: answer.labels.clear(), NOTHING),
    "an annotation": (
        lambda answer: answer.annotations.update({"new": "a", "note": "other"}),
        lambda config: config.annotations.update({"new": "a", "note": "other"}),
    ),
    "an annotation left out": (lambda answer: answer.annotations.clear(), NOTHING),
    "a cgroup parent": (
        lambda answer: setattr(answer, "cgroup_parent", "/other"),
        lambda config: setattr(config.linux, "cgroup_parent", "/other"),
    ),
    "an empty cgroup parent": (lambda answer: setattr(answer, "cgroup_parent", ""), NOTHING),
    "resources": (lambda answer: setattr(answer.resources, "cpu_shares", 1), NOTHING),
}


@pytest.mark.parametrize("name", AT_RUN)
def test_an_answer_for_a_sandbox_reaches_it_and_its_containers(name: str) -> None:
    answer, expected = AT_RUN[name]
    world = World(ScriptedServer({Stage.PRE_RUN_POD_SANDBOX: answering(answer)}))
    config = changed(SANDBOX, expected)
    assert run(world).config == config
    assert create(world).sandbox_config == config
    pod, container = world.store.pod("p1"), world.store.container("c1")
    assert pod is not None
    assert container is not None
    assert (pod.labels, pod.annotations) == (dict(config.labels), dict(config.annotations))
    assert pod.cgroup_parent == container.cgroup_parent == config.linux.cgroup_parent


AT_UPDATE: dict[str, tuple[dict[str, Any], Callable[[Any], object], dict[str, Any]]] = {
    "kubelet's alone": ({"cpu_shares": 7}, NOTHING, {"cpu_shares": 7}),
    "a hook's beside it": (
        {"cpu_shares": 7},
        set_resource("cpu_quota", 9),
        {"cpu_shares": 7, "cpu_quota": 9},
    ),
    "a hook's in its place": ({"cpu_shares": 7}, set_resource("cpu_shares", 8), {"cpu_shares": 8}),
    "a cpuset that a hook opens": ({}, set_resource("cpuset_cpus", ""), {}),
    "a cpuset that a hook sets": ({}, set_resource("cpuset_cpus", "1"), {"cpuset_cpus": "1"}),
    "unified": (
        {"unified": {"a": "1"}},
        lambda answer: answer.container_resources.unified.update({"b": "2"}),
        {"unified": {"a": "1", "b": "2"}},
    ),
}


@pytest.mark.parametrize("name", AT_UPDATE)
def test_an_update_of_one_field_stays_one(name: str) -> None:
    asked, answer, expected = AT_UPDATE[name]
    server = ScriptedServer({Stage.PRE_UPDATE_CONTAINER_RESOURCES: answering(answer)})
    world = ready(server)
    request = cri.UpdateContainerResourcesRequest(
        container_id="c1", linux=cri.LinuxContainerResources(**asked)
    )
    sent: Any = world.call(
        "UpdateContainerResources", request, cri.UpdateContainerResourcesResponse()
    )
    assert sent.linux == cri.LinuxContainerResources(**expected)
    # The hook is sent all that holds, not only what kubelet named.
    ((_, seen),) = server.asked
    held = changed(RESOURCES, lambda resources: resources.MergeFrom(request.linux))
    assert seen.container_resources == hook_resources(held)


def test_an_update_that_the_runtime_refuses_is_not_remembered() -> None:
    world = ready(ScriptedServer({Stage.PRE_UPDATE_CONTAINER_RESOURCES: echo}))
    before = world.store.container("c1")
    request = cri.UpdateContainerResourcesRequest(
        container_id="c1", linux=cri.LinuxContainerResources(cpu_shares=7)
    )
    world.call("UpdateContainerResources", request)
    assert world.store.container("c1") == before
    world.call("UpdateContainerResources", request, cri.UpdateContainerResourcesResponse())
    after = world.store.container("c1")
    assert after is not None
    assert after.resources is not None
    assert after.resources.cpu_shares == 7


REFUSED = [Stage.PRE_RUN_POD_SANDBOX, Stage.PRE_CREATE_CONTAINER, Stage.PRE_START_CONTAINER]


def fails(request: Any) -> HookError:
    return HookError("/run/scripted.sock: out of order")


def given_up(request: Any) -> HookError:
    return GivenUp("/run/scripted.sock: connection refused")


def unreadable(request: Any) -> bytes:
    return b"\xff\xff\xff"


def huge(request: Any) -> Any:
    return answering(
        lambda answer: (
            answer.labels if "labels" in answer.DESCRIPTOR.fields_by_name else answer.container_envs
        ).update({"x": "y" * (1 << 18)})
    )(request)


FAILURES: dict[str, tuple[Any, str]] = {
    "an error": (fails, "out of order"),
    "a server that is given up": (given_up, "connection refused"),
    "an unreadable answer": (unreadable, "is unreadable"),
    "a huge answer": (huge, "is too large"),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("stage", REFUSED)
def test_without_an_answer_the_policy_decides(name: str, stage: Stage) -> None:
    answer, reason = FAILURES[name]
    calls: dict[Stage, Callable[[World], Any]] = {
        Stage.PRE_RUN_POD_SANDBOX: run,
        Stage.PRE_CREATE_CONTAINER: create,
        Stage.PRE_START_CONTAINER: lambda world: world.call(
            "StartContainer", cri.StartContainerRequest(container_id="c1")
        ),
    }
    ignoring = ScriptedServer({stage: answer})
    world = ready(ignoring)
    assert not isinstance(calls[stage](world), Status)
    failing = ScriptedServer({stage: answer}, fail=True)
    refused = calls[stage](ready(failing))
    assert isinstance(refused, Status)
    assert refused.code == Code.UNKNOWN
    assert refused.message.startswith("hook server err: /run/scripted.sock: ")
    assert reason in refused.message
    assert len(ignoring.asked) == len(failing.asked) == 1


def test_what_kubelet_sends_is_never_too_large() -> None:
    large = changed(CREATE, lambda r: r.config.annotations.update({"x": "y" * (1 << 18)}))
    server = ScriptedServer({Stage.PRE_CREATE_CONTAINER: echo}, fail=True)
    world = World(server)
    run(world)
    assert create(world, large) == large
    server.answers = {
        Stage.PRE_CREATE_CONTAINER: answering(
            lambda answer: answer.container_annotations.update({"one": "more"})
        )
    }
    assert isinstance(create(world, large), Status)


@pytest.mark.parametrize("labelled", [True, False])
def test_the_label_keeps_hooks_away(labelled: bool) -> None:
    server = ScriptedServer(dict.fromkeys(Stage, echo))
    world = World(server)
    config = changed(SANDBOX, lambda c: c.labels.update({"skip": "true" if labelled else "no"}))
    answer = cri.RunPodSandboxResponse(pod_sandbox_id="p1")
    world.call("RunPodSandbox", cri.RunPodSandboxRequest(config=config), answer)
    create(world)
    for _, method, request in [*CALLS.values(), *POD_CALLS.values()]:
        world.call(method, request, cri.StartContainerResponse())
    assert bool(server.asked) is not labelled
    assert bool(world.hooks.skipped.labelled) is labelled


def test_a_container_of_an_unknown_sandbox_goes_on_and_is_counted() -> None:
    server = ScriptedServer({Stage.PRE_CREATE_CONTAINER: echo})
    world = World(server)
    assert create(world) == CREATE
    assert server.asked == []
    assert world.hooks.skipped.unknown_object == 1


def test_the_store_has_what_the_runtime_accepted() -> None:
    world = ready()
    resources = Resources(
        cpu_period=100_000,
        cpu_quota=50_000,
        cpu_shares=512,
        memory_limit_in_bytes=1 << 30,
        oom_score_adj=900,
        cpuset_cpus="0-3",
        cpuset_mems="0",
        hugepage_limits=(("2MB", 4096),),
        unified={"memory.min": "5"},
        memory_swap_limit_in_bytes=1 << 31,
    )
    assert world.store.pod("p1") == Pod(
        id="p1",
        meta=PodMeta(name="web-0", uid="u-1", namespace="prod", attempt=3),
        runtime_handler="kata",
        labels=dict(SANDBOX.labels),
        annotations={"note": "n"},
        cgroup_parent="/kubepods/pod-u-1",
        overhead=Resources(cpu_shares=11),
        resources=Resources(cpu_shares=12, unified={"memory.high": "1"}),
        changes=PodChanges(),
    )
    assert world.store.container("c1") == Container(
        id="c1",
        pod_id="p1",
        name="main",
        attempt=2,
        annotations={"kept": "k"},
        resources=resources,
        cgroup_parent="/kubepods/pod-u-1",
        envs={"A": "3", "B": "2"},
    )


@pytest.mark.parametrize(
    ("method", "request_"),
    [(method, request) for _, method, request in CALLS.values() if "Start" in method]
    + [(method, request) for _, method, request in CALLS.values() if "Update" in method],
)
def test_a_call_about_an_unknown_container_goes_on_and_is_counted(
    method: str, request_: Any
) -> None:
    stages = (Stage.PRE_START_CONTAINER, Stage.PRE_UPDATE_CONTAINER_RESOURCES)
    server = ScriptedServer(dict.fromkeys(stages, echo))
    world = World(server)
    assert world.call(method, request_, cri.StartContainerResponse()) == request_
    assert world.hooks.skipped.unknown_object == 1
    # A container whose sandbox is unknown.
    world.store.put_container(Container(id="c1", pod_id="gone"))
    assert world.call(method, request_, cri.StartContainerResponse()) == request_
    assert world.hooks.skipped.unknown_object == 2
    assert server.asked == []


def test_a_variable_whose_last_value_cannot_be_sent_is_not_sent_at_all() -> None:
    server = ScriptedServer({Stage.PRE_CREATE_CONTAINER: echo})
    world = World(server)
    run(world)
    pairs = (("A", b"text"), ("B", b"1"), ("A", b"\xff"))
    request = changed(CREATE, envs(*pairs))
    assert create(world, request) == request
    ((_, sent),) = server.asked
    assert sent.container_envs == {"B": "1"}
