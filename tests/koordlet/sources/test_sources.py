"""Sources of pods: kubelet over HTTP, polling with back-off, the runtime over CRI."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from koordlet.configuration.config import Cri, Kubelet, Seconds
from koordlet.sources.cri import CriClient
from koordlet.sources.kubelet import KubeletClient, is_loopback
from koordlet.sources.polling import Poller, SourceError
from koordlet.state import NodeState
from protos.cri.v1 import api_pb2, api_pb2_grpc
from service.events import Events
from tests.answering import answering
from tests.beds.containerd import Containerd, containerd
from tests.beds.kubelet import running_pod
from tests.koordlet.builders import pod_manifest
from tests.ports import free_port

BED_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "seen",
        "namespace": "default",
        "uid": "11111111-2222-3333-4444-555555555555",
        "labels": {"koordinator.sh/qosClass": "LS"},
    },
    "spec": {
        "containers": [
            {
                "name": "main",
                "resources": {
                    "requests": {"cpu": "500m", "memory": "64Mi"},
                    "limits": {"cpu": "1", "memory": "64Mi"},
                },
            }
        ]
    },
}


# --- kubelet -----------------------------------------------------------------------------------


@contextmanager
def kubelet(status: int, body: bytes) -> Iterator[tuple[KubeletClient, list[str], list[Any]]]:
    """A kubelet's read-only port; yields client, paths, complaints."""
    complaints: list[Any] = []
    with answering(status, body) as (port, paths, _):
        config = Kubelet(enabled=True, read_only=True, read_only_port=port)
        yield KubeletClient(config, lambda *said: complaints.append(said)), paths, complaints


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key, as kubelet makes one."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubelet")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "kubelet.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.parametrize("with_ca", [False, True])
def test_kubelet_is_asked_over_tls_with_a_token(
    certificate: Path, tmp_path: Path, with_ca: bool
) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    body = pod_list(pod_manifest("a", uid="1"))
    with answering(200, body, certificate=certificate) as (port, _, tokens):
        config = Kubelet(
            port=port, token_file=str(token), ca_file=str(certificate) if with_ca else ""
        )
        client = KubeletClient(config, lambda *_: None)
        assert [pod.uids for pod in client.fetch()] == [("1",)]
        token.write_text("rotated")
        client.fetch()
        assert tokens == ["Bearer first", "Bearer rotated"]


