"""Memory QoS while pods come, grow and go: its values follow at once, without measurements.

Everything that upstream computes here follows from the NodeSLO, the pod and the Node, so the static
policy is all there is: docs/qos.md, "Memory QoS".
"""

from __future__ import annotations

from typing import Any

from tests.koordlet.daemon.bed import NODE, SLO, Node, ls_manifest, node, run, until
from tests.simulated import DEBIAN_12_V2, Pod
from tests.simulated.kubelet import Limits

MIB = 1 << 20


def manifest(pod: Pod, request_mib: int) -> dict[str, Any]:
    made = ls_manifest(pod.uid)
    made["metadata"]["name"] = f"pod-{pod.uid[:4]}"
    resources = {"requests": {"cpu": "1", "memory": f"{request_mib}Mi"}}
    made["spec"]["containers"] = [{"name": "main", "resources": resources}]
    return made


def node_of(memory_mib: int) -> dict[str, Any]:
    amounts = {"cpu": "4", "memory": f"{memory_mib}Mi"}
    status = {"capacity": amounts, "allocatable": amounts}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "status": status}


def test_protection_follows_pods_resizes_and_the_node_without_a_periodic_pass() -> None:
    async def test() -> None:
        async with node(
            DEBIAN_12_V2,
            featureGates={"CgroupReconcile": True},
            intervals={"reconcile": 3600},
            measuring={"enabled": False},
        ) as n:
            qos = {"enable": True, "minLimitPercent": 50, "lowLimitPercent": 80}
            strategy = {"lsClass": {"memoryQOS": qos}}
            n.put({**SLO, "spec": {"resourceQOSStrategy": strategy}}, node_of(8192))
            above = n.kubelet.qos_dir("Burstable")
            first = n.kubelet.add_pod(Limits(cpu_request_milli=1000))
            n.put(manifest(first, 1024))
            async with n.running():
                await n.run_pod(first)
                await until("the pod's", lambda: protected(n, first.cgroup) == (512, 819))
                assert protected(n, above) == (512, 819)
                second = n.kubelet.add_pod(Limits(cpu_request_milli=1000))
                n.put(manifest(second, 2048))
                await n.run_pod(second)
                await until("the sum", lambda: protected(n, above) == (1536, 2457))
                n.put(manifest(second, 4096))
                await until("the resize", lambda: protected(n, second.cgroup) == (2048, 3276))
                await until("its sum", lambda: protected(n, above) == (2560, 4095))
                n.put(node_of(3072))
                await until("what the node has", lambda: protected(n, above) == (2560, 3072))
                assert second.sandbox is not None
                await n.runtime.remove_pod_sandbox(second.sandbox.id)
                n.kubelet.remove_pod(second)
                (n.folder / "objects.d" / f"Pod-pod-{second.uid[:4]}.yaml").unlink()
                await until("the first alone", lambda: protected(n, above) == (512, 819))

    run(test)


def protected(n: Node, place: str) -> tuple[int, int]:
    """Return memory.min and memory.low in whole MiB."""
    lowest, low = (
        int(n.kernel.text(n.kubelet.path(place, name))) // MIB
        for name in ("memory.min", "memory.low")
    )
    return lowest, low
