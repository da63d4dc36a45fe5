"""What becomes of pods that extenders are asked about: opinions, failures and bindings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest

from apis.errors import InputError
from cluster.scheduler.binding.placement import Placement
from cluster.scheduler.configuration.extenders import (
    Extender,
    ExtenderManagedResource,
    ExtenderTLSConfig,
)
from cluster.scheduler.configuration.strict import Seconds
from cluster.scheduler.cycle.opinions import Opinion
from cluster.scheduler.cycle.proposals import Proposals
from cluster.scheduler.extenders.consulting import Extenders, needs_nodes
from cluster.scheduler.extenders.nodes import WholeNodes, decode_whole_node
from cluster.scheduler.plugins.contract import Reason
from cluster.scheduler.tables.pending import PendingPod
from cluster.scheduler.tables.shapes import PodShape, Shapes
from kube.client import ApiError, Client
from tests.cluster.scheduler.extenders.serving import Serving, Tree, serving
from tests.cluster.scheduler.making import make_pod

Answers = dict[str, Callable[[Tree], Any]]

_NODES = ("n0", "n1", "n2")
_POD = {"metadata": {"name": "p", "namespace": "default", "uid": "u"}, "spec": {"x": 1}}


def _raw(name: str) -> bytes:
    return msgspec.json.encode({"metadata": {"name": name}, "spec": {"of": name}})


class _Api:
    """An API server that has one pod."""

    def __init__(self) -> None:
        self.pod: Tree = _POD
        self.failure: Exception | None = None

    async def request(self, method: str, path: str) -> bytes:
        assert (method, path) == ("GET", "/api/v1/namespaces/default/pods/p")
        if self.failure is not None:
            raise self.failure
        return msgspec.json.encode(self.pod)


class _Deciding:
    """Has candidates for one pod, and keeps what was said about it."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] | None = _NODES
        self.reserve_pod: bytes | None = None
        self.said: list[tuple[Opinion | None, str]] = []

    def candidates(self, uid: str) -> tuple[str, ...] | None:
        assert uid == "u"
        return self.names

    def in_memory(self, uid: str) -> bytes | None:
        return self.reserve_pod

    def proposed(self, uid: str) -> Proposals | None:
        raise AssertionError("no preemption is proposed")

    def may_evict(self, uid: str, node: str, victim: str) -> str:
        raise AssertionError("no preemption is proposed")

    def agreed(self, uid: str, nodes: Proposals | None, error: str = "") -> None:
        raise AssertionError("no preemption is proposed")

    def consulted(self, uid: str, opinion: Opinion | None, error: str = "") -> None:
        assert uid == "u"
        self.said.append((opinion, error))


def _shape(**resources: dict[str, str]) -> PodShape:
    return Shapes().of(make_pod("p", **resources))  # type: ignore[arg-type]


class _Bed:
    """Extenders with the URLs of servers that run, which are asked about one pod."""

    def __init__(self, servers: Sequence[Serving], settings: Sequence[dict[str, Any]]) -> None:
        self.api, self.deciding, self.decided = _Api(), _Deciding(), asyncio.Event()
        configured = [
            Extender(
                url_prefix=server.url,
                **{
                    "http_timeout": Seconds(20),
                    "weight": 1,
                    "filter_verb": "filter",
                    "node_cache_capable": True,
                    **each,
                },
            )
            for server, each in zip(servers, settings, strict=True)
        ]
        self.extenders = Extenders(
            cast(Client, self.api),
            configured,
            self.deciding,
            self.deciding,
            nodes=WholeNodes({name: decode_whole_node(_raw(name)) for name in _NODES}),
            decided=self.decided.set,
        )

    async def ask(self) -> tuple[Opinion | None, str]:
        """Return the opinion and the error that are said about the pod."""
        shape = _shape()
        pod = PendingPod(key="default/p", uid="u", priority=0, shape=shape, created=0.0)
        self.extenders.open()
        self.extenders.ask(pod)
        await self.decided.wait()
        (said,) = self.deciding.said
        return said


