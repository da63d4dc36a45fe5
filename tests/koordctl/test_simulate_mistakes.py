"""Mistakes in what `koordctl simulate` is given: each is named with its file and place."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.scheduler.simulation.dumps import (
    Tree,
    node,
    pod,
    workload,
)
from tests.koordctl.simulated import (
    Cluster,
)


def _mistakes() -> list[tuple[str, Any, str]]:
    unnamed = pod("a")
    unnamed["metadata"].pop("name")
    return [
        ("no pod", [node("n9")], "has no Pod and no workload"),
        ("scheduler", [pod("a", schedulerName="x")], "Pod default/a: spec.schedulerName = 'x'"),
        (
            "class",
            [pod("a", priorityClassName="gold")],
            "Pod default/a: spec.priorityClassName = 'gold'",
        ),
        ("name", [unnamed], "metadata.name = '': is missing"),
        ("replicas", [workload("Deployment", "w", -1)], "Deployment w: spec.replicas = '-1'"),
        ("type", [pod("a", containers="x")], "Pod default/a: Expected `array`"),
        ("spec", [{**pod("a"), "spec": None}], "Pod default/a: spec is not set"),
    ]


@pytest.mark.parametrize(
    ("objects", "text"), [each[1:] for each in _mistakes()], ids=[each[0] for each in _mistakes()]
)
def test_mistakes_in_pods_name_file_object_and_field(
    cluster: Cluster, objects: list[Tree], text: str
) -> None:
    cluster.write(node("n1"))
    status, _, err = cluster.run("--pods", cluster.pods(*objects))
    assert status == 2
    assert text in err
    if text != "has no Pod and no workload":
        assert "pods.yaml" in err


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"items": [{"kind": ', "bad.json: is not an object or list in JSON"),
        ('{"items": [{"kind": "Node"}]}', "bad.json: items[0].metadata.name"),
        ('{"items": [{"metadata": {"name": "x"}}]}', "bad.json: items[0].kind"),
        ('{"kind": "Pod", "metadata": {"name": "x"}}', "Pod x: metadata.namespace"),
    ],
)
def test_mistakes_in_a_dump_name_file_and_place(cluster: Cluster, content: str, text: str) -> None:
    cluster.write(node("n1"))
    (cluster.dump / "bad.json").write_text(content)
    status, _, err = cluster.run("--pods", cluster.pods(pod("a")))
    assert status == 2
    assert text in err


def test_an_object_that_cannot_be_read_is_left_out_and_named(cluster: Cluster) -> None:
    bad = node("bad")
    bad["spec"] = {"taints": "none"}
    config_map = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": {"name": "c"}}
    cluster.write(node("n1"), bad, config_map)
    found = cluster.ask("--pods", cluster.pods(pod("a")))
    assert found["nodes"] == 1
    notes = "\n".join(found["notes"])
    assert "Node bad is left out" in notes
    assert "1 ConfigMap objects are not read" in notes


def test_one_object_in_two_files_is_a_mistake(cluster: Cluster) -> None:
    cluster.write(node("n1"))
    cluster.write(node("n1"), name="more.json")
    status, _, err = cluster.run("--pods", cluster.pods(pod("a")))
    assert status == 2
    assert "Node n1" in err
    assert "stands in" in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--capacity",), "add --pods"),
        (("--pods", "x", "--against", "y"), "leave --pods out"),
        (("--config", "/nowhere"), "cannot read /nowhere"),
    ],
)
def test_options_that_do_not_go_together(
    cluster: Cluster, arguments: tuple[str, ...], text: str
) -> None:
    cluster.write(node("n1"))
    status, _, err = cluster.run(*arguments)
    assert (status, text in err) == (2, True), err


def test_a_cluster_that_is_not_there_is_explained(cluster: Cluster) -> None:
    status, _, err = cluster.run(cluster="/nowhere")
    assert status == 2
    assert "kubectl get -o json" in err
    status, _, err = cluster.run()
    assert status == 2
    assert "holds no *.json" in err
