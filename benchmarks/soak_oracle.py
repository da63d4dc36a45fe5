"""What must hold in a cluster that a scheduler filled, checked from the API server's objects alone.

Slow and obvious, and without the scheduler's code: each check goes over plain objects and returns a
sentence for each violation. `room` knows the kinds of pods of `benchmarks.soak_kinds` and no
others. Where it cannot be certain that a node takes a pod (a node whose use is measured, a quota
beyond its minimum), it does not count the node.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from apis.cpuset import CpuSet
from apis.quantity import parse_quantity

Plain = dict[str, Any]

CPUS_ANNOTATION: Final = "scheduling.koordinator.sh/resource-status"
DEVICES_ANNOTATION: Final = "scheduling.koordinator.sh/device-allocated"
RESERVED_ANNOTATION: Final = "scheduling.koordinator.sh/reservation-allocated"
QOS_LABEL: Final = "koordinator.sh/qosClass"
QUOTA_LABEL: Final = "quota.scheduling.koordinator.sh/name"
GANG_LABEL: Final = "pod-group.scheduling.sigs.k8s.io"
_CORE: Final = "koordinator.sh/gpu-core"
_RATIO: Final = "koordinator.sh/gpu-memory-ratio"
_WHOLE_GPU: Final = 100


@dataclass(frozen=True)
class Seen:
    """The objects of a moment at which nothing changes, as the API server has them.

    largest: the amounts that a node had at most, for nodes that were made smaller. complete: the
    names of the gangs of which no member was ever deleted or evicted, and their `minMember`.
    """

    nodes: list[Plain]
    pods: list[Plain]
    reservations: list[Plain] = field(default_factory=list)
    devices: list[Plain] = field(default_factory=list)
    topologies: list[Plain] = field(default_factory=list)
    metrics: list[Plain] = field(default_factory=list)
    quotas: list[Plain] = field(default_factory=list)
    claims: list[Plain] = field(default_factory=list)
    volumes: list[Plain] = field(default_factory=list)
    largest: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    complete: Mapping[str, int] = field(default_factory=dict)


def key_of(of: Plain) -> str:
    meta = of["metadata"]
    return f"{meta['namespace']}/{meta['name']}" if meta.get("namespace") else str(meta["name"])


def amounts(resources: Mapping[str, Any] | None) -> Counter[str]:
    """Return the amounts of a resource list in thousandths."""
    found = {name: parse_quantity(text).milli_value() for name, text in (resources or {}).items()}
    return Counter(found)


def requests(pod: Plain) -> Counter[str]:
    """Return what the containers of a pod request, and one pod. No init containers, no overhead."""
    total: Counter[str] = Counter(pods=1000)
    for container in pod["spec"]["containers"]:
        total.update(amounts(container.get("resources", {}).get("requests")))
    return total


def is_over(pod: Plain) -> bool:
    """Return whether the pod has ended, so that it uses nothing any more."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def labels(of: Plain) -> Mapping[str, str]:
    found: Mapping[str, str] = of["metadata"].get("labels") or {}
    return found


def annotation(of: Plain, name: str) -> Any:
    """Return the decoded JSON of an annotation, None if it is not there."""
    text = (of["metadata"].get("annotations") or {}).get(name)
    return None if text is None else json.loads(text)


def bound(seen: Seen) -> Iterator[tuple[str, Plain]]:
    """Yield the pods that use something of a node: the node's name, the pod."""
    for pod in seen.pods:
        node = pod["spec"].get("nodeName")
        if node and not is_over(pod):
            yield node, pod


def waiting(seen: Seen) -> Iterator[Plain]:
    """Yield the pods without a node that a scheduler is to give one."""
    for pod in seen.pods:
        spec = pod["spec"]
        gone = is_over(pod) or pod["metadata"].get("deletionTimestamp")
        if not spec.get("nodeName") and not gone and not spec.get("schedulingGates"):
            yield pod


# --- nothing is given twice ----------------------------------------------------------------------


