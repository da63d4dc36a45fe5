"""The objects directory: what is wrong costs as little as possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from apis.device import Device
from apis.errors import InputError
from apis.nodeslo import NodeSLOSpec
from apis.topology import NodeCPUFacts
from hooks.facts import NodeMeta
from koordlet.sources.documents import load_documents
from koordlet.sources.objects import Directory, NodeObjects, over
from tests.koordlet.builders import pod_manifest

SLO = {"apiVersion": "slo.koordinator.sh/v1alpha1", "kind": "NodeSLO", "metadata": {"name": "n1"}}
NODE = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
TOPOLOGY = {
    "apiVersion": "topology.node.k8s.io/v1alpha1",
    "kind": "NodeResourceTopology",
    "metadata": {"name": "n1"},
}


def dump(*manifests: Any) -> str:
    return yaml.safe_dump_all(manifests)


@pytest.mark.parametrize("kind", ["slo", "topology", "node", "device"])
def test_an_object_of_the_directory_counts_before_the_servers_and_hides_no_other_kind(
    kind: str,
) -> None:
    directory, server = (
        NodeObjects(NodeSLOSpec(), NodeCPUFacts(), NodeMeta(name="n1"), Device()) for _ in range(2)
    )
    objects = {kind: getattr(directory, kind)}
    joined = over(msgspec.structs.replace(NodeObjects(), **objects), server)
    for name in ("slo", "topology", "node", "device"):
        assert getattr(joined, name) is getattr(directory if name == kind else server, name), name


def slo(**spec: Any) -> dict[str, Any]:
    return {**SLO, "spec": spec}


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(str(tmp_path), "n1")


def write(directory: Directory, name: str, text: str) -> NodeObjects:
    path = Path(directory.path) / name
    scratch = path.with_suffix(".tmp")
    scratch.write_text(text)
    scratch.rename(path)
    return directory.scan()


def messages(objects: NodeObjects) -> list[str]:
    return [problem.message for problem in objects.problems]


def test_a_missing_directory_is_an_empty_one(tmp_path: Path) -> None:
    assert Directory(str(tmp_path / "no"), "n1").scan() == NodeObjects()


def test_a_directory_that_goes_away_withdraws_nothing(directory: Directory) -> None:
    before = write(directory, "slo.yaml", dump(slo(), NODE))
    away = Path(directory.path).rename(directory.path + ".away")
    gone = directory.scan()
    assert (gone.slo, gone.node) == (before.slo, before.node)
    assert messages(gone) == [
        "is gone; an empty one would withdraw its objects; what was read last stays in force"
    ]
    assert directory.scan() is gone
    away.rename(directory.path)
    assert directory.scan() == before
    (Path(directory.path) / "slo.yaml").unlink()
    assert directory.scan() == NodeObjects()


def test_a_file_that_is_being_written_withdraws_nothing(directory: Directory) -> None:
    before = write(directory, "slo.yaml", dump(slo()))
    during = write(directory, "slo.yaml", "")
    assert during.slo is before.slo
    assert "is empty" in messages(during)[0]
    (Path(directory.path) / "slo.yaml").unlink()
    assert directory.scan().slo is None


def test_several_documents_and_lists_are_read(directory: Directory) -> None:
    items = {"apiVersion": "v1", "kind": "List", "items": [pod_manifest("a"), pod_manifest("b")]}
    objects = write(directory, "all.yaml", dump(slo(), NODE, TOPOLOGY, items))
    assert objects.slo is not None
    assert objects.node is not None
    assert objects.topology is not None
    assert sorted(pod.metadata.name for pod in objects.pods) == ["a", "b"]
    assert objects.problems == ()


def test_bad_cpus_of_kubelets_pods_cost_no_pool(directory: Directory) -> None:
    annotations = {
        "node.koordinator.sh/cpu-shared-pools": '[{"socket":0,"node":0,"cpuset":"0-3"}]',
        "node.koordinator.sh/pod-cpu-allocs": '[{"uid":"u","cpuset":"x"}]',
    }
    objects = write(
        directory,
        "topology.yaml",
        dump({**TOPOLOGY, "metadata": {"name": "n1", "annotations": annotations}}),
    )
    assert objects.topology is not None
    assert [str(pool.cpus) for pool in objects.topology.shared_pools] == ["0-3"]
    assert objects.topology.pod_cpu_allocs == ()
    (message,) = messages(objects)
    assert "pod-cpu-allocs" in message and message.endswith("kubelet's CPUs of pods are not shown")


def test_objects_of_other_nodes_are_nobodys_business(directory: Directory) -> None:
    other = {**SLO, "metadata": {"name": "n2"}}
    elsewhere = pod_manifest("a", spec={"nodeName": "n2"})
    objects = write(directory, "all.yaml", dump(other, elsewhere))
    assert objects == NodeObjects()


def test_nothing_changed_gives_the_same_value(directory: Directory) -> None:
    first = write(directory, "slo.yaml", dump(slo()))
    assert directory.scan() is first


def test_a_deleted_file_takes_its_objects_along(directory: Directory) -> None:
    write(directory, "slo.yaml", dump(slo()))
    (Path(directory.path) / "slo.yaml").unlink()
    assert directory.scan().slo is None


def test_hidden_and_other_files_are_not_read(directory: Directory) -> None:
    write(directory, ".slo.yaml", dump(slo()))
    assert write(directory, "slo.yaml~", "rubbish: [") == NodeObjects()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("a: [", "expected node content at line 2"),
        ("\x00", "control characters are not allowed"),
        ("a: &x [*x]", "'x' contains itself"),
        ("[" * 50_000, "nested deeper than 64 levels"),
        (dump(SLO) + "spec: {}\nspec: {}", "the key 'spec' stands twice"),
        (dump([1]), "not an object"),
        (dump({"kind": "Secret"}), "known kinds: NodeSLO"),
        (dump({**SLO, "apiVersion": "v1"}), "expected slo.koordinator.sh/..."),
        (dump({**SLO, "metadata": {"name": 5}}), "not a name"),
        (dump({"apiVersion": "v1", "kind": "Pod"}), "metadata.name = '': missing"),
        (dump({**SLO, "spec": 3}), "expected an object"),
    ],
)
def test_a_broken_file_says_why(directory: Directory, broken: str, words: str) -> None:
    objects = write(directory, "bad.yaml", broken)
    (message,) = messages(objects)
    assert words in message
    assert objects.problems[0].file.endswith("/bad.yaml")


def test_a_broken_file_keeps_its_last_good_objects(directory: Directory) -> None:
    write(directory, "all.yaml", dump(slo(), pod_manifest("a")))
    objects = write(directory, "all.yaml", "a: [")
    assert objects.slo is not None
    assert len(objects.pods) == 1
    assert "its last good objects stay in force" in messages(objects)[0]
    assert write(directory, "all.yaml", dump(slo())).pods == ()


def test_a_broken_file_harms_no_other(directory: Directory) -> None:
    write(directory, "a.yaml", "a: [")
    objects = write(directory, "b.yaml", dump(slo()))
    assert objects.slo is not None
    assert len(objects.problems) == 1


def test_a_bad_document_keeps_its_last_good_version_and_harms_no_other(
    directory: Directory,
) -> None:
    write(directory, "pods.yaml", dump(pod_manifest("a", uid="1"), pod_manifest("b", uid="2")))
    bad = pod_manifest("a", uid="9", spec={"priority": "high"})
    objects = write(directory, "pods.yaml", dump(bad, pod_manifest("b", uid="3")))
    assert sorted(pod.metadata.uid for pod in objects.pods) == ["1", "3"]
    (message,) = messages(objects)
    assert "Pod default/a" in message
    assert "spec.priority = 'high'" in message
    assert "its last good version stays in force" in message


def test_the_first_of_two_files_with_one_object_is_used(directory: Directory) -> None:
    write(directory, "a.yaml", dump(slo(cpuBurstStrategy={"cpuBurstPercent": 1})))
    objects = write(directory, "b.yaml", dump(slo(cpuBurstStrategy={"cpuBurstPercent": 2})))
    assert objects.slo is not None
    assert objects.slo.cpu_burst_strategy.cpu_burst_percent == 1
    assert "is in a.yaml too" in messages(objects)[0]


def test_a_bad_field_of_a_nodeslo_takes_its_default_the_first_time(directory: Directory) -> None:
    bad = slo(cpuBurstStrategy={"cpuBurstPercent": "x", "policy": "auto"})
    objects = write(directory, "slo.yaml", dump(bad))
    assert objects.slo is not None
    assert objects.slo.cpu_burst_strategy.cpu_burst_percent == 1000
    assert objects.slo.cpu_burst_strategy.policy == "auto"
    assert "the default is used" in messages(objects)[0]


def test_a_bad_field_of_a_nodeslo_keeps_its_last_good_value(directory: Directory) -> None:
    write(directory, "slo.yaml", dump(slo(cpuBurstStrategy={"cpuBurstPercent": 700})))
    bad = slo(cpuBurstStrategy={"cpuBurstPercent": 99999, "policy": "auto"})
    objects = write(directory, "slo.yaml", dump(bad))
    assert objects.slo is not None
    assert objects.slo.cpu_burst_strategy.cpu_burst_percent == 700
    assert objects.slo.cpu_burst_strategy.policy == "auto"


def test_a_bad_host_application_is_left_out_as_a_whole(directory: Directory) -> None:
    """With its path dropped it would be another application, in another place."""
    apps = [
        {"name": f"app{i}", "cgroupPath": {"relativePath": "../x" if i in (1, 3) else f"a{i}"}}
        for i in range(12)
    ]
    objects = write(directory, "slo.yaml", dump(slo(hostApplications=apps)))
    assert objects.slo is not None
    names = [app.name for app in objects.slo.host_applications]
    assert names == [f"app{i}" for i in range(12) if i not in (1, 3)]
    assert len(objects.problems) == 2


def test_a_bad_host_application_costs_no_other_one_its_place(directory: Directory) -> None:
    """What is not an object at all is left out first, and must not shift the blame."""
    apps = [
        None,
        {"name": "first"},
        "x",
        {"name": "second"},
        {"name": 7},
        {"name": "out", "cgroupPath": {"relativePath": "../x"}},
        {"name": "third"},
    ]
    objects = write(directory, "slo.yaml", dump(slo(hostApplications=apps)))
    assert objects.slo is not None
    assert [app.name for app in objects.slo.host_applications] == ["first", "second", "third"]
    said = "\n".join(map(str, objects.problems))
    for field in ("[0]", "[2]", "[4].name"):
        assert f"spec.hostApplications{field} = " in said


def test_times_stay_text() -> None:
    (tree,) = load_documents(b"metadata: {creationTimestamp: 2024-01-02T03:04:05Z}")
    assert tree["metadata"]["creationTimestamp"] == "2024-01-02T03:04:05Z"


def test_aliases_cannot_blow_a_small_file_up() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(InputError, match="more than"):
        load_documents("\n".join(lines).encode())


def test_files_can_be_given_by_content() -> None:
    objects = Directory("", "n1").take({"a.yaml": dump(slo()).encode(), "b.yaml": b"["})
    assert objects.slo is not None
    assert len(objects.problems) == 1


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_no_bytes_break_the_reader(data: bytes) -> None:
    objects = Directory("", "n1").take({"a.yaml": data})
    assert isinstance(objects, NodeObjects)


Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = (
    "resourceUsedThresholdWithBE", "resourceQOSStrategy", "cpuBurstStrategy", "systemStrategy",
    "extensions", "hostApplications",
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(FIELDS), Json))
@settings(max_examples=200, deadline=None)
def test_whatever_a_nodeslo_holds_the_rest_of_it_counts(spec: dict[str, Any]) -> None:
    """Every field of a NodeSLO malformed in turn: nothing but that field is lost."""
    good = {"policies": {"cpuPolicy": "coreSched"}}
    objects = Directory("", "n1").take(
        {"a.yaml": dump(slo(**{**spec, "resourceQOSStrategy": good})).encode()}
    )
    assert objects.slo is not None
    assert objects.slo.resource_qos_strategy.policies.cpu_policy == "coreSched"
