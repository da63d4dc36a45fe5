"""What `koordctl simulate` prints: whole texts for answers of each question."""

from __future__ import annotations

import time
from typing import Any

import pytest

from koordctl import simulate
from koordctl.simulate import text
from tests.koordctl.simulated import Cluster

pytestmark = pytest.mark.usefixtures("terminal")

_HEAD: dict[str, Any] = {"nodes": 3, "at": "2001-09-09T01:46:40Z", "seed": 7, "notes": []}


def _pod(name: str, node: str = "", **further: Any) -> dict[str, Any]:
    state = "placed" if node else "unschedulable"
    return {"pod": f"default/{name}", "state": state, "node": node, **further}


def test_pods_with_and_without_a_node() -> None:
    scores = {"nodes": 3, "feasible": 1, "best": [{"node": "n1", "total": 9, "scores": {"Fit": 9}}]}
    pods = [
        _pod("a", "n1", scores=scores),
        _pod("b", "n2"),
        _pod("c", message="no cpu"),
        _pod("d", message="no cpu"),
        _pod("e", message="a taint"),
        {**_pod("f"), "state": "gated"},
    ]
    evicted = [{"pod": "default/old", "was": "n2"}]
    answer = {**_HEAD, "pods": pods, "evicted": evicted, "notes": ["a is missing", "b too"]}
    assert text(answer).splitlines() == [
        "3 nodes, as of 2001-09-09T01:46:40Z, seed 7",
        "",
        "2 of 6 pods get a node",
        "",
        "POD        NODE",
        "default/a  n1",
        "default/b  n2",
        "",
        "PODS  SUCH AS    STATE          WHY",
        "2     default/c  unschedulable  no cpu",
        "1     default/e  unschedulable  a taint",
        "1     default/f  gated",
        "",
        "default/a",
        "1 of 3 nodes could take it; the best:",
        "NODE  TOTAL  Fit",
        "n1    9      9",
        "",
        "pods that would be evicted for them",
        "POD          NOW ON",
        "default/old  n2",
        "",
        "notes",
        "  a is missing",
        "  b too",
    ]


def test_pods_that_have_a_node_now_are_shown_with_it() -> None:
    pods = [_pod("a", "n1", was="n2"), _pod("b", "n3")]
    assert text({**_HEAD, "pods": pods, "evicted": []}).splitlines()[2:] == [
        "2 of 2 pods get a node",
        "",
        "POD        NODE  NOW ON",
        "default/a  n1    n2",
        "default/b  n3",
    ]


def test_without_a_placed_pod_there_is_no_table_of_nodes() -> None:
    answer = {**_HEAD, "pods": [_pod("a", message="no cpu")], "evicted": []}
    assert text(answer).splitlines()[2:] == [
        "0 of 1 pods get a node",
        "",
        "PODS  SUCH AS    STATE          WHY",
        "1     default/a  unschedulable  no cpu",
    ]


@pytest.mark.parametrize(("count", "more"), [(50, 0), (51, 1), (80, 30)])
def test_a_table_shows_fifty_rows_and_counts_the_others(count: int, more: int) -> None:
    pods = [_pod(f"p{number}", "n1") for number in range(count)]
    lines = text({**_HEAD, "pods": pods, "evicted": []}).splitlines()
    assert sum(line.endswith("  n1") for line in lines) == 50
    assert lines[-1] == (f"... and {more} more (-o json shows all)" if more else "default/p49  n1")


def test_a_cluster_placed_again_from_scratch() -> None:
    pods = [
        _pod("a", "n1", was="n1"),
        _pod("b", "n1", was="n2"),
        _pod("c", "n1"),
        _pod("d", was="n3", message="no cpu"),
        _pod("e", message="no cpu"),
    ]
    answer = {**_HEAD, "pods": pods, "nodesUsed": 1, "nodesUsedNow": 3}
    assert text(answer).splitlines()[1:] == [
        "",
        "placed again from scratch: 3 of 5 pods get a node, 1 of them the one that they have",
        "nodes with such pods: 1, now 3",
        "",
        "PODS  SUCH AS    STATE          WHY",
        "2     default/d  unschedulable  no cpu",
        "",
        "1 of the pods without a node have one now",
    ]
    other = {
        "differences": [
            {**_pod("a", "n1"), "againstNode": "", "againstState": "unschedulable"},
            {**_pod("d"), "againstNode": "n2", "againstState": "placed"},
        ],
        "nodesUsedAgainst": 2,
    }
    assert text(answer | other).splitlines()[-5:] == [
        "2 pods differ from the other configuration, which uses 2 nodes",
        "",
        "POD        HERE           THERE",
        "default/a  n1             unschedulable",
        "default/d  unschedulable  n2",
    ]
    assert text(answer | other | {"differences": []}).splitlines()[-1] == (
        "0 pods differ from the other configuration, which uses 2 nodes"
    )


