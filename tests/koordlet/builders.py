"""What the tests of this room build again and again: runtime messages and Pod objects."""

from __future__ import annotations

from typing import Any

from apis.core import Pod as CorePod
from apis.decode import decode_object
from hooks.observed import Container, ContainerState, Sandbox
from hooks.places import place_of
from hooks.subject import (
    NOTHING_REQUESTED,
    ContainerSubject,
    Pod,
    Requested,
    SandboxSubject,
    make_pod,
)
from koordlet.state.podspec import KnownPod, known_pod
from linux.cgroup_paths import Driver, Layout

LAYOUT = Layout(
    version=2, mounts={"": "/sys/fs/cgroup"}, driver=Driver.CGROUPFS, kubepods="kubepods"
)


def runtime_pod(uid: str, *, qos: str = "burstable", **fields: Any) -> Pod:
    cgroup = f"kubepods/{qos}/pod{uid}" if qos else f"kubepods/pod{uid}"
    return make_pod(
        namespace=fields.pop("namespace", "default"),
        name=fields.pop("name", f"pod-{uid}"),
        uid=uid,
        labels=fields.pop("labels", {}),
        annotations=fields.pop("annotations", {}),
        kube_qos=place_of(cgroup)[1],
        cgroup=cgroup,
        **fields,
    )


def sandbox(pod: Pod, id_: str, *, pid: int = 1, **fields: Any) -> Sandbox:
    subject = SandboxSubject(pod=pod, id=id_, cgroup=f"{pod.cgroup}/{id_}")
    return Sandbox(subject, pid=pid, **fields)


def container(
    pod: Pod,
    id_: str,
    sandbox_id: str,
    *,
    name: str = "main",
    requested: Requested = NOTHING_REQUESTED,
    current: Requested = NOTHING_REQUESTED,
    state: ContainerState = ContainerState.RUNNING,
) -> Container:
    subject = ContainerSubject(
        pod=pod, name=name, id=id_, cgroup=f"{pod.cgroup}/{id_}", requested=requested
    )
    return Container(subject, sandbox_id, current=current, state=state)


def pod_manifest(name: str = "web", *, uid: str = "", **parts: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "default", **parts.pop("metadata", {})}
    if uid:
        metadata["uid"] = uid
    spec = {"containers": [{"name": "main"}], **parts.pop("spec", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, **parts}


def known(manifest: dict[str, Any]) -> KnownPod:
    return known_pod(decode_object(manifest, CorePod, obj="Pod test"))
