"""Random clusters for comparisons: JSON of nodes and of pods that use kube-scheduler's features."""

from __future__ import annotations

from random import Random
from typing import Any

Tree = dict[str, Any]

NAMESPACE_TEAMS = {"default": "a", "other": "a", "apart": "b"}
"""Namespace -> its label "team"."""
RUNTIME_CLASS = "heavy"
"""Of some pods; where there is an API server, it gives them overhead."""
ZONES = ("a", "b", "c")
APPS = ("red", "green", "blue")
_ZONE = "topology.kubernetes.io/zone"
_HOST = "kubernetes.io/hostname"
_MIB = 1 << 20
_IMAGES = {"i.test/large:v1": 900 * _MIB, "i.test/mid:latest": 317 * _MIB, "i.test/small:v2": 12345}


def nodes(random: Random, count: int) -> list[Tree]:
    """Return nodes of odd sizes; some lack a zone, have taints, or are unschedulable."""
    return [_node(random, f"n{number:02}") for number in range(count)]


def _node(random: Random, name: str) -> Tree:
    labels = {_HOST: name, "disk": random.choice(("ssd", "hdd")), "rank": str(random.randint(1, 9))}
    if random.random() < 0.85:
        labels[_ZONE] = random.choice(ZONES)
    taints = []
    if random.random() < 0.25:
        effect = random.choice(("NoSchedule", "NoExecute"))
        taints.append({"key": "kept", "value": random.choice("xy"), "effect": effect})
    for value in "pq":
        if random.random() < 0.3:
            taints.append({"key": f"soft-{value}", "value": value, "effect": "PreferNoSchedule"})
    amounts = {
        "cpu": f"{random.randint(1500, 9000)}m",
        "memory": str(random.randint(3_000, 24_000) * _MIB + random.randint(0, 99_999)),
        "pods": str(random.choice((3, 8, 110))),
        "ephemeral-storage": f"{random.randint(5, 50)}Gi",
    }
    if random.random() < 0.3:
        amounts["test.io/part"] = str(random.randint(1, 4))
    images = [
        {"names": [image], "sizeBytes": size}
        for image, size in _IMAGES.items()
        if random.random() < 0.4
    ]
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": taints, "unschedulable": random.random() < 0.08},
        "status": {"capacity": amounts, "allocatable": amounts, "images": images},
    }


def pod(random: Random, name: str, *, node: str = "", owners: dict[str, Tree]) -> Tree:
    """Return a pod. node: where it runs, or "". owners: app -> owner reference of its ReplicaSet.

    A running pod is small and keeps only affinity, ports and sidecars of what a pod may ask for.
    One in another namespace than the default one has no owner.
    """
    app = random.choice(APPS)
    metadata: Tree = {"name": name, "labels": {"app": app}}
    if random.random() < 0.5:
        metadata["labels"]["version"] = random.choice("12")
    if random.random() < 0.3:
        metadata["namespace"] = random.choice(list(NAMESPACE_TEAMS))
    elif random.random() < 0.4:
        metadata["labels"]["owned"] = app
        metadata["ownerReferences"] = [owners[app]]
    spec: Tree = {
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "containers": [_container(random, f"c{n}", node) for n in range(random.choice((1, 1, 2)))],
        "affinity": {},
    }
    if random.random() < 0.2:
        spec["containers"][0]["ports"] = [_port(random)]
    if random.random() < 0.35:
        spec["affinity"] |= _pod_affinity(random)
    if random.random() < 0.2:
        spec["initContainers"] = [_init_container(random, node)]
    if random.random() < 0.15:
        spec["runtimeClassName"] = RUNTIME_CLASS
    if random.random() < 0.2:
        spec["resources"] = {"requests": _own_requests(random, spec)}
    if node:
        return {"metadata": metadata, "spec": spec | {"nodeName": node}}
    if random.random() < 0.1:
        spec["volumes"] = [{"name": "v", "image": {"reference": random.choice(list(_IMAGES))}}]
    if random.random() < 0.15:
        spec["nodeSelector"] = {"disk": random.choice(("ssd", "hdd"))}
    if random.random() < 0.35:
        spec["affinity"]["nodeAffinity"] = _node_affinity(random)
    spec["tolerations"] = _tolerations(random)
    if random.random() < 0.4:
        spec["topologySpreadConstraints"] = [
            _spread(random, key, app) for key in random.choice(((_ZONE,), (_HOST,), (_ZONE, _HOST)))
        ]
    return {"metadata": metadata, "spec": spec}


def _container(random: Random, name: str, node: str) -> Tree:
    requests: Tree = {}
    most = 700 if node else random.choice((800, 3000, 9000))
    if random.random() < 0.8:
        requests["cpu"] = f"{random.randint(0, most)}m"
    if random.random() < 0.8:
        requests["memory"] = str(random.randint(0, 2 * most) * _MIB)
    if not node and random.random() < 0.08:
        requests["ephemeral-storage"] = "12Gi"
    limits = {}
    if not node and random.random() < 0.08:
        requests["test.io/part"] = limits["test.io/part"] = "1"
    image = random.choice((*_IMAGES, "i.test/mid", "x"))
    return {"name": name, "image": image, "resources": {"requests": requests, "limits": limits}}