def _run(
    *extenders: tuple[Answers, dict[str, Any]], change: Callable[[_Bed], None] = lambda bed: None
) -> tuple[Opinion | None, str, list[Serving]]:
    """Ask extenders, each with its answers and settings; return what is said, and the servers."""

    async def run() -> tuple[Opinion | None, str, list[Serving]]:
        servers: list[Serving] = []

        async def start(
            rest: Sequence[tuple[Answers, dict[str, Any]]],
        ) -> tuple[Opinion | None, str]:
            if rest:
                async with serving(rest[0][0]) as server:
                    servers.append(server)
                    return await start(rest[1:])
            bed = _Bed(servers, [settings for _, settings in extenders])
            change(bed)
            try:
                return await bed.ask()
            finally:
                await bed.extenders.stop_asking()
                await bed.extenders.close()

        opinion, error = await start(extenders)
        return opinion, error, servers

    return asyncio.run(run())


def _passing(*names: str, **more: Any) -> Answers:
    return {"filter": lambda body: {"NodeNames": list(names), **more}}


def _opinion(*extenders: tuple[Answers, dict[str, Any]]) -> Opinion:
    opinion, error, _ = _run(*extenders)
    assert error == ""
    assert opinion is not None
    return opinion


# --- filter --------------------------------------------------------------------------------------


def test_the_second_extender_is_asked_about_what_the_first_passed() -> None:
    opinion, error, servers = _run((_passing("n0", "n2"), {}), (_passing("n2"), {}))
    assert error == ""
    assert opinion is not None
    assert opinion.asked == set(_NODES)
    assert opinion.failed == {
        "n1": Reason(f"node(s) didn't pass extender {servers[0].url}"),
        "n0": Reason(f"node(s) didn't pass extender {servers[1].url}"),
    }
    assert [server.bodies("filter")[0]["NodeNames"] for server in servers] == [
        ["n0", "n1", "n2"],
        ["n0", "n2"],
    ]
    assert servers[0].bodies("filter")[0]["Pod"] == _POD


def test_no_extender_is_asked_about_nothing() -> None:
    ranks: dict[str, Any] = {"prioritize_verb": "rank"}
    _, _, servers = _run((_passing(), {}), (_passing(), ranks))
    assert [len(server.asked) for server in servers] == [1, 0]


@pytest.mark.parametrize(
    ("answer", "failed"),
    [
        ({}, {}),
        ({"FailedNodes": {"n1": "full"}}, {"n1": Reason("full")}),
        ({"FailedNodes": {"n1": "two\nlines"}}, {"n1": Reason("two\\nlines")}),
        # The message counts more than the name among those that pass.
        ({"FailedNodes": {"n1": ""}}, {"n1": Reason("?")}),
        (
            {"FailedAndUnresolvableNodes": {"n1": "never"}, "FailedNodes": {"n1": "now"}},
            {"n1": Reason("never", resolvable=False)},
        ),
        ({"FailedAndUnresolvableNodes": {"n1": ""}}, {"n1": Reason("?", resolvable=False)}),
    ],
)
def test_a_message_about_a_node_rejects_it(answer: Tree, failed: dict[str, Reason]) -> None:
    opinion, _, (server,) = _run((_passing("n0", "n1", "n2", **answer), {}))
    assert opinion is not None
    plain = f"node(s) didn't pass extender {server.url}"
    assert {
        name: Reason("?", reason.resolvable) if reason.text == plain else reason
        for name, reason in opinion.failed.items()
    } == failed


def test_of_many_messages_fifty_are_kept() -> None:
    def change(bed: _Bed) -> None:
        bed.deciding.names = tuple(f"n{number}" for number in range(60))

    messages = {f"n{number}": f"message {number}" for number in range(60)}
    opinion, _, _ = _run((_passing(FailedNodes=messages), {}), change=change)
    assert opinion is not None
    texts = [reason.text for reason in opinion.failed.values()]
    assert texts[:50] == [f"message {number}" for number in range(50)]
    assert len(set(texts[50:])) == 1
    assert texts[50].startswith("node(s) didn't pass extender ")


def test_an_extender_without_a_node_cache_is_sent_whole_nodes() -> None:
    settings = {"node_cache_capable": False}
    _, _, (server,) = _run((_passing("n0"), settings))
    (body,) = server.bodies("filter")
    assert body["NodeNames"] is None
    assert body["Nodes"]["items"] == [json.loads(_raw(name)) for name in _NODES]