def used(seen: Seen) -> dict[str, Counter[str]]:
    """Return what is in use on each node: requests of its pods, and what reservations keep free.

    A reservation counts with the larger of what it reserves and what its pods use.
    """
    result: dict[str, Counter[str]] = defaultdict(Counter)
    inside: dict[str, Counter[str]] = defaultdict(Counter)
    for node, pod in bound(seen):
        of = annotation(pod, RESERVED_ANNOTATION)
        if of is not None:
            inside[of["uid"]].update(requests(pod))
        else:
            result[node].update(requests(pod))
    for each in seen.reservations:
        status = each.get("status", {})
        uses = inside.pop(each["metadata"]["uid"], Counter())
        if status.get("phase") == "Available":
            keeps = amounts(status.get("allocatable"))
            # The reservation itself counts as a pod until one takes its place.
            keeps["pods"] = 1000
            result[status["nodeName"]].update(keeps | uses)
        elif status.get("nodeName"):
            result[status["nodeName"]].update(uses)
    # Pods of reservations that are gone.
    of_pods = {
        annotation(pod, RESERVED_ANNOTATION)["uid"]: node
        for node, pod in bound(seen)
        if annotation(pod, RESERVED_ANNOTATION) is not None
    }
    for uid, uses in inside.items():
        result[of_pods[uid]].update(uses)
    return result


def overbooked(seen: Seen) -> list[str]:
    """Return the nodes on which more is requested than they ever had."""
    sizes = {node["metadata"]["name"]: node["status"]["allocatable"] for node in seen.nodes}
    found = []
    for node, uses in sorted(used(seen).items()):
        if node not in sizes:
            continue
        has = amounts(sizes[node]) | amounts(seen.largest.get(node))
        for name, amount in sorted(uses.items()):
            if amount > has[name]:
                found.append(f"node {node}: {amount} thousandths of {name} in use of {has[name]}")
    return found


def cpus_twice(seen: Seen) -> list[str]:
    """Return the CPUs that two pods of one node have, and those that the node does not have."""
    exist = {each["metadata"]["name"]: cpu_ids(each) for each in seen.topologies}
    owners: dict[tuple[str, int], str] = {}
    found = []
    for node, pod in bound(seen):
        status = annotation(pod, CPUS_ANNOTATION)
        for cpu in CpuSet.parse(status.get("cpuset", "")) if status else ():
            other = owners.setdefault((node, cpu), key_of(pod))
            if other != key_of(pod):
                found.append(f"node {node}: CPU {cpu} belongs to {other} and {key_of(pod)}")
            if node in exist and cpu not in exist[node]:
                found.append(f"node {node}: CPU {cpu} of {key_of(pod)} does not exist")
    return found


def cpu_ids(topology: Plain) -> frozenset[int]:
    """Return the ids of a node's CPUs, from its NodeResourceTopology."""
    detail = annotation(topology, "node.koordinator.sh/cpu-topology") or {"detail": []}
    return frozenset(cpu["id"] for cpu in detail["detail"])


def gpu_use(seen: Seen) -> dict[tuple[str, int], Counter[str]]:
    """Return what pods have of each GPU, by node and minor."""
    result: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for node, pod in bound(seen):
        for each in (annotation(pod, DEVICES_ANNOTATION) or {}).get("gpu", ()):
            result[node, each["minor"]].update(amounts(each["resources"]))
    return result


def gpus_twice(seen: Seen) -> list[str]:
    """Return the GPUs of which pods have more than there is, and those that do not exist."""
    exist = {
        (each["metadata"]["name"], device["minor"]): amounts(device["resources"])
        for each in seen.devices
        for device in each["spec"]["devices"]
        if device["type"] == "gpu"
    }
    names = {each["metadata"]["name"] for each in seen.nodes}
    found = []
    for (node, minor), uses in sorted(gpu_use(seen).items()):
        has = exist.get((node, minor))
        if node not in names:
            continue
        if has is None:
            found.append(f"node {node}: GPU {minor} does not exist and is in use")
            continue
        for name, amount in sorted(uses.items()):
            if amount > has[name]:
                found.append(f"node {node}: GPU {minor} gives {amount} of {has[name]} {name}")
    return found


def without_exact(seen: Seen) -> list[str]:
    """Return bound pods that lack the CPUs or the GPUs that they asked for."""
    topologies = {each["metadata"]["name"] for each in seen.topologies}
    found = []
    for node, pod in bound(seen):
        if pod["spec"].get("schedulerName") == "none":
            continue
        asked = requests(pod)
        status = annotation(pod, CPUS_ANNOTATION) or {}
        cpus = len(tuple(CpuSet.parse(status.get("cpuset", ""))))
        pinned = labels(pod).get(QOS_LABEL) == "LSR" and node in topologies
        if pinned and cpus * 1000 != asked["cpu"]:
            found.append(f"{key_of(pod)}: {cpus} CPUs for {asked['cpu']} milli-cores")
        given = (annotation(pod, DEVICES_ANNOTATION) or {}).get("gpu", ())
        core = sum(amounts(each["resources"])[_CORE] for each in given)
        if core != asked[_CORE]:
            found.append(f"{key_of(pod)}: {core} of {asked[_CORE]} {_CORE}")
    return found


