"""Strategic merge: a table of cases, which kubectl confirms."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from apis.errors import InputError
from apis.profile import ClusterColocationProfile
from cluster.webhook.colocation_profile import patched
from cluster.webhook.plain import PodShape
from cluster.webhook.strategic import PatchError, strategic_merge
from tests.beds import kubernetes
from tests.cluster.admission import convert
from tests.conftest import require


def named(names: str, **members: Any) -> list[dict[str, Any]]:
    """Return one element for each letter, each with the same other members."""
    return [{"name": name, **members} for name in names]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # title: members of the pod's spec before, of the patch, and after
    "a member is set, replaced, removed": (
        {"hostname": "h", "subdomain": "s"},
        {"hostname": "g", "subdomain": None, "schedulerName": "k", "nodeName": None},
        {"hostname": "g", "schedulerName": "k"},
    ),
    "objects merge at every depth": (
        {"securityContext": {"seLinuxOptions": {"level": "l", "role": "r"}, "runAsUser": 1}},
        {"securityContext": {"seLinuxOptions": {"level": "m", "role": None}, "fsGroup": 2}},
        {"securityContext": {"seLinuxOptions": {"level": "m"}, "runAsUser": 1, "fsGroup": 2}},
    ),
    "a list without a merge key is replaced": (
        {"tolerations": [{"key": "a"}, {"key": "b"}]},
        {"tolerations": [{"key": "c"}]},
        {"tolerations": [{"key": "c"}]},
    ),
    "an object in the place of a list": (
        {"tolerations": [{"key": "a"}]},
        {"tolerations": {}},
        {"tolerations": {}},
    ),
    "new elements run before the others": (
        {"initContainers": named("ab")},
        {"initContainers": named("x")},
        {"initContainers": named("xab")},
    ),
    "several new elements keep the order of the patch": (
        {"initContainers": named("a")},
        {"initContainers": named("zyx")},
        {"initContainers": named("zyxa")},
    ),
    "an element of the patch keeps those that stood before it": (
        {"initContainers": named("abc")},
        {"initContainers": [{"name": "b", "image": "i"}, {"name": "x"}]},
        {"initContainers": [{"name": "a"}, {"name": "b", "image": "i"}, *named("xc")]},
    ),
    "one that stood before a later element of the patch waits for it": (
        {"initContainers": named("abcd")},
        {"initContainers": named("xc")},
        {"initContainers": named("xabcd")},
    ),
    "the patch's order wins over the one that was": (
        {"initContainers": named("abc")},
        {"initContainers": named("ca")},
        {"initContainers": named("bca")},
    ),
    "an element merges member by member": (
        {"containers": [{"name": "a", "image": "i", "args": ["p"], "env": named("X", value="1")}]},
        {"containers": [{"name": "a", "args": ["q"], "env": [*named("XY", value="2")]}]},
        {"containers": [{"name": "a", "image": "i", "args": ["q"], "env": named("XY", value="2")}]},
    ),
    "elements are known by the key of their list": (
        {
            "containers": [
                {
                    "name": "a",
                    "ports": [{"containerPort": 1}, {"containerPort": 2}],
                    "volumeMounts": [{"mountPath": "/a", "name": "v"}],
                    "volumeDevices": [{"devicePath": "/d", "name": "v"}],
                }
            ],
            "hostAliases": [{"ip": "1.1.1.1", "hostnames": ["a"]}],
            "topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1}],
        },
        {
            "containers": [
                {
                    "name": "a",
                    "ports": [{"containerPort": 2, "name": "web"}],
                    "volumeMounts": [{"mountPath": "/b", "name": "v"}],
                    "volumeDevices": [{"devicePath": "/d", "name": "w"}],
                }
            ],
            "hostAliases": [{"ip": "1.1.1.1", "hostnames": ["b"]}],
            "topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 2}],
        },
        {
            "containers": [
                {
                    "name": "a",
                    "ports": [{"containerPort": 1}, {"containerPort": 2, "name": "web"}],
                    "volumeMounts": [
                        {"mountPath": "/b", "name": "v"},
                        {"mountPath": "/a", "name": "v"},
                    ],
                    "volumeDevices": [{"devicePath": "/d", "name": "w"}],
                }
            ],
            "hostAliases": [{"ip": "1.1.1.1", "hostnames": ["b"]}],
            "topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 2}],
        },
    ),
    "more lists that merge by name": (
        {
            "volumes": named("a", emptyDir={}),
            "imagePullSecrets": named("a"),
            "schedulingGates": named("a"),
            "resourceClaims": named("a"),
            "ephemeralContainers": named("a"),
        },
        {
            "volumes": named("b", emptyDir={}),
            "imagePullSecrets": named("b"),
            "schedulingGates": named("b"),
            "resourceClaims": named("b"),
            "ephemeralContainers": named("b"),
        },
        {
            "volumes": named("ba", emptyDir={}),
            "imagePullSecrets": named("ba"),
            "schedulingGates": named("ba"),
            "resourceClaims": named("ba"),
            "ephemeralContainers": named("ba"),
        },
    ),
    "an element is deleted": (
        {"containers": named("abc")},
        {"containers": [{"name": "b", "$patch": "delete"}, {"name": "x", "$patch": "delete"}]},
        {"containers": named("ac")},
    ),
    "a deleted element and a new one": (
        {"containers": named("abc")},
        {"containers": [{"name": "a", "$patch": "delete"}, {"name": "x"}]},
        {"containers": named("xbc")},
    ),
    "a list is replaced as a whole": (
        {"containers": named("abc")},
        {"containers": [{"$patch": "replace"}, *named("xa")]},
        {"containers": named("xa")},
    ),
    "a directive of the replaced list's elements takes them away": (
        {"containers": named("abc")},
        {"containers": [{"name": "y", "$patch": "replace"}, *named("xa")]},
        {"containers": named("xa")},
    ),
    "a new list leaves its directives out": (
        {},
        {"containers": [{"$patch": "replace"}, {"name": "a", "$patch": "delete"}, {"name": "b"}]},
        {"containers": named("b")},
    ),
    "a new object with a directive is left out": (
        {"hostname": "h"},
        {"securityContext": {"runAsUser": 1, "$patch": "replace"}},
        {"hostname": "h"},
    ),
    "a new object leaves its nulls and directives out at every depth": (
        {},
        {
            "securityContext": {
                "runAsUser": 1,
                "fsGroup": None,
                "seLinuxOptions": {"level": "x", "$patch": "replace"},
                "windowsOptions": {"hostProcess": None},
            }
        },
        {"securityContext": {"runAsUser": 1, "windowsOptions": {}}},
    ),
    "a new element leaves its nulls out": (
        {"containers": named("a")},
        {"containers": [{"name": "b", "image": None, "env": named("X", value=None)}]},
        {"containers": [{"name": "b", "env": named("X")}, {"name": "a"}]},
    ),
    "an object is replaced as a whole": (
        {"securityContext": {"runAsUser": 1}},
        {"securityContext": {"fsGroup": 2, "runAsGroup": None, "$patch": "replace"}},
        {"securityContext": {"fsGroup": 2}},
    ),
    "an object is emptied": (
        {"securityContext": {"runAsUser": 1}},
        {"securityContext": {"fsGroup": 2, "$patch": "delete"}},
        {"securityContext": {}},
    ),
    "only named members are retained": (
        {"volumes": [{"name": "a", "emptyDir": {}}]},
        {
            "volumes": [
                {"name": "a", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/x"}}
            ]
        },
        {"volumes": [{"name": "a", "hostPath": {"path": "/x"}}]},
    ),
    "an order is given": (
        {"initContainers": named("abc")},
        {
            "$setElementOrder/initContainers": named("ca"),
            "initContainers": [{"name": "a", "image": "n"}],
        },
        {"initContainers": [*named("bc"), {"name": "a", "image": "n"}]},
    ),
    "an order alone": (
        {"initContainers": named("abc")},
        {"$setElementOrder/initContainers": named("cba")},
        {"initContainers": named("cba")},
    ),
    "an order for a new list": (
        {},
        {"$setElementOrder/initContainers": named("abc"), "initContainers": named("ac")},
        {"initContainers": named("ac")},
    ),
    "an order for nothing": ({}, {"$setElementOrder/initContainers": named("abc")}, {}),
}

REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an element without its key": (
        {"containers": named("a")},
        {"containers": [{"image": "i"}]},
        ".spec.containers: an element does not name its name",
    ),
    "an element that is a text": (
        {"containers": named("a")},
        {"containers": ["a"]},
        ".spec.containers: expected objects with name, found 'a'",
    ),
    "an unknown directive": (
        {},
        {"$patch": "merge"},
        ".spec: $patch is 'merge', not replace or delete",
    ),
    "an unknown directive of an element": (
        {"containers": named("a")},
        {"containers": [{"name": "a", "$patch": "merge"}]},
        ".spec.containers: $patch 'merge' is not possible for an element",
    ),
    "a deletion of nothing in particular": (
        {"containers": named("a")},
        {"containers": [{"$patch": "delete"}]},
        ".spec.containers: an element does not name its name",
    ),
    "retained members that do not hold the patch's own": (
        {"volumes": named("a", emptyDir={})},
        {"volumes": [{"name": "a", "$retainKeys": ["name"], "hostPath": {}}]},
        ".spec.volumes.$retainKeys: does not list hostPath",
    ),
    "retained members that are not lists": (
        {"volumes": named("a", emptyDir={})},
        {"volumes": [{"name": "a", "$retainKeys": "name"}]},
        ".spec.volumes.$retainKeys: expected a list of member names",
    ),
    "an order that leaves an element out": (
        {"initContainers": named("ab")},
        {"$setElementOrder/initContainers": named("a"), "initContainers": named("b")},
        "must contain the elements of the patch in their order",
    ),
    "an order that is not the patch's": (
        {"initContainers": named("ab")},
        {"$setElementOrder/initContainers": named("ab"), "initContainers": named("ba")},
        "must contain the elements of the patch in their order",
    ),
}

FINALIZERS: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    "texts are joined": (["a", "b"], {"finalizers": ["z", "b"]}, ["z", "a", "b"]),
    "texts are taken away": (
        ["a", "b", "c"],
        {"$deleteFromPrimitiveList/finalizers": ["b", "x"]},
        ["a", "c"],
    ),
}


@pytest.mark.parametrize("title", CASES)
def test_a_patch_merges_into_a_pod(title: str) -> None:
    before, patch, after = CASES[title]
    untouched = json.dumps([before, patch])
    assert strategic_merge({"spec": before}, {"spec": patch}) == {"spec": after}
    assert json.dumps([before, patch]) == untouched


@pytest.mark.parametrize("title", REFUSED)
def test_an_invalid_strategic_patch_is_refused(title: str) -> None:
    before, patch, problem = REFUSED[title]
    with pytest.raises(PatchError) as refused:
        strategic_merge({"spec": before}, {"spec": patch})
    assert problem in str(refused.value)


@pytest.mark.parametrize("title", FINALIZERS)
def test_finalizers_merge_as_texts(title: str) -> None:
    before, patch, after = FINALIZERS[title]
    got = strategic_merge({"metadata": {"finalizers": before}}, {"metadata": patch})
    assert got == {"metadata": {"finalizers": after}}


@pytest.mark.parametrize(
    "patch", [{"finalizers": [{}]}, {"$deleteFromPrimitiveList/finalizers": 1}]
)
def test_finalizers_are_texts(patch: dict[str, Any]) -> None:
    with pytest.raises(PatchError, match="expected a list of texts"):
        strategic_merge({"metadata": {"finalizers": ["a"]}}, {"metadata": patch})


def nested(depth: int) -> Any:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("patch", "problem"),
    [
        (["x"], "expected an object"),
        ({"spec": {"containers": [{}]}}, "does not name its name"),
        ({"spec": nested(5000)}, "nested too deep"),
        (
            {"spec": {"containers": "x"}},
            "spec.containers: Expected `array | null`, got `str`",
        ),
        ({"metadata": {"labels": {"a": 1}}}, "metadata.labels[...]: Expected `str`, got `int`"),
    ],
)
def test_a_profile_with_a_bad_patch_is_named(patch: Any, problem: str) -> None:
    plain = {"metadata": {"name": "odd"}, "spec": {"patch": patch}}
    profile: ClusterColocationProfile = convert(plain, ClusterColocationProfile)
    with pytest.raises(InputError) as refused:
        patched({"spec": {"containers": named("a")}}, profile, PodShape)
    text = str(refused.value)
    assert text.startswith("ClusterColocationProfile odd: spec.patch") and problem in text


# --- the judge ---------------------------------------------------------------------------------


def by_kubectl(folder: Path, pod: dict[str, Any], patch: dict[str, Any]) -> Any:
    """Return the pod that kubectl makes of a patch, or None where it refuses."""
    kubectl = kubernetes.kubectl()
    require(kubectl, "needs kubectl: apt-get install kubernetes-client", tier="kubectl")
    file = folder / "pod.json"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", **pod}))
    command = [
        str(kubectl),
        "patch",
        "--local",
        f"--filename={file}",
        "--type=strategic",
        "-o=json",
    ]
    done = subprocess.run(
        [*command, "-p", json.dumps(patch)], capture_output=True, text=True, timeout=60
    )
    return json.loads(done.stdout) if done.returncode == 0 else None


def without_nulls(value: Any) -> Any:
    """Return what a typed decoder sees: null members are absent."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("title", CASES)
def test_kubectl_merges_alike(title: str, tmp_path: Path) -> None:
    before, patch, after = CASES[title]
    metadata = {"metadata": {"name": "p"}}
    got = by_kubectl(tmp_path, {**metadata, "spec": before}, {"spec": patch})
    assert without_nulls(got)["spec"] == after


@pytest.mark.parametrize("title", REFUSED)
def test_kubectl_refuses_alike(title: str, tmp_path: Path) -> None:
    before, patch, _ = REFUSED[title]
    pod = {"metadata": {"name": "p"}, "spec": before}
    assert by_kubectl(tmp_path, pod, {"spec": patch}) is None


@pytest.mark.parametrize("title", FINALIZERS)
def test_kubectl_merges_finalizers_alike(title: str, tmp_path: Path) -> None:
    before, patch, after = FINALIZERS[title]
    pod = {"metadata": {"name": "p", "finalizers": before}, "spec": {}}
    assert by_kubectl(tmp_path, pod, {"metadata": patch})["metadata"]["finalizers"] == after