@pytest.mark.parametrize(
    ("members", "needed"),
    [
        ({"filter_verb": "f"}, True),
        ({"prioritize_verb": "p"}, True),
        ({"bind_verb": "b"}, False),
        ({"filter_verb": "f", "node_cache_capable": True}, False),
    ],
)
def test_whole_nodes_are_kept_for_extenders_that_are_sent_them(
    members: dict[str, Any], needed: bool
) -> None:
    assert (
        needs_nodes([Extender(url_prefix="http://x"), Extender(url_prefix="http://y", **members)])
        is needed
    )


def test_whole_nodes_are_a_mapping_of_the_cache() -> None:
    nodes = WholeNodes({"a": decode_whole_node(_raw("a")), "b": decode_whole_node(_raw("b"))})
    assert dict(nodes) == {"a": _raw("a"), "b": _raw("b")}
    assert len(nodes) == 2
    assert decode_whole_node(_raw("a")).metadata.name == "a"


# --- prioritize ----------------------------------------------------------------------------------


def _ranking(**scores: int) -> Answers:
    return {"rank": lambda body: [{"Host": n, "Score": s} for n, s in scores.items()]}


def test_scores_of_all_extenders_are_added_by_their_weights() -> None:
    settings = {"filter_verb": "", "prioritize_verb": "rank"}
    opinion = _opinion(
        (_ranking(n0=3, n1=1), settings | {"weight": 2}), (_ranking(n0=1, n2=5), settings)
    )
    assert opinion.scores == {"n0": 70, "n1": 20, "n2": 50}
    assert not opinion.failed


def test_the_only_node_is_not_ranked() -> None:
    settings = {"prioritize_verb": "rank"}
    _, _, (server,) = _run((_passing("n1") | _ranking(n1=1), settings))
    assert server.bodies("rank") == []
    _, _, (server,) = _run((_passing("n1", "n2") | _ranking(n1=1), settings))
    assert server.bodies("rank")[0]["NodeNames"] == ["n1", "n2"]


def test_an_extender_that_cannot_rank_adds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"filter_verb": "", "prioritize_verb": "rank"}
    opinion = _opinion(({"rank": lambda body: "no"}, settings), (_ranking(n1=1), settings))
    assert opinion.scores == {"n1": 10}
    assert "the answer to prioritize cannot be read" in caplog.text


# --- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignorable", [False, True])
def test_an_extender_that_fails_fails_the_attempt_unless_it_is_ignorable(ignorable: bool) -> None:
    broken: Answers = {"filter": lambda body: {"Error": "on fire"}}
    opinion, error, servers = _run((broken, {"ignorable": ignorable}), (_passing("n1", "n2"), {}))
    if ignorable:
        assert error == ""
        assert opinion is not None
        assert set(opinion.failed) == {"n0"}
    else:
        assert opinion is None
        assert error == f"extender {servers[0].url}: on fire"
        assert servers[1].asked == []


@pytest.mark.parametrize(
    ("failure", "pod", "error"),
    [
        (None, {"metadata": {"name": "p", "uid": "later"}}, "pod default/p is another one by now"),
        (ApiError(status=404, reason="NotFound", message="gone", what="pod"), _POD, "gone"),
        (ValueError("a fault of ours"), _POD, "ValueError: a fault of ours"),
    ],
)
def test_a_pod_that_cannot_be_read_is_not_in_flight_for_ever(
    failure: Exception | None, pod: Tree, error: str
) -> None:
    def change(bed: _Bed) -> None:
        bed.api.failure, bed.api.pod = failure, pod

    opinion, said, (server,) = _run((_passing(), {}), change=change)
    assert opinion is None
    assert error in said
    assert server.asked == []


def test_a_pod_that_no_node_can_take_is_not_asked_about() -> None:
    def change(bed: _Bed) -> None:
        bed.deciding.names = ()

    opinion, error, (server,) = _run((_passing(), {}), change=change)
    assert (opinion, error, server.asked) == (None, "", [])


def test_a_reserve_pod_is_sent_as_the_scheduler_has_it() -> None:
    reserve_pod = {"metadata": {"name": "u"}, "spec": {"of": "a Reservation"}}

    def change(bed: _Bed) -> None:
        bed.api.failure = ValueError("the API server has no such pod")
        bed.deciding.reserve_pod = msgspec.json.encode(reserve_pod)

    opinion, error, (server,) = _run((_passing("n0"), {}), change=change)
    assert error == ""
    assert opinion is not None
    assert server.bodies("filter")[0]["Pod"] == reserve_pod


