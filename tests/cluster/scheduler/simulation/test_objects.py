"""Which objects a file holds, and what is said of a file that cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from apis.errors import InputError
from cluster.scheduler.simulation.objects import FileObject, is_kubeconfig, read_objects, tree_of

_Short = tuple[str, str, str]
"""Group, kind and key."""


def _read(path: Path, content: str | bytes) -> list[FileObject]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_objects(str(path))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", []),
        (" \n", []),
        ("---\n---\n", []),
        ('{"kind": "Node", "metadata": {"name": "a"}}', [("", "Node", "a")]),
        (
            ' {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "ns"}}',
            [("", "Pod", "ns/p")],
        ),
        # What a controller would name: the prefix alone.
        ('{"kind": "Pod", "metadata": {"generateName": "web-"}}', [("", "Pod", "web")]),
        (
            '{"kind": "Pod", "metadata": {"name": "p", "generateName": "web-"}}',
            [("", "Pod", "p")],
        ),
        # A list of kubectl's, whose items name their kinds; one of the API server's, which do not.
        (
            '{"apiVersion": "v1", "kind": "List", "items": ['
            '{"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "r"}},'
            '{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}]}',
            [("apps", "ReplicaSet", "r"), ("", "Node", "n")],
        ),
        (
            '{"apiVersion": "slo.koordinator.sh/v1alpha1", "kind": "NodeMetricList", "items": ['
            '{"metadata": {"name": "a"}}, {"metadata": {"name": "b"}}]}',
            [("slo.koordinator.sh", "NodeMetric", "a"), ("slo.koordinator.sh", "NodeMetric", "b")],
        ),
        ('{"kind": "List", "items": []}', []),
        (
            "kind: Node\nmetadata: {name: a}\n---\n---\nkind: List\nitems:\n"
            "- {kind: Pod, metadata: {name: p, namespace: ns}}\n---\nkind: Node\n"
            "metadata: {name: b}",
            [("", "Node", "a"), ("", "Pod", "ns/p"), ("", "Node", "b")],
        ),
    ],
)
def test_a_file_holds_objects_lists_and_documents(
    tmp_path: Path, content: str, expected: list[_Short]
) -> None:
    found = _read(tmp_path / "f", content)
    assert [(each.group, each.kind, each.key) for each in found] == expected
    assert {each.where for each in found} <= {str(tmp_path / "f")}


def test_an_object_is_kept_as_it_stands() -> None:
    raw = b'{"kind": "Node", "metadata": {"name": "a"}, "other": [1]}'
    assert tree_of(FileObject("", "Node", "", "a", raw, "f")) == json.loads(raw)
    assert FileObject("", "Node", "", "a", raw, "f").ref == "f: Node a"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"kind"', "f is not an object or list in JSON"),
        ("[1]", "f is not an object or list in JSON"),
        (b"\xff\xfe", "f 'utf-8' codec can't decode byte 0xff"),
        ("a: b: c", "f "),
        ("kind: Node\nmetadata: {name: a}\n---\n- 1\n", "f: document 2 = '[1]': is not an object"),
        ("kind: Node\nmetadata: {name: a}\n---\nkind: [1]\n", "f: document 2"),
        ('{"kind": "Node", "metadata": 1}', "f Expected `object`, got `int`"),
        ('{"kind": "List", "items": [1]}', "f: items[0]"),
        ('{"kind": "Node", "metadata": {}}', "f: metadata.name = '': is missing"),
        ('{"metadata": {"name": "a"}}', "f: kind = '': is missing"),
        (
            '{"kind": "List", "items": [{"kind": "A", "metadata": {"name": "a"}}, {"kind": "B"}]}',
            "f: items[1].metadata.name = '': is missing",
        ),
    ],
)
def test_what_cannot_be_used_is_named_with_its_place(
    tmp_path: Path, content: str | bytes, text: str
) -> None:
    with pytest.raises(InputError) as caught:
        _read(tmp_path / "f", content)
    assert (
        str(caught.value)
        .removeprefix(f"{tmp_path}/")
        .replace(":", "")
        .startswith(text.replace(":", ""))
    )


def test_of_a_folder_the_files_of_known_endings_are_read_in_order(tmp_path: Path) -> None:
    for name in ("c.json", "a.yaml", "b.yml", "d.txt", ".e.json"):
        (tmp_path / name).write_text(json.dumps({"kind": "Node", "metadata": {"name": name}}))
    shown: list[str] = []
    found = read_objects(f"{tmp_path}/", progress=shown.append)
    assert [each.name for each in found] == ["a.yaml", "b.yml", "c.json"]
    assert shown == [f"reading {tmp_path}/{name}" for name in ("a.yaml", "b.yml", "c.json")]


def test_a_folder_without_files_a_missing_file_and_a_pipe_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no") as caught:
        read_objects(str(tmp_path))
    assert caught.value.hint is not None and "kubectl get nodes,pods" in caught.value.hint
    for use in (read_objects, is_kubeconfig):
        with pytest.raises(InputError, match="cannot be read: No such file"):
            use(str(tmp_path / "none"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a regular file"):
        read_objects(str(tmp_path / "pipe"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("kind: Config\nclusters: []\n", True),
        ('{"kind": "Config"}', True),
        ("kind: Node\n", False),
        ("kind: Config\n---\nkind: Config\n", False),
        ("- kind: Config\n", False),
        ("", False),
        ("a: b: c", False),
        (b"\xff\xfe", False),
        ("kind: Config\n#" + "x" * (1 << 20), False),
    ],
)
def test_a_kubeconfig_is_one_small_document_of_its_kind(
    tmp_path: Path, content: str | bytes, expected: bool
) -> None:
    path = tmp_path / "f"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert is_kubeconfig(str(path)) is expected
    assert is_kubeconfig(str(tmp_path)) is False