def _init_container(random: Random, node: str) -> Tree:
    """Return an init container, half of the time a sidecar; ports count for sidecars alone."""
    container = _container(random, "first", node)
    if random.random() < 0.5:
        container["restartPolicy"] = "Always"
    if random.random() < 0.6:
        container["ports"] = [_port(random)]
    return container


def _own_requests(random: Random, spec: Tree) -> Tree:
    """Return requests of the pod itself, of one or both resources; at least its containers' sum."""
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    requests = [each["resources"]["requests"] for each in containers]
    cpu = sum(int(each.get("cpu", "0m")[:-1]) for each in requests)
    memory = sum(int(each.get("memory", "0")) for each in requests)
    own = {
        "cpu": f"{cpu + random.randint(0, 500)}m",
        "memory": str(memory + random.randint(0, 500) * _MIB),
    }
    return own if random.random() < 0.6 else dict([random.choice(list(own.items()))])


def statuses(random: Random, spec: Tree) -> Tree:
    """Return the status of a pod that is resized: containers, and the pod itself, have other
    amounts of cpu and memory than they ask for, and not everything is known of each."""

    def amounts() -> Tree:
        given = {"cpu": f"{random.randint(0, 900)}m", "memory": str(random.randint(0, 900) * _MIB)}
        return {name: amount for name, amount in given.items() if random.random() < 0.8}

    def resized(status: Tree) -> Tree:
        if random.random() < 0.8:
            status["allocatedResources"] = amounts()
        if random.random() < 0.8:
            status["resources"] = {"requests": amounts()}
        return status

    def of_containers(containers: list[Tree]) -> list[Tree]:
        known: Tree = {"image": "x", "imageID": "", "ready": True, "restartCount": 0}
        return [
            resized({"name": each["name"], **known}) for each in containers if random.random() < 0.8
        ]

    status: Tree = resized({})
    status["containerStatuses"] = of_containers(spec["containers"])
    status["initContainerStatuses"] = of_containers(spec.get("initContainers", []))
    if random.random() < 0.5:
        reason = random.choice(("Infeasible", "Deferred"))
        pending = {"type": "PodResizePending", "status": "True", "reason": reason}
        status["conditions"] = [pending]
    return status


def _port(random: Random) -> Tree:
    port: Tree = {"containerPort": 80, "hostPort": random.choice((8080, 8081))}
    if random.random() < 0.4:
        port["hostIP"] = random.choice(("10.0.0.1", "0.0.0.0"))
    port["protocol"] = random.choice(("TCP", "TCP", "UDP"))
    return port


def _selector(random: Random) -> Tree:
    app = random.choice(APPS)
    if random.random() < 0.5:
        return {"matchLabels": {"app": app}}
    expressions: tuple[Tree, ...] = (
        {"key": "app", "operator": "NotIn", "values": [app]},
        {"key": "app", "operator": "In", "values": random.sample(APPS, 2)},
        {"key": "owned", "operator": "Exists"},
        {"key": "owned", "operator": "DoesNotExist"},
    )
    count = random.choice((0, 1, 1, 2))
    return {"matchExpressions": random.sample(expressions, count)}


def _pod_affinity(random: Random) -> Tree:
    def term() -> Tree:
        made: Tree = {"topologyKey": random.choice((_ZONE, _HOST))}
        # A term without a selector means no pod.
        if random.random() < 0.95:
            made["labelSelector"] = _selector(random)
            if random.random() < 0.2:
                keys = random.choice(("matchLabelKeys", "mismatchLabelKeys"))
                made[keys] = ["version"]
        if random.random() < 0.2:
            made["namespaces"] = random.sample(list(NAMESPACE_TEAMS), random.randint(1, 2))
        if random.random() < 0.3:
            team = {"matchLabels": {"team": random.choice("ab")}}
            made["namespaceSelector"] = random.choice(({}, team, team))
        return made

    kind = random.choice(("podAffinity", "podAntiAffinity"))
    rules: Tree = {}
    if random.random() < 0.4:
        rules["requiredDuringSchedulingIgnoredDuringExecution"] = [term()]
    if not rules or random.random() < 0.5:
        rules["preferredDuringSchedulingIgnoredDuringExecution"] = [
            {"weight": random.randint(1, 100), "podAffinityTerm": term()} for _ in range(2)
        ]
    return {kind: rules}


