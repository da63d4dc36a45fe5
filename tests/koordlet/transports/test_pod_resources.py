"""The stand-in for kubelet's pod resources socket, with a kubelet that answers given bytes."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from apis.errors import InputError
from apis.keys import ANNOTATION_DEVICE_ALLOCATED
from apis.qos import KubeQoS
from hooks.subject import Pod, make_pod
from koordlet.transports.pod_resources import SERVICE, SOCKET, PodResources, with_allocations
from protos.podresources.v1 import podresources_pb2 as messages
from service.events import Events

_GPU = '{"gpu":[{"minor":0,"id":"GPU-a"},{"minor":1,"id":"GPU-b"}]}'
_VF = (
    '{"rdma":[{"minor":0,"id":"0000:1f:00.0","extension":'
    '{"vfs":[{"minor":-1,"busID":"0000:1f:00.2"},{"minor":-1,"busID":"0000:1f:00.3"}]}}],'
    '"fpga":[{"id":"x"}]}'
)


def _pod(name: str, allocated: str | None = None) -> Pod:
    return make_pod(
        namespace="default",
        name=name,
        uid=f"u-{name}",
        labels={},
        annotations={} if allocated is None else {ANNOTATION_DEVICE_ALLOCATED: allocated},
        kube_qos=KubeQoS.BURSTABLE,
    )


def _listed(*names: str) -> messages.ListPodResourcesResponse:
    made = messages.ListPodResourcesResponse()
    for name in names:
        pod = made.pod_resources.add(name=name, namespace="default")
        first = pod.containers.add(name="main")
        first.devices.add(resource_name="vendor.com/nic", device_ids=["nic0"])
        pod.containers.add(name="second")
    return made


def _devices(answer: bytes) -> dict[str, list[tuple[str, list[str]]]]:
    response = messages.ListPodResourcesResponse.FromString(answer)
    return {
        f"{pod.name}/{container.name}": [
            (each.resource_name, list(each.device_ids)) for each in container.devices
        ]
        for pod in response.pod_resources
        for container in pod.containers
    }


def test_devices_of_the_annotation_are_added_to_the_first_container_in_order() -> None:
    reported: list[InputError] = []
    answer = _listed("gpu", "vf", "plain", "unknown-to-us").SerializeToString()
    pods = [_pod("gpu", _GPU), _pod("vf", _VF), _pod("plain"), _pod("not-at-kubelet", _GPU)]
    nic = ("vendor.com/nic", ["nic0"])
    assert _devices(with_allocations(answer, pods, reported.append)) == {
        "gpu/main": [("nvidia.com/gpu", ["GPU-a", "GPU-b"]), nic],
        "gpu/second": [],
        "vf/main": [("koordinator.sh/rdma", ["0000:1f:00.2", "0000:1f:00.3"]), nic],
        "vf/second": [],
        "plain/main": [nic],
        "plain/second": [],
        "unknown-to-us/main": [nic],
        "unknown-to-us/second": [],
    }
    assert reported == []


def test_fields_that_are_not_known_here_stay_in_the_answer() -> None:
    cpu_ids = b"\x1a\x02\x05\x06"  # field 3 of a container: its CPUs 5 and 6
    container = b"\x0a\x04main" + cpu_ids
    pod = b"\x0a\x03gpu\x12\x07default\x1a" + bytes([len(container)]) + container
    answer = b"\x0a" + bytes([len(pod)]) + pod
    made = with_allocations(answer, [_pod("gpu", _GPU)], lambda error: None)
    assert cpu_ids in made and b"GPU-a" in made


def test_without_an_allocation_the_answer_is_passed_on_unread() -> None:
    assert with_allocations(b"not protobuf", [_pod("plain")], lambda error: None) == b"not protobuf"


def test_a_bad_annotation_is_named_and_harms_no_other_pod() -> None:
    reported: list[InputError] = []
    answer = _listed("bad", "good").SerializeToString()
    pods = [_pod("bad", '{"gpu": 7}'), _pod("good", _GPU)]
    devices = _devices(with_allocations(answer, pods, reported.append))
    assert devices["bad/main"] == [("vendor.com/nic", ["nic0"])]
    assert devices["good/main"][0][0] == "nvidia.com/gpu"
    assert "default/bad" in str(reported[0])


# --- over sockets ------------------------------------------------------------------------------

Answer = Callable[[str, bytes], bytes]


@asynccontextmanager
async def _kubelet(path: str, answer: Answer) -> AsyncIterator[None]:
    """A kubelet: answers each method with bytes."""
    server = grpc.aio.server()

    def handler(method: str) -> Any:
        async def serve(request: bytes, context: Any) -> bytes:
            try:
                return answer(method, request)
            except KeyError:
                await context.abort(grpc.StatusCode.NOT_FOUND, "no such pod")
                raise

        return grpc.unary_unary_rpc_method_handler(serve)

    methods = {method: handler(method) for method in ("List", "GetAllocatableResources", "Get")}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_insecure_port(f"unix://{path}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


async def _call(folder: Path, method: str, request: bytes = b"") -> bytes:
    async with grpc.aio.insecure_channel(f"unix://{folder}/proxy/{SOCKET}") as channel:
        answer: bytes = await channel.unary_unary(f"/{SERVICE}/{method}", None, None)(
            request, timeout=5
        )
        return answer


async def _error_of(folder: Path, method: str) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await _call(folder, method)
    return raised.value


def _run(
    folder: Path, pods: Iterable[Pod], test: Callable[[PodResources], Awaitable[None]]
) -> None:
    async def whole() -> None:
        server = PodResources(
            str(folder / "proxy"), str(folder / "kubelet.sock"), pods=lambda: pods, events=Events()
        )
        await server.start()
        try:
            await test(server)
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(whole(), 30))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pr")  # a short path: a socket's address is limited


def test_calls_pass_through_and_list_is_added_to(folder: Path) -> None:
    def answer(method: str, request: bytes) -> bytes:
        if method == "List":
            return _listed("gpu").SerializeToString()
        return method.encode() + request

    async def test(server: PodResources) -> None:
        async with _kubelet(str(folder / "kubelet.sock"), answer):
            assert ("nvidia.com/gpu", ["GPU-a", "GPU-b"]) in _devices(await _call(folder, "List"))[
                "gpu/main"
            ]
            assert await _call(folder, "GetAllocatableResources") == b"GetAllocatableResources"
            assert await _call(folder, "Get", b"\x0a\x01x") == b"Get\x0a\x01x"
        mode = os.stat(folder / "proxy" / SOCKET).st_mode
        assert stat.S_IMODE(mode) == 0o600

    _run(folder, [_pod("gpu", _GPU)], test)
    assert not (folder / "proxy" / SOCKET).exists()


def test_kubelets_errors_and_its_absence_reach_the_caller(folder: Path) -> None:
    def answer(method: str, request: bytes) -> bytes:
        if method == "Get":
            raise KeyError
        return b"\xff\xff"

    async def test(server: PodResources) -> None:
        away = await _error_of(folder, "List")
        assert away.code() is grpc.StatusCode.UNAVAILABLE
        async with _kubelet(str(folder / "kubelet.sock"), answer):
            missing = await _error_of(folder, "Get")
            while missing.code() is grpc.StatusCode.UNAVAILABLE:  # it dials again
                await asyncio.sleep(0.05)
                missing = await _error_of(folder, "Get")
            assert missing.code() is grpc.StatusCode.NOT_FOUND
            assert missing.details() == "no such pod"
            damaged = await _error_of(folder, "List")
            assert damaged.code() is grpc.StatusCode.INTERNAL

    _run(folder, [_pod("gpu", _GPU)], test)


def test_a_dead_socket_is_replaced_and_another_file_is_not(folder: Path) -> None:
    (folder / "proxy").mkdir()
    (folder / "proxy" / SOCKET).write_text("a file")

    async def test(server: PodResources) -> None:
        raise AssertionError("it must not serve")

    with pytest.raises(OSError, match="is not a socket"):
        _run(folder, [], test)
    assert (folder / "proxy" / SOCKET).read_text() == "a file"
