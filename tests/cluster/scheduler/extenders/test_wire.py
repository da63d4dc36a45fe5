"""Requests and answers of extenders as bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.cycle.proposals import Proposal
from cluster.scheduler.extenders.wire import (
    Answered,
    ExtenderError,
    Filtered,
    arguments,
    binding,
    preemption,
    read_bind,
    read_filter,
    read_preemption,
    read_scores,
)


def test_requests_are_spelt_as_kube_scheduler_spells_them() -> None:
    pod = b'{"metadata":{"name":"p"}}'
    assert json.loads(arguments(pod, names=("a", "b"))) == {
        "Pod": {"metadata": {"name": "p"}},
        "Nodes": None,
        "NodeNames": ["a", "b"],
    }
    nodes = {"a": b'{"metadata":{"name":"a"}}', "c": b"{}"}
    assert json.loads(arguments(pod, names=("a", "b"), nodes=nodes)) == {
        "Pod": {"metadata": {"name": "p"}},
        "Nodes": {"metadata": {}, "items": [{"metadata": {"name": "a"}}]},
        "NodeNames": None,
    }
    body = json.loads(binding(namespace="ns", name="p", uid="u", node="a"))
    assert body == {"PodName": "p", "PodNamespace": "ns", "PodUID": "u", "Node": "a"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"NodeNames": ["a"]}, Filtered(("a",), {}, {})),
        ({"nodeNames": ["b", "b"], "failedNodes": {"a": "x"}}, Filtered(("b",), {"a": "x"}, {})),
        (
            {"Nodes": {"items": [{"metadata": {"name": "b"}, "spec": {}}]}, "NodeNames": None},
            Filtered(("b",), {}, {}),
        ),
        (
            {"NODENAMES": [], "FailedAndUnresolvableNodes": {"a": "never"}},
            Filtered((), {}, {"a": "never"}),
        ),
        ({"NodeNames": ["a"], "Error": "", "FailedNodes": None}, Filtered(("a",), {}, {})),
        ({"Nodes": {"items": None}}, Filtered((), {}, {})),
        ({}, Filtered((), {}, {})),
    ],
)
def test_a_filter_answer(answer: Any, expected: Filtered) -> None:
    assert read_filter(json.dumps(answer).encode(), ("a", "b")) == expected


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b'{"Error":"no quota\\nleft"}', "no quota"),
        (b'{"NodeNames":["c"]}', "not asked: 'c'"),
        (b'{"NodeNames":"a"}', "cannot be read"),
        (b'{"NodeNames":[1]}', "cannot be read"),
        (b'{"FailedNodes":{"a":1}}', "cannot be read"),
        (b"[]", "cannot be read"),
        (b"<html>", "cannot be read"),
        (b"", "cannot be read"),
    ],
)
def test_a_filter_answer_that_cannot_be_used(answer: bytes, message: str) -> None:
    with pytest.raises(ExtenderError, match=message) as raised:
        read_filter(answer, ("a", "b"))
    assert "\n" not in str(raised.value)


def test_scores_and_bindings() -> None:
    assert read_scores(b'[{"Host":"a","Score":7},{"host":"b","score":0}]') == {"a": 7, "b": 0}
    assert read_scores(b"null") == {}
    assert read_bind(b'{"Error":"taken"}') == "taken"
    assert read_bind(b"{}") == ""
    for bad in (
        b"{}",
        b'[{"Host":"a","Score":"7"}]',
        b'[{"Host":"a","Score":1e300}]',
        b'[{"Host":1}]',
    ):
        with pytest.raises(ExtenderError):
            read_scores(bad)
    with pytest.raises(ExtenderError):
        read_bind(b"[]")


@settings(max_examples=50)
@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["NodeNames", "Nodes", "items", "Error", "Host"]), inner
            )
        ),
    ).map(lambda tree: json.dumps(tree).encode())
)
def test_no_answer_raises_anything_else(answer: bytes) -> None:
    for read in (lambda body: read_filter(body, ("a",)), read_scores, read_bind):
        try:
            read(answer)
        except ExtenderError as error:
            assert str(error)


def test_a_preempt_request_has_uids_or_whole_pods() -> None:
    pod = b'{"metadata":{"name":"p"}}'
    proposals = {"a": Proposal({"u1": "ns/x", "u2": "ns/y"}, 1), "b": Proposal({"u3": "ns/z"})}
    assert json.loads(preemption(pod, proposals)) == {
        "Pod": {"metadata": {"name": "p"}},
        "NodeNameToVictims": None,
        "NodeNameToMetaVictims": {
            "a": {"Pods": [{"UID": "u1"}, {"UID": "u2"}], "NumPDBViolations": 1},
            "b": {"Pods": [{"UID": "u3"}], "NumPDBViolations": 0},
        },
    }
    pods = {"u1": b'{"metadata":{"name":"x"}}', "u3": b"{}"}
    assert json.loads(preemption(pod, proposals, pods=pods)) == {
        "Pod": {"metadata": {"name": "p"}},
        "NodeNameToVictims": {
            "a": {"Pods": [{"metadata": {"name": "x"}}], "NumPDBViolations": 1},
            "b": {"Pods": [{}], "NumPDBViolations": 0},
        },
        "NodeNameToMetaVictims": None,
    }


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({}, {}),
        ({"NodeNameToMetaVictims": None}, {}),
        ({"nodeNameToMetaVictims": {"a": None}}, {"a": Answered((), 0)}),
        ({"NodeNameToMetaVictims": {"a": {"Pods": None}}}, {"a": Answered((), 0)}),
        (
            {"NodeNameToMetaVictims": {"a": {"pods": [{"uid": "u"}, {"UID": "u"}]}}},
            {"a": Answered(("u",), 0)},
        ),
        (
            {"NodeNameToMetaVictims": {"a": {"Pods": [{"UID": "u"}], "NumPDBViolations": 2}}},
            {"a": Answered(("u",), 2)},
        ),
    ],
)
def test_a_preempt_answer(answer: Any, expected: dict[str, Answered]) -> None:
    assert read_preemption(json.dumps(answer).encode()) == expected


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        '{"NodeNameToMetaVictims": []}',
        '{"NodeNameToMetaVictims": {"a": []}}',
        '{"NodeNameToMetaVictims": {"a": {"Pods": [null]}}}',
        '{"NodeNameToMetaVictims": {"a": {"Pods": ["u"]}}}',
        '{"NodeNameToMetaVictims": {"a": {"NumPDBViolations": 1.5}}}',
        '{"NodeNameToMetaVictims": {"a": {"NumPDBViolations": 99999999999}}}',
    ],
)
def test_a_preempt_answer_that_cannot_be_read(answer: str) -> None:
    with pytest.raises(ExtenderError, match="the answer to preempt cannot be read"):
        read_preemption(answer.encode())