def _node_affinity(random: Random) -> Tree:
    def term() -> Tree:
        expression = random.choice(
            (
                {"key": "rank", "operator": "Gt", "values": [str(random.randint(1, 6))]},
                {"key": _ZONE, "operator": "In", "values": random.sample(ZONES, 2)},
                {"key": _ZONE, "operator": "NotIn", "values": [random.choice(ZONES)]},
                {"key": "rank", "operator": "Lt", "values": [str(random.randint(3, 8))]},
                {"key": "disk", "operator": random.choice(("Gt", "Lt")), "values": ["0"]},
                {"key": "disk", "operator": "Exists"},
                {"key": _ZONE, "operator": "DoesNotExist"},
            )
        )
        made: Tree = {"matchExpressions": [expression]}
        if random.random() < 0.15:
            made["matchFields"] = _named_nodes(random, "NotIn")["matchFields"]
        return made

    rules: Tree = {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": random.randint(1, 100), "preference": term()} for _ in range(2)
        ]
    }
    required = None
    if random.random() < 0.5:
        required = [term(), term()]
    elif random.random() < 0.4:
        # All of them name nodes, or one does not.
        required = [_named_nodes(random), random.choice((_named_nodes(random), term()))]
    if required is not None:
        rules["requiredDuringSchedulingIgnoredDuringExecution"] = {"nodeSelectorTerms": required}
    return rules


def _named_nodes(random: Random, operator: str = "In") -> Tree:
    name = f"n{random.randrange(12):02}"
    return {"matchFields": [{"key": "metadata.name", "operator": operator, "values": [name]}]}


def _tolerations(random: Random) -> list[Tree]:
    choices: tuple[Tree, ...] = (
        {"key": "kept", "operator": "Equal", "value": "x"},
        {"key": "kept", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "soft-p", "operator": "Exists"},
        {"key": "soft-q", "operator": "Exists", "effect": "PreferNoSchedule"},
    )
    return [each for each in choices if random.random() < 0.25]


def _spread(random: Random, key: str, app: str) -> Tree:
    constraint: Tree = {
        "maxSkew": random.randint(1, 3),
        "topologyKey": key,
        "whenUnsatisfiable": random.choice(("DoNotSchedule", "ScheduleAnyway")),
        "labelSelector": {"matchLabels": {"app": app}},
        "nodeTaintsPolicy": random.choice(("Honor", "Ignore")),
        "nodeAffinityPolicy": random.choice(("Honor", "Ignore")),
    }
    if constraint["whenUnsatisfiable"] == "DoNotSchedule" and random.random() < 0.3:
        constraint["minDomains"] = random.randint(1, 4)
    if random.random() < 0.2:
        constraint["matchLabelKeys"] = ["version"]
    return constraint


def profile(random: Random) -> Tree:
    """Return plugins and arguments of a profile that scores otherwise than the default one."""
    resources = [
        {"name": name, "weight": random.randint(1, 5)}
        for name in random.sample(("cpu", "memory", "ephemeral-storage", "test.io/part"), 3)
    ]
    points = [{"utilization": 10 * u, "score": random.randint(0, 10)} for u in (0, 4, 10)]
    strategy = random.choice(
        (
            {"type": "MostAllocated"},
            {"type": "LeastAllocated"},
            {"type": "RequestedToCapacityRatio", "requestedToCapacityRatio": {"shape": points}},
        )
    )
    even = [{"name": each["name"], "weight": 1} for each in resources]
    constraint = {"maxSkew": 2, "topologyKey": _ZONE, "whenUnsatisfiable": "ScheduleAnyway"}
    spread: tuple[Tree, ...] = (
        {"defaultingType": "List", "defaultConstraints": [constraint]},
        {"defaultingType": "List"},
        {"defaultingType": "System"},
    )
    arguments: Tree = {
        "NodeResourcesFit": {"scoringStrategy": {**strategy, "resources": resources}},
        "NodeResourcesBalancedAllocation": {"resources": even},
        "PodTopologySpread": random.choice(spread),
        "InterPodAffinity": {
            "hardPodAffinityWeight": random.choice((0, 7, 100)),
            "ignorePreferredTermsOfExistingPods": random.random() < 0.5,
        },
    }
    if random.random() < 0.3:
        arguments["NodeResourcesFit"]["ignoredResources"] = ["test.io/part"]
    if random.random() < 0.4:
        added = {"nodeSelectorTerms": [_named_nodes(random, "NotIn")]}
        key = "requiredDuringSchedulingIgnoredDuringExecution"
        arguments["NodeAffinity"] = {"addedAffinity": {key: added}}
    weighted = random.sample(
        ("NodeResourcesFit", "InterPodAffinity", "ImageLocality", "TaintToleration"), 3
    )
    return {
        "plugins": {
            "score": {
                "disabled": [{"name": name} for name in weighted],
                # One of them does not score at all.
                "enabled": [{"name": n, "weight": random.randint(1, 9)} for n in weighted[:2]],
            }
        },
        "pluginConfig": [{"name": name, "args": args} for name, args in arguments.items()],
    }