def test_a_certificate_of_an_unknown_authority_is_refused(
    certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off loopback another program may answer, and would get the token."""
    token = tmp_path / "token"
    token.write_text("secret")
    monkeypatch.setattr("koordlet.sources.kubelet.is_loopback", lambda address: False)
    with answering(200, b"", certificate=certificate) as (port, _, tokens):
        client = KubeletClient(Kubelet(port=port, token_file=str(token)), lambda *_: None)
        with pytest.raises(SourceError, match="CERTIFICATE_VERIFY_FAILED"):
            client.fetch()
        assert tokens == []


def pod_list(*pods: Any) -> bytes:
    return json.dumps({"kind": "PodList", "items": list(pods)}).encode()


def test_kubelets_pods_are_read() -> None:
    with kubelet(200, pod_list(pod_manifest("a", uid="1"))) as (client, paths, complaints):
        (found,) = client.fetch()
        assert found.uids == ("1",)
        assert paths == ["/pods/"]
        assert complaints == []
        assert {key: each.count for key, each in client.durations.items()} == {("/pods/", "200"): 1}


@pytest.mark.parametrize("status", [200, 403])
def test_each_answered_request_has_a_duration_by_path_and_code(status: int) -> None:
    with kubelet(status, b'{"items": null, "kubeletconfig": {}}') as (client, paths, _):
        for ask in (client.fetch, client.fetch_settings, client.fetch_settings):
            with suppress(SourceError):
                ask()
        assert paths == ["/pods/", "/configz", "/configz"]
        assert {key: each.count for key, each in client.durations.items()} == {
            ("/pods/", str(status)): 1,
            ("/configz", str(status)): 2,
        }


def test_a_request_without_an_answer_has_no_duration() -> None:
    config = Kubelet(enabled=True, read_only=True, read_only_port=free_port())
    client = KubeletClient(config, lambda *_: None)
    with pytest.raises(SourceError):
        client.fetch()
    assert client.durations == {}


def test_a_kubelet_without_pods_answers_null_for_its_list() -> None:
    with kubelet(200, b'{"kind": "PodList", "items": null}') as (client, _, complaints):
        assert client.fetch() == ()
        assert complaints == []


def test_a_pod_that_cannot_be_read_costs_itself_only() -> None:
    bad = pod_manifest("bad", uid="2", spec={"priority": "high"})
    with kubelet(200, pod_list(bad, pod_manifest("a", uid="1"))) as (client, _, complaints):
        assert [pod.uids for pod in client.fetch()] == [("1",)]
        assert "spec.priority = 'high'" in complaints[0][1]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, b"", "answered 401 to /pods/"),
        (403, b"", "rbac-kubelet.yaml"),
        (500, b"", "answered 500"),
        (200, b"rubbish", "not a pod list"),
        (200, b'{"items": 3}', "not a pod list"),
    ],
)
def test_an_answer_that_is_no_pod_list_says_what_to_do(
    status: int, body: bytes, words: str
) -> None:
    with kubelet(status, body) as (client, _, _), pytest.raises(SourceError, match=words):
        client.fetch()


def test_a_kubelet_that_is_not_there_is_an_error_of_the_source() -> None:
    config = Kubelet(read_only=True, read_only_port=free_port())
    with pytest.raises(SourceError, match="is it running"):
        KubeletClient(config, lambda *_: None).fetch()


def test_a_kubelet_whose_answer_never_ends_is_an_error_of_the_source() -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            channel, _ = listener.accept()
            with channel, suppress(OSError):
                channel.recv(4096)
                channel.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n{")
                while not ended.wait(0.05):
                    channel.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        # The connection's own time-out would restart in each of its pauses.
        config = Kubelet(
            read_only=True, read_only_port=listener.getsockname()[1], timeout=Seconds(0.5)
        )
        stop = threading.Timer(10, ended.set)
        stop.start()
        try:
            with pytest.raises(SourceError, match="no whole answer within"):
                KubeletClient(config, lambda *_: None).fetch()
        finally:
            stop.cancel()
            ended.set()
            thread.join()


def test_a_token_that_is_missing_says_what_to_set(tmp_path: Path) -> None:
    config = Kubelet(token_file=str(tmp_path / "no"))
    with pytest.raises(SourceError, match=r"kubelet\.tokenFile"):
        KubeletClient(config, lambda *_: None).fetch()


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.1", False), ("n1", False)],
)
def test_only_loopback_is_believed_without_a_certificate_authority(
    address: str, loopback: bool
) -> None:
    assert is_loopback(address) is loopback


# --- polling -----------------------------------------------------------------------------------


def test_a_source_that_fails_keeps_its_last_list_and_comes_back() -> None:
    async def test() -> None:
        events = Events()
        answers: list[Any] = [SourceError("down"), SourceError("down"), ValueError("bug"), "list"]
        applied: list[tuple[str, int]] = []

        def fetch() -> str:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        with ThreadPoolExecutor(1) as pool:
            poller = Poller("kubelet", 10.0, events, pool)
            for expected in (False, False, False, True):
                done = await poller.once(fetch, lambda *a: applied.append(a), lambda: 7)
                assert done is expected
                assert (poller.answered_at is not None) is expected
            answered_at = poller.answered_at
            answers.append(SourceError("gone"))
            assert not await poller.once(fetch, lambda *a: applied.append(a), lambda: 8)
            assert poller.answered_at == answered_at, "the age is that of the list in force"
        assert applied == [("list", 7)]
        assert poller.problem == "gone"
        kinds = [event.kind for event in events.latest()]
        assert kinds == ["source-failed", "source-failed", "source-back", "source-failed"]

    asyncio.run(test())


# --- CRI ---------------------------------------------------------------------------------------


def test_a_runtime_that_is_not_there_is_an_error_of_the_source(tmp_path: Path) -> None:
    config = Cri(socket=str(tmp_path / "no.sock"), timeout=Seconds(1))
    client = CriClient(config, lambda *_: None)
    with pytest.raises(SourceError, match=r"cri\.socket"):
        client.fetch()
    client.close()


class _Runtime(api_pb2_grpc.RuntimeServiceServicer):
    """Lists two pods with a container each; of what is in `refused` it cannot tell."""

    def __init__(self) -> None:
        self.refused: dict[str, grpc.StatusCode] = {}
        self.ended = threading.Event()

    def ListPodSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802
        return api_pb2.ListPodSandboxResponse(
            items=[
                api_pb2.PodSandbox(
                    id=f"sandbox-{name}",
                    state=api_pb2.SANDBOX_READY,
                    metadata=api_pb2.PodSandboxMetadata(name=name, namespace="default", uid=name),
                )
                for name in ("a", "b")
            ]
        )

    def ListContainers(self, request: Any, context: Any) -> Any:  # noqa: N802
        return api_pb2.ListContainersResponse(
            containers=[
                api_pb2.Container(
                    id=f"container-{name}",
                    pod_sandbox_id=f"sandbox-{name}",
                    state=api_pb2.CONTAINER_RUNNING,
                    metadata=api_pb2.ContainerMetadata(name="main"),
                )
                for name in ("a", "b")
            ]
        )

    def PodSandboxStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        pod = request.pod_sandbox_id.removeprefix("sandbox-")
        code = self.refused.get(pod)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.ended.wait(30)
        elif code is not None:
            context.abort(code, "failed to get sandbox container task")
        parent = f"/kubepods/burstable/pod{pod}"
        info = json.dumps({"pid": 7, "config": {"linux": {"cgroup_parent": parent}}})
        return api_pb2.PodSandboxStatusResponse(info={"info": info})

    def ContainerStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        pod = request.container_id.removeprefix("container-")
        spec = {"linux": {"cgroupsPath": f"/kubepods/burstable/pod{pod}/{request.container_id}"}}
        info = json.dumps({"pid": 8, "runtimeSpec": spec})
        return api_pb2.ContainerStatusResponse(info={"info": info})


Scripted = tuple[_Runtime, Cri, CriClient, list[Any]]


@pytest.fixture
def scripted_runtime(tmp_path: Path) -> Iterator[Scripted]:
    runtime, complaints = _Runtime(), list[Any]()
    server = grpc.server(ThreadPoolExecutor(4))
    api_pb2_grpc.add_RuntimeServiceServicer_to_server(runtime, server)
    server.add_insecure_port(f"unix:{tmp_path}/cri.sock")
    server.start()
    config = Cri(socket=f"{tmp_path}/cri.sock", timeout=Seconds(1))
    client = CriClient(config, lambda *said: complaints.append(said))
    try:
        yield runtime, config, client, complaints
    finally:
        client.close()
        runtime.ended.set()
        server.stop(None).wait()


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED], ids=["refuses", "hangs"]
)
def test_a_sandbox_that_the_runtime_cannot_tell_of_costs_itself_only(
    scripted_runtime: Scripted, code: grpc.StatusCode
) -> None:
    runtime, config, client, complaints = scripted_runtime
    state = NodeState()
    runtime.refused["a"] = code
    state.runtime_list(*client.fetch())
    pod = state.pod("b")
    assert pod is not None
    assert pod.cgroup == "kubepods/burstable/podb"
    ((obj, problem),) = complaints
    assert "sandbox-a" in obj
    assert code.name in problem
    # Its status is requested again, and stays known when the runtime fails once more.
    runtime.refused.clear()
    state.runtime_list(*client.fetch())
    runtime.refused["a"] = code
    another = CriClient(config, lambda *_: None)
    state.runtime_list(*another.fetch())
    another.close()
    pod = state.pod("a")
    assert pod is not None
    assert pod.cgroup == "kubepods/burstable/poda"


@pytest.fixture(scope="module", params=["1.7", "2.1"])
def bed(request: pytest.FixtureRequest) -> Iterator[Containerd]:
    with containerd(request.param) as made:
        yield made


@pytest.mark.containerd
def test_cri_lists_pods_and_containers_with_their_cgroups(bed: Containerd) -> None:
    client = CriClient(Cri(socket=str(bed.socket)), lambda *_: None)
    with running_pod(bed, BED_POD) as pod:
        sandboxes, containers = client.fetch()
        (sandbox,) = [one for one in sandboxes if one.subject.pod.uid == pod.uid]
        (container,) = [one for one in containers if one.sandbox_id == sandbox.subject.id]
        assert sandbox.subject.pod.cgroup == pod.cgroup.strip("/")
        assert sandbox.subject.pod.labels["koordinator.sh/qosClass"] == "LS"
        assert container.subject.cgroup == pod.container_cgroup("main").strip("/")
        assert container.current.cpu_shares == 512
        assert container.current.cfs_quota_us == 100_000
        assert container.pid > 0
        state = NodeState()
        state.runtime_list(sandboxes, containers)
        assert state.pod(pod.uid) is not None
        # A second look asks for the status of nothing that is known.
        again = client.fetch()
        assert msgspec.structs.asdict(again[1][0]) == msgspec.structs.asdict(containers[0])
    assert pod.uid not in {one.subject.pod.uid for one in client.fetch()[0]}
    client.close()