def test_a_capacity_counts_nodes_by_how_many_they_take() -> None:
    first = {
        "pod": "default/a",
        "count": 7,
        "more": False,
        "nodes": {"n1": 1, "n2": 3, "n3": 3},
        "message": "no cpu",
    }
    rest = [
        {"pod": "default/b", "count": 9, "more": True, "nodes": {"n1": 9}},
        {"pod": "default/c", "count": 0, "more": False, "nodes": {}},
    ]
    assert text({**_HEAD, "capacity": [first, *rest]}).splitlines()[1:] == [
        "",
        "default/a: 7 more fit",
        "EACH  NODES  SUCH AS",
        "3     2      n2",
        "1     1      n1",
        "the next one: no cpu",
        "",
        "default/b: at least 9 more fit",
        "EACH  NODES  SUCH AS",
        "9     1      n1",
        "the count ended at --limit",
        "",
        "default/c: 0 more fit",
        "the next one: ",
    ]


@pytest.mark.parametrize(
    ("watched", "after_s", "shown"),
    [(True, 1.1, "... reading pods\n"), (True, 1.0, ""), (False, 9.0, "")],
)
def test_progress_is_shown_after_a_second_where_people_watch(
    watched: bool,
    after_s: float,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    show = simulate._progress()
    now[0] += after_s
    monkeypatch.setattr("sys.stderr.isatty", lambda: watched)
    show("reading pods")
    assert capsys.readouterr() == ("", shown)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--capacity",), "--capacity counts the pods of a file: add --pods FILE"),
        (
            ("--against", "x", "--pods", "y"),
            "--against compares all pods of the cluster: leave --pods out",
        ),
    ],
)
def test_options_that_exclude_each_other_are_said_before_anything_is_read(
    arguments: tuple[str, ...], said: str, cluster: Cluster
) -> None:
    status, out, err = cluster.run(*arguments, cluster="/does/not/exist")
    assert (status, out, err) == (2, "", f"koordctl: {said}\n")


def test_a_cluster_that_is_not_there_is_named(cluster: Cluster) -> None:
    status, _, err = cluster.run(cluster="/does/not/exist")
    assert (status, err.startswith("koordctl: /does/not/exist does not exist;")) == (2, True)


def _config_map(**data: str) -> str:
    lines = ["kind: ConfigMap", "data:"]
    for name, value in data.items():
        lines += [f"  {name}: |", *(f"    {line}" for line in value.splitlines())]
    return "\n".join(lines)


_CONFIGURATION = "kind: KubeSchedulerConfiguration\nwrong: 1"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_config_map(), "{path}: the ConfigMap holds 0 texts with a KubeSchedulerConfiguration"),
        (
            _config_map(a=_CONFIGURATION, b=_CONFIGURATION),
            "{path}: the ConfigMap holds 2 texts with a KubeSchedulerConfiguration",
        ),
        (_config_map(other="x: 1", b=_CONFIGURATION), "{path}: data.b"),
        (_CONFIGURATION, "{path}: "),
        ("a: [", "{path}: "),
    ],
)
def test_a_mistake_of_a_configuration_names_the_file_and_the_text_in_its_config_map(
    content: str, said: str, cluster: Cluster
) -> None:
    cluster.write()
    path = cluster.config(content)
    status, _, err = cluster.run("--config", path)
    assert status == 2
    assert err.startswith(f"koordctl: {said.format(path=path)}"), err


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_configuration_that_cannot_be_read_is_named(
    content: bytes | None, cluster: Cluster
) -> None:
    path = cluster.folder / "c.yaml"
    if content is not None:
        path.write_bytes(content)
    status, _, err = cluster.run("--config", str(path))
    assert (status, err.startswith(f"koordctl: cannot read {path}: ")) == (2, True)
