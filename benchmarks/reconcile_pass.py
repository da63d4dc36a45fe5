"""What a reconcile pass costs: processor time and kernel calls, first and in steady state.

Makes the groups of 200 pods with two containers each on this machine's cgroup v1 (or v2), decides
with every policy that the kernel carries, and removes the groups afterwards. Needs root.

    python -m benchmarks.reconcile_pass --pods 200 --passes 30
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from apis.qos import KubeQoS
from benchmarks.running import run_main
from hooks.engine import Engine
from hooks.facts import NodeInputs, Settings
from hooks.policies import BUILTIN
from hooks.subject import (
    Amounts,
    ContainerSpec,
    ContainerSubject,
    NodeSubject,
    PodSubject,
    QosSubject,
    Requested,
    SandboxSubject,
    Subject,
    make_pod,
)
from koordlet.executor.executor import Executor
from koordlet.executor.journal import Journal
from koordlet.executor.table import Limits
from koordlet.node.probe import probe_kernel
from koordlet.reconciler.reconciler import Reconciler
from koordlet.sources.objects import Directory
from koordlet.state.snapshot import Snapshot
from linux.cgroup_paths import Layout, qos_dir
from linux.discovery import discover
from linux.local import LocalHost

NODE = "bench-node"
OBJECTS = f"""
apiVersion: slo.koordinator.sh/v1alpha1
kind: NodeSLO
metadata: {{name: {NODE}}}
spec:
  resourceQOSStrategy:
    lsrClass: {{cpuQOS: {{enable: true, groupIdentity: 2}}, memoryQOS: {{enable: true}}}}
    lsClass: {{cpuQOS: {{enable: true, groupIdentity: 2}}, memoryQOS: {{enable: true}}}}
    beClass: {{cpuQOS: {{enable: true, groupIdentity: -1}}, memoryQOS: {{enable: true}}}}
---
apiVersion: topology.node.k8s.io/v1alpha1
kind: NodeResourceTopology
metadata:
  name: {NODE}
  annotations:
    kubelet.koordinator.sh/cpu-manager-policy: '{{"policy": "none"}}'
    node.koordinator.sh/cpu-shared-pools: '[{{"socket": 0, "node": 0, "cpuset": "0-1"}}]'
---
apiVersion: v1
kind: Node
metadata:
  name: {NODE}
  annotations: {{node.koordinator.sh/cpu-normalization-ratio: "1.25"}}
"""


class CountingHost(LocalHost):
    """The real host, counting its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def read(self, path: str) -> bytes:
        self.calls["read"] += 1
        return super().read(path)

    def write(self, path: str, data: bytes) -> None:
        self.calls["write"] += 1
        super().write(path, data)

    def inode(self, path: str) -> int:
        self.calls["inode"] += 1
        return super().inode(path)

    def directories(self, path: str) -> list[str]:
        self.calls["directories"] += 1
        return super().directories(path)

    def is_dir(self, path: str) -> bool:
        self.calls["is_dir"] += 1
        return super().is_dir(path)


def inputs_from(folder: Path) -> NodeInputs:
    (folder / "node.yaml").write_text(OBJECTS)
    objects = Directory(str(folder), NODE).scan()
    if objects.slo is None or objects.node is None or objects.problems:
        raise SystemExit(f"the benchmark's own objects are bad: {objects.problems}")
    gates = {policy.gate: True for policy in BUILTIN}
    return NodeInputs(
        slo=objects.slo,
        topology=objects.topology,
        node=objects.node,
        settings=Settings(feature_gates=gates),
    )


def subjects_of(layout: Layout, pods: int) -> list[Subject]:
    """A third of the pods is BE, the rest LS; two containers each, and a sandbox."""
    made: list[Subject] = [NodeSubject()]
    below: list[Subject] = []
    all_pods = []
    for number in range(pods):
        best_effort = number % 3 == 0
        qos = KubeQoS.BESTEFFORT if best_effort else KubeQoS.BURSTABLE
        amounts = Amounts(cpu_request_milli=500, cpu_limit_milli=1000, memory_limit_bytes=1 << 27)
        if best_effort:
            amounts = Amounts(
                batch_cpu_request_milli=500,
                batch_cpu_limit_milli=1000,
                batch_memory_limit_bytes=1 << 27,
            )
        specs = (ContainerSpec("a", amounts=amounts), ContainerSpec("b", amounts=amounts))
        uid = f"uid{number}"
        pod = make_pod(
            namespace="default",
            name=f"pod-{number}",
            uid=uid,
            labels={"koordinator.sh/qosClass": "BE" if best_effort else "LS"},
            annotations={},
            kube_qos=qos,
            cgroup=f"{qos_dir(layout.driver, layout.kubepods, qos)}/pod{uid}",
            phase="Running",
            specs=specs,
        )
        all_pods.append(pod)
        quota = -1 if best_effort else 200_000
        made.append(PodSubject(pod, Requested(cfs_quota_us=quota, cfs_period_us=100_000)))
        below.append(SandboxSubject(pod, f"s{number}", f"{pod.cgroup}/s{number}"))
        for name in "ab":
            asked = Requested(
                cpu_shares=2 if best_effort else 512,
                cfs_quota_us=-1 if best_effort else 100_000,
                cfs_period_us=100_000,
                memory_limit_bytes=-1 if best_effort else 1 << 27,
                oom_score_adj=1000 if best_effort else 900,
            )
            id_ = f"c{number}{name}"
            below.append(ContainerSubject(pod, name, id_, f"{pod.cgroup}/{id_}", asked))
    directories: list[Subject] = [
        QosSubject(
            qos,
            qos_dir(layout.driver, layout.kubepods, qos),
            tuple(pod for pod in all_pods if qos is KubeQoS.GUARANTEED or pod.kube_qos is qos),
        )
        for qos in (KubeQoS.GUARANTEED, KubeQoS.BURSTABLE, KubeQoS.BESTEFFORT)
    ]
    return [made[0], *directories, *made[1:], *below]