# --- which pods ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "concerned"),
    [
        ({}, False),
        ({"requests": {"example.com/x": "1"}}, True),
        ({"limits": {"example.com/x": "1"}}, True),
        ({"requests": {"example.com/y": "1"}}, False),
    ],
)
def test_an_extender_is_asked_about_pods_with_its_resources(
    resources: dict[str, dict[str, str]], concerned: bool
) -> None:
    managed = (ExtenderManagedResource(name="example.com/x"),)

    async def run() -> None:
        bed = _Bed([Serving({})], [{"managed_resources": managed, "bind_verb": "bind"}])
        shape = _shape(**resources)
        assert bed.extenders.concerns(shape) is concerned
        assert bed.extenders.binds(shape) is concerned

    asyncio.run(run())


def test_an_extender_that_only_binds_is_asked_about_no_nodes() -> None:
    async def run() -> None:
        bed = _Bed([Serving({})], [{"filter_verb": "", "bind_verb": "bind"}])
        assert not bed.extenders.concerns(_shape())
        assert not bed.extenders.preempts(_shape())
        assert bed.extenders.binds(_shape())
        other = _Bed([Serving({})], [{}])
        assert other.extenders.concerns(_shape())
        assert not other.extenders.preempts(_shape())
        assert not other.extenders.binds(_shape())
        third = _Bed([Serving({})], [{"filter_verb": "", "preempt_verb": "preempt"}])
        assert not third.extenders.concerns(_shape())
        assert third.extenders.preempts(_shape())

    asyncio.run(run())


# --- bind ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignorable", [False, True])
@pytest.mark.parametrize(
    ("answer", "problem"),
    [({}, ""), ({"Error": "taken"}, "taken"), ("no JSON", "the answer to bind cannot be read")],
)
def test_an_extender_binds_or_says_why_not(answer: Any, problem: str, ignorable: bool) -> None:
    async def run() -> None:
        async with serving({"bind": lambda body: answer}) as server:
            bed = _Bed([server], [{"bind_verb": "bind", "ignorable": ignorable}])
            bed.extenders.open()
            try:
                placement = Placement(namespace="default", name="p", uid="u", node="n0")
                if problem and not ignorable:
                    with pytest.raises(ApiError, match=problem) as raised:
                        await bed.extenders.bind(placement)
                    assert raised.value.status == 409
                    assert server.url in str(raised.value)
                else:
                    assert await bed.extenders.bind(placement) is not bool(problem)
            finally:
                await bed.extenders.close()
            assert server.bodies("bind") == [
                {"PodName": "p", "PodNamespace": "default", "PodUID": "u", "Node": "n0"}
            ]

    asyncio.run(run())


def test_the_first_of_several_failures_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving({"bind": lambda _: {}}) as server:
            bed = _Bed([server], [{"bind_verb": "bind", "ignorable": True}])
            bed.extenders.open()
            placement = Placement(namespace="default", name="p", uid="u", node="n0")
            for status in (500, 503, 200, 200, 404, 404):
                server.status = status
                assert await bed.extenders.bind(placement) is (status == 200)
            await bed.extenders.close()
            start = f"extender {server.url}: bind was answered with status "
            assert caplog.messages == [f"{start}500", f"{start}404"]

    asyncio.run(run())


def test_an_extender_with_unusable_files_is_named() -> None:
    configured = [
        {"tls_config": ExtenderTLSConfig(ca_file="/nowhere")} if number == 1 else {}
        for number in range(3)
    ]

    async def run() -> None:
        servers = [Serving({}, url=f"https://{number}.example.com") for number in range(3)]
        with pytest.raises(InputError) as raised:
            _Bed(servers, configured)
        assert (raised.value.obj, raised.value.field) == ("extenders", "extenders[1].tlsConfig")

    asyncio.run(run())


def test_a_pod_that_is_gone_when_its_turn_comes_is_not_asked_about() -> None:
    async def run() -> None:
        async with serving(_passing("n0")) as server:
            bed = _Bed([server], [{}])
            bed.deciding.names = None
            bed.extenders.open()
            pod = PendingPod(key="default/p", uid="u", priority=0, shape=_shape(), created=0.0)
            bed.extenders.ask(pod)
            await asyncio.gather(*bed.extenders._tasks)
            assert (server.asked, bed.deciding.said) == ([], [])
            await bed.extenders.close()

    asyncio.run(run())
