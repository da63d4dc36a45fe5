"""The fake runtime's own rules: registration checks, the fallback to StateChange, merging."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from nri_plugin.connection import Connection
from nri_plugin.ttrpc import Call, Code, RpcError
from protos.nri.v1alpha1 import nri_pb2 as nri
from tests.fake_runtime import profiles
from tests.fake_runtime.adaptation import RUNTIME, EventFailed, FakeRuntime
from tests.fake_runtime.merge import Conflict, Owners, merge_adjustment
from tests.fake_runtime.profiles import Profile


async def register(
    runtime: FakeRuntime, serve: Callable[[Call], bytes], name: str = "p", index: str = "10"
) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(
        lambda: Connection(serve), runtime.socket_path
    )
    request = nri.RegisterPluginRequest(plugin_name=name, plugin_idx=index)
    await connection.call(RUNTIME, "RegisterPlugin", request.SerializeToString(), timeout_s=5.0)
    return connection


def configured(mask: int, other: Callable[[Call], bytes]) -> Callable[[Call], bytes]:
    def serve(call: Call) -> bytes:
        if call.method == "Configure":
            return nri.ConfigureResponse(events=mask).SerializeToString()
        if call.method == "Synchronize":
            return b""
        return other(call)

    return serve


@pytest.mark.parametrize(
    ("profile", "mask", "taken"),
    [
        (profiles.A, 0x7FF, True),
        (profiles.A, 0x800, False),
        (profiles.B, 0x3FFF, False),
        (profiles.C, 0x3FFF, True),
        (profiles.D, 0x4000, False),
    ],
)
def test_a_bit_outside_the_valid_mask_closes_the_plugin(
    tmp_path: Path, profile: Profile, mask: int, taken: bool
) -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profile)
        async with runtime.running():
            connection = await register(runtime, configured(mask, lambda call: b""))
            if taken:
                (plugin,) = await runtime.synchronized()
                assert plugin.events == mask
            else:
                await asyncio.wait_for(connection.closed, 5)
                assert "invalid plugin events" in runtime.failures[0]

    asyncio.run(scenario())


@pytest.mark.parametrize("index", ["1", "100", "ab", ""])
def test_an_index_is_two_digits(tmp_path: Path, index: str) -> None:
    async def scenario() -> None:
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.A)
        async with runtime.running():
            with pytest.raises(RpcError, match="invalid plugin index"):
                await register(runtime, configured(1, lambda call: b""), index=index)

    asyncio.run(scenario())


def test_an_unimplemented_event_makes_the_runtime_fall_back_for_good(tmp_path: Path) -> None:
    methods: list[str] = []

    def old_plugin(call: Call) -> bytes:
        methods.append(call.method)
        if call.method != "StateChange":
            raise RpcError(Code.UNIMPLEMENTED, f"method {call.method}")
        return b""

    async def scenario() -> None:
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.D)
        async with runtime.running():
            await register(runtime, configured(0x7, old_plugin))
            await runtime.synchronized()
            await runtime.run_pod_sandbox(nri.PodSandbox(id="p"))
            await runtime.remove_pod_sandbox("p")
        assert methods == ["RunPodSandbox", "StateChange", "StateChange", "StateChange"]

    asyncio.run(scenario())


def test_an_error_fails_the_event_and_keeps_the_plugin(tmp_path: Path) -> None:
    def failing(call: Call) -> bytes:
        raise RpcError(Code.DEADLINE_EXCEEDED, "my own")

    async def scenario() -> None:
        runtime = FakeRuntime(str(tmp_path / "nri.sock"), profiles.B)
        async with runtime.running():
            await register(runtime, configured(0x8, failing))
            await runtime.synchronized()
            with pytest.raises(EventFailed, match="my own"):
                await runtime.create_container(nri.Container(id="c"))
            assert len(runtime.plugins) == 1

    asyncio.run(scenario())


def merged(profile: Profile, *adjustments: nri.ContainerAdjustment) -> nri.ContainerAdjustment:
    request = nri.CreateContainerRequest(container=nri.Container(id="c", env=["A=0"]))
    result, owners = nri.ContainerAdjustment(), Owners(profile)
    for number, adjust in enumerate(adjustments):
        merge_adjustment(request, adjust, result, owners, f"{number}0-p{number}")
    return result


def environment(key: str) -> nri.ContainerAdjustment:
    return nri.ContainerAdjustment(env=[nri.KeyValue(key=key, value="1")])


def test_a_variable_that_a_plugin_removed_is_hidden_from_the_next_one() -> None:
    request = nri.CreateContainerRequest(container=nri.Container(id="c", env=["A=0", "AB=1"]))
    removal = nri.ContainerAdjustment(env=[nri.KeyValue(key="-A")])
    merge_adjustment(request, removal, nri.ContainerAdjustment(), Owners(profiles.D), "00-p")
    assert list(request.container.env) == ["AB=1"]


def test_an_annotation_that_a_plugin_removed_is_hidden_and_its_mark_reaches_the_runtime() -> None:
    container = nri.Container(id="c", annotations={"a": "0", "b": "1"})
    request = nri.CreateContainerRequest(container=container)
    result, owners = nri.ContainerAdjustment(), Owners(profiles.D)
    for marks in ({"-a": ""}, {"a": "2"}):
        adjust = nri.ContainerAdjustment(annotations=marks)
        merge_adjustment(request, adjust, result, owners, "00-p")
    assert dict(request.container.annotations) == {"a": "2", "b": "1"}
    assert dict(result.annotations) == {"-a": "", "a": "2"}


def test_a_removed_variable_never_reaches_the_runtime() -> None:
    assert not merged(profiles.D, environment("-A")).env


def test_a_removal_releases_another_plugins_claim() -> None:
    assert len(merged(profiles.A, environment("A"), environment("-A"), environment("A")).env) == 2


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        (profiles.B, 'plugins "10-p1" and "00-p0" both tried to set env A'),
        (profiles.C, 'plugins "10-p1" and "00-p0" both tried to set Env A'),
    ],
)
def test_a_second_claim_is_a_conflict(profile: Profile, text: str) -> None:
    with pytest.raises(Conflict) as conflict:
        merged(profile, environment("A"), environment("A"))
    assert str(conflict.value) == text


def test_a_plugin_conflicts_with_itself() -> None:
    twice = environment("A")
    twice.env.append(twice.env[0])
    with pytest.raises(Conflict):
        merged(profiles.B, twice)