@contextmanager
def groups(layout: Layout, subjects: list[Subject]) -> Iterator[None]:
    """Make every subject's directory in every hierarchy, and remove them all at the end."""
    paths = [subject.cgroup for subject in subjects if subject.cgroup]
    root = layout.kubepods.split("/")[0]
    mounts = {layout.hierarchy(c) for c in ("cpu", "cpuset", "memory") if layout.has(c)}
    try:
        for mount in mounts:
            for path in [root, *paths]:
                folder = Path(mount, path)
                folder.mkdir(parents=True, exist_ok=True)
                if "cpuset" in mount and layout.version == 1:
                    _fill_cpusets(Path(mount), folder)
        yield
    finally:
        for mount in mounts:
            for emptied, _, _ in os.walk(f"{mount}/{root}", topdown=False):
                os.rmdir(emptied)


def _fill_cpusets(mount: Path, folder: Path) -> None:
    for part in [*reversed(folder.relative_to(mount).parents), folder.relative_to(mount)]:
        for kind in ("cpuset.cpus", "cpuset.mems"):
            file = mount / part / kind
            if part != Path() and not file.read_text().strip():
                file.write_text((mount / part.parent / kind).read_text())


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--pods", type=int, default=200)
    arguments.add_argument("--passes", type=int, default=30)
    given = arguments.parse_args()
    host = CountingHost()
    root = f"koord-bench-{os.getpid()}/kubepods"
    layout = discover(host, kubepods=root)
    subjects = subjects_of(layout, given.pods)
    with tempfile.TemporaryDirectory() as scratch, groups(layout, subjects):
        folder = Path(scratch, "objects")
        folder.mkdir()
        probed = probe_kernel(host, layout)
        inputs = msgspec.structs.replace(inputs_from(folder), kernel=probed.facts)
        engine = Engine.build(BUILTIN, inputs)
        for state in engine.states:
            why = "" if state.off is None else f": {state.off.because} {state.off.detail}"
            print(f"  policy {state.policy.name} {'on' if state.active else 'off'}{why}")
        journal = Journal(f"{scratch}/journal", boot="bench")
        executor = Executor(
            host, layout, journal, limits=Limits(writes_per_second=1e6, burst=1_000_000)
        )
        current = [Snapshot(engine, tuple(subjects))]
        reconciler = Reconciler(executor, journal, lambda: current[0])
        _measure(reconciler, host, given.pods, given.passes)
        changed = []
        for _ in range(5):
            engine = Engine.build(BUILTIN, inputs, previous=engine)
            current[0] = Snapshot(engine, tuple(subjects))
            changed.append(reconciler.run_once("rules").cpu_ms)
        print(f"pass after a change of the rules: {statistics.median(changed):.1f} ms CPU")
        states = Counter(
            f"{state}" for (_, state), n in executor.states().items() for _ in range(n)
        )
        print("values:", ", ".join(f"{count} {state}" for state, count in sorted(states.items())))
        restored = reconciler.restore_all()
        print(f"restore: {restored.restored} values, {len(journal)} left, {restored.cpu_ms:.0f} ms")
        reconciler.close()


def _measure(reconciler: Reconciler, host: CountingHost, pods: int, passes: int) -> None:
    first = reconciler.run_once("start")
    print(
        f"first pass over {pods} pods, {pods * 2} containers: {first.written} writes,"
        f" {first.failed} refused, {first.cpu_ms:.0f} ms CPU, {first.wall_ms:.0f} ms"
    )
    while reconciler.run_once("timer").written:
        pass
    gc.collect()
    gc.freeze()
    cpu: list[float] = []
    host.calls.clear()
    for _ in range(passes):
        report = reconciler.run_once("timer")
        cpu.append(report.cpu_ms)
    calls = {name: round(count / passes, 1) for name, count in sorted(host.calls.items())}
    calls.setdefault("write", 0.0)
    median, worst = statistics.median(cpu), max(cpu)
    print(f"steady pass: {median:.1f} ms CPU (median of {passes}), {worst:.1f} ms worst")
    print(f"kernel calls a pass: {calls}")
    print(f"idle at one pass every 10 s: {median / 10_000:.3%} of a core")
    print(f"resident: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB at most")
    full = []
    for _ in range(5):
        started = time.thread_time()
        reconciler.run_once("look again")
        full.append((time.thread_time() - started) * 1000)
    print(f"pass that judges everything unsettled again: {statistics.median(full):.1f} ms CPU")


if __name__ == "__main__":
    run_main(main)
