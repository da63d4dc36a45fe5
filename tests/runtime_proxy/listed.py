"""A runtime that lists one pod with one container, as the proxy asks for them at its start."""

from __future__ import annotations

import json

from google.protobuf.message import Message

from protos.cri.v1 import api_pb2 as cri
from runtime_proxy.http2.grpc import Code
from runtime_proxy.model import Container, Pod, PodMeta, Resources
from tests.runtime_proxy.http2.h2_server import Reply

POD_CONFIG = {
    "linux": {
        "cgroup_parent": "/kubepods/pod-u",
        "overhead": {"cpu_shares": "3"},
        "resources": {"memory_limit_in_bytes": 4},
    }
}
POD_STATUS = cri.PodSandboxStatusResponse(
    status=cri.PodSandboxStatus(
        id="p1",
        metadata=cri.PodSandboxMetadata(name="web", uid="u", namespace="prod", attempt=2),
        state=cri.SANDBOX_READY,
        labels={"app": "web"},
        annotations={"note": "n"},
        runtime_handler="kata",
    ),
    info={"info": json.dumps({"config": POD_CONFIG})},
)
POD = Pod(
    id="p1",
    meta=PodMeta(name="web", uid="u", namespace="prod", attempt=2),
    runtime_handler="kata",
    labels={"app": "web"},
    annotations={"note": "n"},
    cgroup_parent="/kubepods/pod-u",
    overhead=Resources(cpu_shares=3),
    resources=Resources(memory_limit_in_bytes=4),
)
CONTAINER_INFO = {
    "config": {
        "envs": [{"key": "A", "value": "1"}, {"value": "no key"}, {"key": "B", "value": "2"}],
        "linux": {
            "resources": {
                "cpu_period": "1",
                "cpu_quota": "-1",
                "cpu_shares": 3,
                "memory_limit_in_bytes": "4",
                "oom_score_adj": "5",
                "cpuset_cpus": "6",
                "cpuset_mems": "7",
                "hugepage_limits": [{"page_size": "2MB", "limit": "8"}],
                "unified": {"memory.high": "9", "not text": 5},
                "memory_swap_limit_in_bytes": "10",
            }
        },
    }
}
LISTED = cri.Container(id="c1", pod_sandbox_id="p1")
CONTAINER_STATUS = cri.ContainerStatusResponse(
    status=cri.ContainerStatus(
        id="c1",
        metadata=cri.ContainerMetadata(name="main", attempt=3),
        state=cri.CONTAINER_RUNNING,
        annotations={"kept": "k"},
    ),
    info={"info": json.dumps(CONTAINER_INFO)},
)
CONTAINER = Container(
    id="c1",
    pod_id="p1",
    name="main",
    attempt=3,
    annotations={"kept": "k"},
    resources=Resources(
        cpu_period=1,
        cpu_quota=-1,
        cpu_shares=3,
        memory_limit_in_bytes=4,
        oom_score_adj=5,
        cpuset_cpus="6",
        cpuset_mems="7",
        hugepage_limits=(("2MB", 8),),
        unified={"memory.high": "9"},
        memory_swap_limit_in_bytes=10,
    ),
    envs={"A": "1", "B": "2"},
)


def ok(message: Message) -> Reply:
    return Reply(messages=[message.SerializeToString()])


def error(code: int) -> Reply:
    return Reply(trailers=[("grpc-status", str(code)), ("grpc-message", "the reason")])


class ListingRuntime:
    """Answers by method; a method that is not in `answers` gets UNIMPLEMENTED."""

    def __init__(self, package: str = "runtime.v1") -> None:
        self.package = package
        self.asked: list[tuple[str, bytes]] = []
        self.answers: dict[str, Reply] = {
            "Version": ok(cri.VersionResponse(runtime_name="containerd", runtime_version="v2")),
            "ListPodSandbox": ok(cri.ListPodSandboxResponse(items=[cri.PodSandbox(id="p1")])),
            "PodSandboxStatus": ok(POD_STATUS),
            "ListContainers": ok(cri.ListContainersResponse(containers=[LISTED])),
            "ContainerStatus": ok(CONTAINER_STATUS),
        }

    def __call__(self, path: str, request: bytes) -> Reply:
        service, _, method = path.rpartition("/")
        self.asked.append((method, request))
        if service != f"/{self.package}.RuntimeService" or method not in self.answers:
            return error(Code.UNIMPLEMENTED)
        return self.answers[method]