def cut_gangs(seen: Seen) -> list[str]:
    """Return the gangs of which some members are bound, but fewer than they need."""
    counts: Counter[str] = Counter()
    for _, pod in bound(seen):
        gang = labels(pod).get(GANG_LABEL)
        if gang is not None:
            counts[f"{pod['metadata']['namespace']}/{gang}"] += 1
    return [
        f"gang {gang}: {counts[gang]} members are bound, it needs {least}"
        for gang, least in sorted(seen.complete.items())
        if 0 < counts[gang] < least
    ]


def ports_twice(seen: Seen) -> list[str]:
    """Return the host ports that two pods of one node have."""
    owners: dict[tuple[str, int], str] = {}
    found = []
    for node, pod in bound(seen):
        for port in host_ports(pod):
            other = owners.setdefault((node, port), key_of(pod))
            if other != key_of(pod):
                found.append(f"node {node}: port {port} belongs to {other} and {key_of(pod)}")
    return found


def host_ports(pod: Plain) -> list[int]:
    ports = (port for each in pod["spec"]["containers"] for port in each.get("ports", ()))
    return [port["hostPort"] for port in ports if port.get("hostPort")]


def violations(seen: Seen) -> list[str]:
    """Return all that is given twice, beyond what there is, or in part."""
    checks = (overbooked, cpus_twice, gpus_twice, without_exact, cut_gangs, ports_twice)
    return [text for check in checks for text in check(seen)]


# --- every pod that waits has no room ------------------------------------------------------------


