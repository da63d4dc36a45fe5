"""The life of a cluster: what users, kubelets and controllers do to it while a scheduler runs.

Objects are made, edited and deleted at random. Roles of programs that do not run are played: pods
that are being deleted go after a moment, pods of a deleted node are deleted, local volumes are
bound to claims. A request that fails, because the API server is away, is repeated until it is
carried out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

import msgspec

from apis.meta import format_time
from apis.scheduling_pod import SchedulingPod
from benchmarks import soak_kinds
from benchmarks.soak_kinds import GPUS, HOST, LOCAL, NAMESPACES, QUOTAS, Kinds, Plain, Unit
from benchmarks.soak_oracle import GANG_LABEL, Seen
from kube.cache import Cache, Change, Event
from kube.client import ApiError, Client, Unreachable, encode_object
from kube.resources import (
    DEVICES,
    ELASTIC_QUOTAS,
    NODE_METRICS,
    NODE_RESOURCE_TOPOLOGIES,
    NODES,
    PERSISTENT_VOLUME_CLAIMS,
    PERSISTENT_VOLUMES,
    PODS,
    PRIORITY_CLASSES,
    RESERVATIONS,
    STORAGE_CLASSES,
    Resource,
)
from kube.resources import (
    NAMESPACES as NAMESPACE_OBJECTS,
)
from tests.cluster.scheduler.volumes.controller import bind_once

_AT_ONCE: Final = 16
_PAUSE_S: Final = 0.5
"""Before a failed request is repeated."""
_UNKNOWN: Final = (ApiError, Unreachable)
_MEASURED: Final = 4
"""Every so manieth node has a NodeMetric."""
_RESIZED: Final = 6
"""Every so manieth node is made smaller and larger."""
_VOLUMES: Final = 60
_RESERVATIONS: Final = 40
_BUDGETS: Final = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", True)


def _patch(plain: Plain) -> bytes:
    return msgspec.json.encode(plain)


class Life:
    """A cluster that does not stand still, but for the moments when it is `calm`."""

    def __init__(self, client: Client, *, nodes: int, pods: int, scheduler: str, seed: int) -> None:
        """nodes, pods: about how many there are. scheduler: the schedulerName of the pods."""
        self._client = client
        self._wanted = nodes
        self._most_pods = pods
        self._scheduler = scheduler
        self._rng = random.Random(seed)
        self._kinds = Kinds(self._rng, scheduler)
        self._nodes: dict[str, int] = {}
        self._made_nodes = 0
        self._with_volumes: set[str] = set()
        """Nodes with a local volume; these are not deleted."""
        self._units: dict[str, Unit] = {}
        self._count = 0
        self._largest: dict[str, dict[str, str]] = {}
        self._reservations: list[str] = []
        self._number = 0
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._may_go_on = asyncio.Event()
        self.failures: list[str] = []
        """Of this program's own requests, which no other object explains."""
        self.created = 0
        self.bound = 0
        self._cut: set[str] = set()
        """Gangs that lost a member by other hands than ours."""
        self.pods: Cache[SchedulingPod] = Cache(client, PODS, SchedulingPod)
        self.pods.subscribe(self._pod_event)

    # --- requests ------------------------------------------------------------------------------

    async def _sure(self, work: Callable[[], Awaitable[object]]) -> None:
        """Have a request carried out, however often that takes."""
        while True:
            try:
                async with self._gate:
                    await work()
                return
            except ApiError as error:
                if error.already_exists or error.not_found:
                    return
                if not error.conflict and error.status not in (429, 500, 503, 504):
                    raise
            except Unreachable:
                pass
            await asyncio.sleep(_PAUSE_S)

    async def _put(self, resource: Resource, plain: Plain, namespace: str = "") -> None:
        body = encode_object(resource, plain)
        await self._sure(lambda: self._client.create(resource, body, namespace=namespace))

    async def _edit(
        self, resource: Resource, name: str, plain: Plain, *, part: str = "", namespace: str = ""
    ) -> None:
        body = _patch(plain)
        await self._sure(
            lambda: self._client.patch(resource, name, body, namespace=namespace, subresource=part)
        )

    async def _drop(self, resource: Resource, name: str, namespace: str = "") -> None:
        await self._sure(lambda: self._client.delete(resource, name, namespace=namespace))

    def _begin(self, work: Awaitable[None]) -> None:
        async def carried_out() -> None:
            await work

        task = asyncio.create_task(carried_out())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.failures.append(str(task.exception()))

    # --- the beginning -------------------------------------------------------------------------

    async def begin(self) -> None:
        """Make the cluster without pods."""
        for namespace in NAMESPACES[1:]:
            await self._put(NAMESPACE_OBJECTS, {"metadata": {"name": namespace}})
        for name, value in (
            ("soak-gang", 20_000),
            ("soak-preemptor", soak_kinds.PREEMPTOR_PRIORITY),
        ):
            await self._put(PRIORITY_CLASSES, {"metadata": {"name": name}, "value": value})
        storage = {
            "metadata": {"name": LOCAL},
            "provisioner": "kubernetes.io/no-provisioner",
            "volumeBindingMode": "WaitForFirstConsumer",
        }
        await self._put(STORAGE_CLASSES, storage)
        for number in range(QUOTAS):
            spec = soak_kinds.quota(number, self._rng)
            await self._put(
                ELASTIC_QUOTAS, {"metadata": {"name": f"q{number}"}, "spec": spec}, "default"
            )
        for namespace in NAMESPACES:
            budget = {"maxUnavailable": 1, "selector": {"matchLabels": {"app": "r0"}}}
            await self._put(_BUDGETS, {"metadata": {"name": "soak"}, "spec": budget}, namespace)
        await asyncio.gather(*(self._make_node(number) for number in range(self._wanted)))
        names = self._rng.sample(sorted(self._nodes), min(_VOLUMES, len(self._nodes)))
        self._with_volumes.update(names)
        await asyncio.gather(*(self._make_volume(f"pv-{name}", name) for name in names))

    async def _make_node(self, number: int) -> None:
        name = f"n{number}"
        self._made_nodes = max(self._made_nodes, number + 1)
        await self._put(NODES, soak_kinds.node(number, name))
        # The API server taints new nodes as not ready.
        await self._edit(NODES, name, {"spec": {"taints": soak_kinds.taints(number)}})
        if number % 2 == 0:
            await self._put(NODE_RESOURCE_TOPOLOGIES, soak_kinds.topology(number, name))
        if number % 5 == 0:
            await self._put(DEVICES, soak_kinds.device(name))
        if number % _MEASURED == 0:
            await self._put(NODE_METRICS, {"metadata": {"name": name}})
        self._nodes[name] = number

    async def _make_volume(self, name: str, node: str) -> None:
        expression = {"key": HOST, "operator": "In", "values": [node]}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
        spec = {
            "accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "2Gi"},
            "storageClassName": LOCAL,
            "local": {"path": "/mnt"},
            "nodeAffinity": {"required": terms},
        }
        await self._put(PERSISTENT_VOLUMES, {"metadata": {"name": name}, "spec": spec})
        await self._edit(
            PERSISTENT_VOLUMES, name, {"status": {"phase": "Available"}}, part="status"
        )

    # --- pods ----------------------------------------------------------------------------------

    def _pod_event(self, event: Event[SchedulingPod]) -> None:
        pod, old = event.new, event.old
        meta = pod.metadata
        if pod.spec.node_name and (old is None or not old.spec.node_name):
            self.bound += 1
        if event.change is Change.DELETED:
            return
        if meta.deletion_timestamp is not None and (
            old is None or old.metadata.deletion_timestamp is None
        ):
            self._begin(self._end_pod(meta.namespace, meta.name))

    async def _end_pod(self, namespace: str, name: str) -> None:
        """Play kubelet: a pod that is being deleted has ended after a while."""
        await asyncio.sleep(self._rng.uniform(0.2, 3.0))
        path = f"{PODS.path(namespace=namespace, name=name)}?gracePeriodSeconds=0"
        await self._sure(lambda: self._client.request("DELETE", path))

    async def _come(self, unit: Unit) -> None:
        self._units[unit.name] = unit
        self._count += len(unit.pods)
        for resource, namespace, plain in unit.objects:
            await self._put(resource, plain, namespace)
        for pod in unit.pods:
            await self._put(PODS, pod, unit.namespace)
            self.created += 1
        if unit.gated:
            await asyncio.sleep(self._rng.uniform(0, 10))
            name = unit.pods[0]["metadata"]["name"]
            open_gates = {"spec": {"schedulingGates": None}}
            await self._edit(PODS, name, open_gates, namespace=unit.namespace)

    async def _go(self, unit: Unit) -> None:
        del self._units[unit.name]
        self._count -= len(unit.pods)
        for pod in unit.pods:
            await self._drop(PODS, pod["metadata"]["name"], unit.namespace)
        for resource, namespace, plain in unit.objects:
            name = plain["metadata"]["name"]
            if resource is PERSISTENT_VOLUME_CLAIMS:
                await self._drop_claim(name, namespace)
            else:
                await self._drop(resource, name, namespace)

    async def _drop_claim(self, name: str, namespace: str) -> None:
        """Delete a claim, and make its volume again, empty, as a local provisioner does."""
        path = PERSISTENT_VOLUMES.path()
        await self._drop(PERSISTENT_VOLUME_CLAIMS, name, namespace)
        await self._edit(
            PERSISTENT_VOLUME_CLAIMS, name, {"metadata": {"finalizers": None}}, namespace=namespace
        )
        with suppress(*_UNKNOWN):
            raw = await self._client.request("GET", path)
            for volume in msgspec.json.decode(raw)["items"]:
                if volume["spec"].get("claimRef", {}).get("name") == name:
                    of = volume["metadata"]["name"]
                    await self._drop(PERSISTENT_VOLUMES, of)
                    await self._edit(PERSISTENT_VOLUMES, of, {"metadata": {"finalizers": None}})
                    await self._make_volume(of, of.removeprefix("pv-"))

    async def fill(self) -> None:
        """Make pods until there are as many as wanted."""
        units = []
        while self._count < self._most_pods:
            unit = self._kinds.draw()
            units.append(unit)
            self._units[unit.name] = unit
            self._count += len(unit.pods)
        for unit in units:
            self._count -= len(unit.pods)
        await asyncio.gather(*(self._come(unit) for unit in units))

    async def churn(self, rate: float) -> None:
        """Have `rate` pods come or go each second."""
        while True:
            await self._may_go_on.wait()
            if self._count < self._most_pods * self._rng.uniform(0.9, 1.1):
                unit = self._kinds.draw()
                self._begin(self._come(unit))
            else:
                unit = self._rng.choice(list(self._units.values()))
                self._begin(self._go(unit))
            await asyncio.sleep(len(unit.pods) / rate)

    # --- everything else -----------------------------------------------------------------------

    async def edits(self) -> None:
        """Change something else than pods twice a second."""
        works: tuple[Callable[[], Awaitable[None]], ...] = (
            *(self._measure, self._measure, self._replace_node, self._taint, self._cordon),
            *(self._resize, self._edit_quota, self._reserve, self._break_gpu, self._relabel),
            self._succeed,
        )
        while True:
            await self._may_go_on.wait()
            await asyncio.sleep(0.5)
            self._begin(self._rng.choice(works)())

    def _some_node(self, every: int = 1) -> tuple[str, int]:
        return self._rng.choice([each for each in self._nodes.items() if each[1] % every == 0])

    async def _measure(self) -> None:
        for _ in range(20):
            name, number = self._some_node(_MEASURED)
            share = self._rng.choice((0.1, 0.3, 0.9))
            cpu = round(1000 * share * soak_kinds.CPUS[number % len(soak_kinds.CPUS)])
            usage = {"resources": {"cpu": f"{cpu}m", "memory": "2Gi"}}
            now = format_time(datetime.now(UTC))
            status = {"updateTime": now, "nodeMetric": {"nodeUsage": usage}}
            await self._edit(NODE_METRICS, name, {"status": status}, part="status")

    async def _replace_node(self) -> None:
        name, number = self._some_node()
        if name in self._with_volumes or len(self._nodes) < self._wanted // 2:
            return
        del self._nodes[name]
        self._largest.pop(name, None)
        await self._drop(NODES, name)
        for resource in (NODE_RESOURCE_TOPOLOGIES, DEVICES, NODE_METRICS):
            await self._drop(resource, name)
        await asyncio.sleep(1.0)
        # Play the garbage collector of pods, also for pods that are bound to it late.
        for _ in range(3):
            for pod in list(self.pods.items.values()):
                if pod.spec.node_name == name:
                    self._lost(pod)
                    path = PODS.path(namespace=pod.metadata.namespace, name=pod.metadata.name)
                    body = _patch({"preconditions": {"uid": pod.metadata.uid}})
                    await self._sure(
                        lambda path=path, body=body: self._client.request(  # type: ignore[misc]
                            "DELETE", f"{path}?gracePeriodSeconds=0", body=body
                        )
                    )
            await asyncio.sleep(2.0)
        # As often the same machine comes back as another one.
        await self._make_node(number if self._rng.random() < 0.5 else self._made_nodes)

    def _lost(self, pod: SchedulingPod) -> None:
        gang = pod.metadata.labels.get(GANG_LABEL)
        if gang is not None:
            self._cut.add(f"{pod.metadata.namespace}/{gang}")

    async def _taint(self) -> None:
        name, number = self._some_node()
        extra = [{"key": "soak", "effect": "NoSchedule", "value": str(self._rng.randrange(9))}]
        taints = soak_kinds.taints(number) + (extra if self._rng.random() < 0.5 else [])
        await self._edit(NODES, name, {"spec": {"taints": taints}})

    async def _cordon(self) -> None:
        name, _ = self._some_node()
        await self._edit(NODES, name, {"spec": {"unschedulable": self._rng.random() < 0.3}})

    async def _resize(self) -> None:
        name, number = self._some_node(_RESIZED)
        status = soak_kinds.node(number, name)["status"]
        self._largest[name] = status["allocatable"]
        cpu = soak_kinds.CPUS[number % len(soak_kinds.CPUS)]
        amounts = status["allocatable"] | {"cpu": str(self._rng.choice((cpu, cpu // 2)))}
        await self._edit(NODES, name, {"status": {"allocatable": amounts}}, part="status")

    async def _edit_quota(self) -> None:
        number = self._rng.randrange(QUOTAS)
        spec = soak_kinds.quota(number, self._rng)
        await self._edit(ELASTIC_QUOTAS, f"q{number}", {"spec": spec}, namespace="default")

    async def _reserve(self) -> None:
        if len(self._reservations) >= _RESERVATIONS:
            name = self._reservations.pop(self._rng.randrange(_RESERVATIONS))
            await self._drop(RESERVATIONS, name)
        self._number += 1
        name = f"soak-{self._number}"
        self._reservations.append(name)
        await self._put(RESERVATIONS, soak_kinds.reservation(name, self._rng, self._scheduler))

    async def _break_gpu(self) -> None:
        name, _ = self._some_node(5)
        broken = self._rng.choice((None, self._rng.randrange(GPUS)))
        device = soak_kinds.device(name, unhealthy=broken)
        await self._edit(DEVICES, name, {"spec": device["spec"]})

    async def _relabel(self) -> None:
        name, _ = self._some_node()
        labels = {"size": f"s{self._rng.randrange(4)}", "changed": str(self._rng.random())}
        await self._edit(NODES, name, {"metadata": {"labels": labels}})

    async def _succeed(self) -> None:
        """End a pod that runs, as a job's does."""
        pods = [pod for pod in self.pods.items.values() if pod.spec.node_name]
        if pods:
            pod = self._rng.choice(pods)
            meta = pod.metadata
            self._lost(pod)
            await self._edit(
                PODS,
                meta.name,
                {"status": {"phase": "Succeeded"}},
                part="status",
                namespace=meta.namespace,
            )

    async def volume_controller(self) -> None:
        while True:
            with suppress(*_UNKNOWN):
                await bind_once(self._client, lambda claim, node: False)
            await asyncio.sleep(0.5)

    # --- calm ----------------------------------------------------------------------------------

    def go_on(self) -> None:
        self._may_go_on.set()

    async def calm_down(self) -> None:
        """Begin nothing more, and wait until what was begun is carried out."""
        self._may_go_on.clear()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def seen(self) -> Seen:
        """Return all objects."""

        async def objects(resource: Resource) -> list[Plain]:
            raw = await self._client.request("GET", resource.path())
            items: list[Plain] = msgspec.json.decode(raw)["items"]
            return items

        pods = await objects(PODS)
        gangs = (unit for unit in self._units.values() if unit.least)
        present = {f"{p['metadata']['namespace']}/{p['metadata']['name']}" for p in pods}
        complete = {
            unit.gang: unit.least
            for unit in gangs
            if unit.gang not in self._cut and _keys(unit) <= present
        }
        return Seen(
            nodes=await objects(NODES),
            pods=pods,
            reservations=await objects(RESERVATIONS),
            devices=await objects(DEVICES),
            topologies=await objects(NODE_RESOURCE_TOPOLOGIES),
            metrics=await objects(NODE_METRICS),
            quotas=await objects(ELASTIC_QUOTAS),
            claims=await objects(PERSISTENT_VOLUME_CLAIMS),
            volumes=await objects(PERSISTENT_VOLUMES),
            largest=dict(self._largest),
            complete=complete,
        )


def _keys(unit: Unit) -> set[str]:
    return {f"{unit.namespace}/{pod['metadata']['name']}" for pod in unit.pods}
