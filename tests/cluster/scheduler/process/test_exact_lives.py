"""Random lives with NUMA nodes, which are known or not, and with GPUs that come and go.

As `test_lives`. Whatever happens, no CPU is given to two pods and no GPU beyond what it has; and in
the end CPUs, NUMA nodes and devices are counted as a scheduler counts them that reads the objects.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from apis.device import parse_device_allocated
from apis.keys import (
    ANNOTATION_DEVICE_ALLOCATED,
    GPU_CORE,
    GPU_MEMORY_RATIO,
    LABEL_NUMA_TOPOLOGY_POLICY,
    LABEL_QOS_CLASS,
)
from cluster.scheduler.binding.placement import Placement
from cluster.scheduler.configuration.reading import read_configuration
from cluster.scheduler.tables.numa.record import recorded_allocation
from tests.cluster.scheduler.beds.lives import NODES, Lives
from tests.cluster.scheduler.devices.making import a_gpu
from tests.cluster.scheduler.exact.cpu_oracle import Machine
from tests.cluster.scheduler.numa.making import topology_tree

_CONFIGURATION = read_configuration(
    """
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: koord-scheduler
  plugins:
    preEnqueue: {enabled: [{name: Coscheduling}]}
    preFilter: {enabled: [{name: NodeNUMAResource}, {name: DeviceShare}]}
    filter: {enabled: [{name: NodeNUMAResource}, {name: DeviceShare}]}
    score: {enabled: [{name: NodeNUMAResource}, {name: DeviceShare}]}
    reserve: {enabled: [{name: NodeNUMAResource}, {name: DeviceShare}]}
    permit: {enabled: [{name: Coscheduling}]}
    preBind: {enabled: [{name: NodeNUMAResource}, {name: DeviceShare}]}
- schedulerName: other
""",
    obj="test",
)
_MACHINES: Final = {"n0": Machine(1, 2, 1, 2), "n1": Machine(1, 1, 1, 2), "n2": Machine(1, 2, 2, 2)}
_GPUS: Final = 2
_TOPOLOGIES, _DEVICES = "noderesourcetopologies", "devices"


class ExactLives(Lives):
    configuration = _CONFIGURATION
    priority = 9500

    def __init__(self) -> None:
        self.facts: dict[tuple[str, str], dict[str, Any]] = {}
        super().__init__()
        for name in NODES:
            self.equip(name, True, _GPUS)
        for number, gpu in ((3, 50), (4, 100), (5, 0)):
            self.delete(number)
            self.create_exact(number, 2, "LSR", gpu)

    def _put_node(self, name: str) -> None:
        super()._put_node(name)
        self.late_nodes.pop()
        node = self.nodes[name]
        if name == "n2":
            node["metadata"]["labels"][LABEL_NUMA_TOPOLOGY_POLICY] = "BestEffort"
        node["status"]["allocatable"] |= dict.fromkeys((GPU_CORE, GPU_MEMORY_RATIO), "200")
        self.late_nodes.append(self._line("ADDED", node))

    @rule(name=st.sampled_from(sorted(NODES)), numa=st.booleans(), gpus=st.integers(0, _GPUS))
    def equip(self, name: str, numa: bool, gpus: int) -> None:
        """What a node has changes. Its Device stays: one that is deleted leaves devices that are
        not healthy, and these are forgotten at a restart."""
        machine = _MACHINES[name]
        size = str(machine.cores_per_numa * machine.threads)
        zones = {each: {"cpu": size, "memory": "32Gi"} for each in range(machine.numa_per_socket)}
        topology = topology_tree(name, cpus=machine.cpus(), zones=zones)
        spec = {"devices": [a_gpu(minor) for minor in range(gpus)]}
        self._set(_TOPOLOGIES, name, topology if numa else None)
        self._set(_DEVICES, name, {"metadata": {"name": name}, "spec": spec})

    def _set(self, plural: str, name: str, tree: dict[str, Any] | None) -> None:
        before = self.facts.pop((plural, name), None)
        if tree is not None:
            self.facts[plural, name] = tree
            self._see_fact(plural, "ADDED" if before is None else "MODIFIED", tree)
        elif before is not None:
            self._see_fact(plural, "DELETED", before)

    def _see_fact(self, plural: str, kind: str, tree: dict[str, Any]) -> None:
        (cache,) = (each for each in self.process.caches if each.resource.plural == plural)
        cache.take(self._line(kind, tree))

    def _after_restart(self) -> None:
        for (plural, _), tree in self.facts.items():
            self._see_fact(plural, "ADDED", tree)

    @rule(
        name=st.integers(0, 9),
        cpus=st.sampled_from([1, 2, 2, 4]),
        qos=st.sampled_from(["LSR", "LSE"]),
        gpu=st.sampled_from([0, 30, 50, 100, 200]),
    )
    def create_exact(self, name: int, cpus: int, qos: str, gpu: int) -> None:
        if f"p{name}" in self.pods:
            return
        self.create(name, 1000 * cpus, "koord-scheduler", gated=False)
        self.late_pods.pop()
        pod = self.pods[f"p{name}"]
        pod["metadata"]["labels"] = {LABEL_QOS_CLASS: qos}
        if gpu:
            (container,) = pod["spec"]["containers"]
            container["resources"]["requests"] |= dict.fromkeys(
                (GPU_CORE, GPU_MEMORY_RATIO), str(gpu)
            )
        self.late_pods.append(self._line("ADDED", pod))

    @rule()
    def catch_up(self) -> None:
        """Most steps of a life would else be spent until the first binding."""
        self._see_all()
        self.schedule(15.0)
        while self.binder.waiting:
            self.carry_out(None)

    def _held_back(self, pod: dict[str, Any]) -> bool:
        # A node with a policy takes no pod while its NUMA nodes are not known.
        return LABEL_QOS_CLASS in pod["metadata"]["labels"] or (_TOPOLOGIES, "n2") not in self.facts

    def _bind(self, placement: Placement) -> bool:
        pod = self.pods.get(placement.name)
        same = pod is not None and pod["metadata"]["uid"] == placement.uid
        if pod is not None and same and not pod["spec"].get("nodeName"):
            # The annotations travel in the Binding.
            pod["metadata"]["annotations"] |= placement.annotations
        bound = super()._bind(placement)
        self._nothing_is_given_twice(placement.node)
        return bound

    def _nothing_is_given_twice(self, node: str) -> None:
        cpus, shares = Counter[int](), Counter[int]()
        for pod in self._on(node):
            annotations = pod["metadata"]["annotations"]
            cpus.update(recorded_allocation(annotations, obj="pod")[0])
            if text := annotations.get(ANNOTATION_DEVICE_ALLOCATED):
                for gpu in parse_device_allocated(text, obj="pod")["gpu"]:
                    shares[gpu.minor] += int(str(gpu.resources[GPU_CORE]))
        assert set(cpus.values()) <= {1}
        assert all(share <= 100 for share in shares.values())


ExactLives.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestExactLives = ExactLives.TestCase