class Room:
    """Finds nodes that certainly take a pod."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._used = used(seen)
        self._gpus = gpu_use(seen)
        self._on: dict[str, list[Plain]] = defaultdict(list)
        for node, pod in bound(seen):
            self._on[node].append(pod)
        for pod in waiting(seen):
            node = pod.get("status", {}).get("nominatedNodeName")
            if node:
                self._used[node].update(requests(pod))
        measured = {each["metadata"]["name"] for each in seen.metrics}
        self._nodes = [each for each in seen.nodes if each["metadata"]["name"] not in measured]
        self._cpus = {each["metadata"]["name"]: cpu_ids(each) for each in seen.topologies}
        self._devices = {each["metadata"]["name"]: each for each in seen.devices}
        self._quotas = {each["metadata"]["name"]: each for each in seen.quotas}
        self._claims = {key_of(each): each for each in seen.claims}
        self._volumes = {each["metadata"]["name"]: each for each in seen.volumes}
        self._quota_used: dict[str, Counter[str]] = defaultdict(Counter)
        for _, pod in bound(seen):
            if quota := labels(pod).get(QUOTA_LABEL):
                self._quota_used[quota].update(requests(pod))

    def stuck(self) -> list[str]:
        """Return the pods that wait although a node takes them. Members of gangs are left out."""
        found = []
        for pod in waiting(self._seen):
            if GANG_LABEL in labels(pod) or not self._within_quota(pod):
                continue
            node = next((name for name in self.nodes_for(pod)), None)
            if node is not None:
                found.append(f"{key_of(pod)} waits, although {node} has room for it")
        return found

    def nodes_for(self, pod: Plain) -> Iterator[str]:
        """Yield the nodes that take a pod."""
        skew = self._zones_within_skew(pod)
        for node in self._nodes:
            name, has = node["metadata"]["name"], amounts(node["status"]["allocatable"])
            zone = labels(node).get("topology.kubernetes.io/zone")
            if (
                not node["spec"].get("unschedulable")
                and all(tolerates(pod, taint) for taint in node["spec"].get("taints") or ())
                and (pod["spec"].get("nodeSelector") or {}).items() <= labels(node).items()
                and all(
                    self._used[name][resource] + amount <= has[resource]
                    for resource, amount in requests(pod).items()
                )
                and (skew is None or zone in skew)
                and self._is_apart(pod, name)
                and self._has_cpus(pod, name)
                and self._has_gpus(pod, name)
                and self._has_volume(pod, node)
                and not set(host_ports(pod)) & {p for o in self._on[name] for p in host_ports(o)}
            ):
                yield name

    def _within_quota(self, pod: Plain) -> bool:
        """Return whether the minimum of the pod's quota has room, which it always may use."""
        name = labels(pod).get(QUOTA_LABEL)
        if name is None:
            return True
        quota = self._quotas.get(name)
        if quota is None:
            return False
        least, uses = amounts(quota["spec"]["min"]), self._quota_used[name]
        asked = requests(pod)
        return all(uses[each] + asked[each] <= amount for each, amount in least.items())

    def _is_apart(self, pod: Plain, node: str) -> bool:
        return not any(
            selects(of, other) or selects(terms, pod)
            for other in self._on[node]
            if other["metadata"]["namespace"] == pod["metadata"]["namespace"]
            for of, terms in ((anti_affinity(pod), anti_affinity(other)),)
        )

    def _zones_within_skew(self, pod: Plain) -> set[str] | None:
        """Return the zones that a hard spread over zones lets a pod go to, None without one."""
        for each in pod["spec"].get("topologySpreadConstraints", ()):
            if each["whenUnsatisfiable"] != "DoNotSchedule":
                continue
            counts: Counter[str] = Counter()
            zones = {}
            for node in self._seen.nodes:
                zone = labels(node).get(each["topologyKey"])
                if zone is not None:
                    zones[node["metadata"]["name"]] = zone
            for node_name, others in self._on.items():
                for other in others:
                    if (
                        node_name in zones
                        and other["metadata"]["namespace"] == pod["metadata"]["namespace"]
                        and not other["metadata"].get("deletionTimestamp")
                        and selects(each["labelSelector"], other)
                    ):
                        counts[zones[node_name]] += 1
            least = min(counts[zone] for zone in zones.values())
            return {z for z in zones.values() if counts[z] + 1 - least <= each["maxSkew"]}
        return None

    def _has_cpus(self, pod: Plain, node: str) -> bool:
        if labels(pod).get(QOS_LABEL) != "LSR":
            return True
        taken = {
            cpu
            for other in self._on[node]
            for cpu in CpuSet.parse((annotation(other, CPUS_ANNOTATION) or {}).get("cpuset", ""))
        }
        free = self._cpus.get(node, frozenset()) - taken
        return len(free) * 1000 >= requests(pod)["cpu"]

    def _has_gpus(self, pod: Plain, node: str) -> bool:
        asked = requests(pod)[_CORE] // 1000
        if not asked:
            return True
        device = self._devices.get(node)
        healthy = [each for each in device["spec"]["devices"] if each["health"]] if device else []
        if asked < _WHOLE_GPU:
            room = (_WHOLE_GPU - asked) * 1000
            return any(
                max(self._gpus[node, each["minor"]][_CORE], self._gpus[node, each["minor"]][_RATIO])
                <= room
                for each in healthy
            )
        unused = [each for each in healthy if not self._gpus[node, each["minor"]]]
        return len(unused) * _WHOLE_GPU >= asked

    def _has_volume(self, pod: Plain, node: Plain) -> bool:
        for each in pod["spec"].get("volumes", ()):
            source = each.get("persistentVolumeClaim")
            if source is None:
                continue
            claim = self._claims.get(f"{pod['metadata']['namespace']}/{source['claimName']}")
            if claim is None or claim["metadata"].get("deletionTimestamp"):
                return False
            bound_to = claim["spec"].get("volumeName")
            volumes = [self._volumes[bound_to]] if bound_to in self._volumes else []
            if not bound_to:
                volumes = [
                    volume
                    for volume in self._volumes.values()
                    if volume["spec"]["storageClassName"] == claim["spec"]["storageClassName"]
                    and volume.get("status", {}).get("phase") == "Available"
                    and not volume["spec"].get("claimRef")
                    and not volume["metadata"].get("deletionTimestamp")
                ]
            if not any(node["metadata"]["name"] in nodes_of_volume(v) for v in volumes):
                return False
        return True


def nodes_of_volume(volume: Plain) -> Iterable[str]:
    """Return the nodes of a local volume."""
    (term,) = volume["spec"]["nodeAffinity"]["required"]["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    values: list[str] = expression["values"]
    return values


def anti_affinity(pod: Plain) -> Plain | None:
    """Return the selector of the pods that a pod keeps off its node, None if there is none."""
    of = (pod["spec"].get("affinity") or {}).get("podAntiAffinity") or {}
    for term in of.get("requiredDuringSchedulingIgnoredDuringExecution", ()):
        selector: Plain = term["labelSelector"]
        return selector
    return None


def selects(selector: Plain | None, pod: Plain) -> bool:
    """Return whether a selector, of equal labels only, selects a pod."""
    return selector is not None and selector["matchLabels"].items() <= labels(pod).items()


def tolerates(pod: Plain, taint: Plain) -> bool:
    """Return whether a taint does not keep a pod from a node."""
    if taint["effect"] == "PreferNoSchedule":
        return True
    return any(
        (not each.get("key") or each["key"] == taint["key"])
        and each.get("effect") in (None, "", taint["effect"])
        and (each.get("operator") == "Exists" or each.get("value", "") == taint.get("value", ""))
        for each in pod["spec"].get("tolerations", ())
    )
