"""Members of JSON texts inside objects: matched as Go matches them, and named when unknown."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apis import annotations as a
from apis import decode
from apis.decode import Embedded, decode_field, field_decoder
from apis.device import parse_device_allocated
from apis.errors import InputError
from apis.members import fold, respell
from apis.nodeslo import NodeSLO
from apis.topology import (
    parse_cpu_basic_info,
    parse_cpu_manager_policy,
    parse_cpu_shared_pools,
    parse_cpu_topology,
    parse_node_reservation,
    parse_pod_cpu_allocs,
    parse_system_qos_resource,
)

POD = "Pod default/web"


@pytest.mark.parametrize(
    ("parse", "written", "exact"),
    [
        (a.parse_resource_status, '{"cpuSet":"2-4"}', '{"cpuset":"2-4"}'),
        (
            a.parse_resource_status,
            '{"NUMANodeResources":[{"Node":1,"RESOURCES":{"cpu":"4"}}]}',
            '{"numaNodeResources":[{"node":1,"resources":{"cpu":"4"}}]}',
        ),
        (
            a.parse_cpu_qos,
            '{"Enable":true,"groupidentity":-1}',
            '{"enable":true,"groupIdentity":-1}',
        ),
        (a.parse_memory_qos, '{"Policy":"auto"}', '{"policy":"auto"}'),
        (a.parse_cpu_burst, '{"CPUBurstPercent":200}', '{"cpuBurstPercent":200}'),
        (
            a.parse_blkio_qos,
            '{"Blocks":[{"NAME":"/dev/sdb","iocfg":{"readiops":5}}]}',
            '{"blocks":[{"name":"/dev/sdb","ioCfg":{"readIOPS":5}}]}',
        ),
        (a.parse_network_qos, '{"IngressLimit":"10M"}', '{"ingressLimit":"10M"}'),
        (
            a.parse_resctrl,
            '{"LLC":{"schemataPerCache":[{"cacheid":1,"Range":[0,30]}]}}',
            '{"llc":{"schemataPerCache":[{"cacheID":1,"range":[0,30]}]}}',
        ),
        (
            a.parse_extended_resource_spec,
            '{"Containers":{"main":{"Limits":{"kubernetes.io/batch-cpu":"1k"}}}}',
            '{"containers":{"main":{"limits":{"kubernetes.io/batch-cpu":"1k"}}}}',
        ),
        (
            parse_device_allocated,
            '{"rdma":[{"Minor":1,"ID":"0000:09:00.0","extension":{"VFs":[{"minor":2,"busId":"x"}]}}]}',
            '{"rdma":[{"minor":1,"id":"0000:09:00.0","extension":{"vfs":[{"minor":2,"busID":"x"}]}}]}',
        ),
        (
            parse_cpu_shared_pools,
            '[{"Socket":1,"NODE":1,"cpuSet":"0-3"}]',
            '[{"socket":1,"node":1,"cpuset":"0-3"}]',
        ),
        (
            parse_cpu_manager_policy,
            '{"Policy":"static","reservedCpus":"0-1"}',
            '{"policy":"static","reservedCPUs":"0-1"}',
        ),
        (
            parse_system_qos_resource,
            '{"CPUSet":"0-3","CPUSetExclusive":false}',
            '{"cpuset":"0-3","cpusetExclusive":false}',
        ),
        (parse_cpu_basic_info, '{"vendorId":"x"}', '{"vendorID":"x"}'),
        (
            parse_cpu_topology,
            '{"Detail":[{"ID":0,"Core":0,"Socket":0,"Node":0}]}',
            '{"detail":[{"id":0,"core":0,"socket":0,"node":0}]}',
        ),
        (parse_pod_cpu_allocs, '[{"UID":"u","cpuSet":"1"}]', '[{"uid":"u","cpuset":"1"}]'),
        (parse_node_reservation, '{"ReservedCpus":"0-5"}', '{"reservedCPUs":"0-5"}'),
    ],
)
def test_the_letter_case_of_members_does_not_matter(
    parse: Callable[..., Any], written: str, exact: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert parse(written, obj=POD) == parse(exact, obj=POD)
    assert parse(written, obj=POD) != parse("[]" if exact[0] == "[" else "{}", obj=POD)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("text", "cpuset"),
    [
        ('{"cpuset":"0","cpuSet":"1"}', "1"),
        ('{"cpuSet":"1","cpuset":"0"}', "0"),
        ('{"cpuset":"0","cpuSet":"1","cpuset":"2"}', "2"),
        ('{"cpuSet":"1","cpuset":"0","cpuSet":null}', "0"),
        ('{"cpu\u017fet":"3"}', "3"),
        ('{"cpuſet":"3"}', "3"),
        ('{"cpuset":null}', ""),
        # Letters that only a full case folding equates, or that look alike.
        ('{"cpu\u00dfet":"3"}', ""),
        ('{"\u0441puset":"3"}', ""),
    ],
)
def test_the_last_of_several_spellings_counts(text: str, cpuset: str) -> None:
    assert str(a.parse_resource_status(text, obj=POD).cpus) == cpuset


def test_names_fold_as_gos_decoder_folds_them() -> None:
    assert fold("CacheID") == fold("cacheid") == fold("CACHEID") == "cacheid"
    assert fold("wmar\u212aScalePermill") == fold("wmarkScalePermill")
    assert fold("U\u017fage") == fold("usage")
    for other in ("u\u00df", "\u0130d", "\u0131d", "\ufb01x", "\u0421pu"):
        assert not fold(other).isascii(), other


def test_keys_of_maps_keep_their_letter_case() -> None:
    spec = a.parse_extended_resource_spec(
        '{"CONTAINERS":{"Main":{"limits":{"X":"1","x":"2"}}}}', obj=POD
    )
    assert list(spec.containers) == ["Main"]
    assert set(spec.containers["Main"].limits) == {"X", "x"}
    assert "gpu" not in parse_device_allocated('{"GPU":[{"minor":0}]}', obj=POD)


def test_an_unknown_member_is_named_once_and_costs_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    decode.name_unknown_members.cache_clear()
    text = '{"llc":{"schemata":{"rnge":[0,30]}},"mb":{"schemata":{"percent":20}},"bandwidth":1}'
    with caplog.at_level(logging.WARNING):
        for obj in (POD, POD, "Pod default/other"):
            resctrl = a.parse_resctrl(text, obj=obj)
    assert resctrl.mb.schemata.percent == 20
    assert caplog.messages == [
        f'{obj}: metadata.annotations["node.koordinator.sh/resctrl"]: unknown members are ignored: '
        "llc.schemata.rnge (did you mean range?), bandwidth"
        for obj in (POD, "Pod default/other")
    ]


def test_an_unknown_member_beside_a_bad_value_leaves_the_value_named() -> None:
    with pytest.raises(InputError) as caught:
        a.parse_cpu_qos('{"Group_Identity":1,"GroupIdentity":9}', obj=POD)
    assert caught.value.field.endswith('cpuQOS"].groupIdentity')


def test_many_and_long_unknown_members_give_a_short_line(caplog: pytest.LogCaptureFixture) -> None:
    decode.name_unknown_members.cache_clear()
    members = {f"member{number}": number for number in range(1000)} | {"x" * 100_000: 1}
    with caplog.at_level(logging.WARNING):
        a.parse_cpu_qos(json.dumps({"y\n" * 30_000: 1, **members}), obj=POD)
    (line,) = caplog.messages
    assert line.endswith(" and 994 more")
    assert "\n" not in line and len(line) < 1000


def test_objects_of_the_api_server_match_exactly() -> None:
    decoded = decode.json_decoder(NodeSLO)(b'{"spec":{"hostapplications":[{"name":"x"}]}}')
    assert decoded.spec.host_applications == ()


class Loose(msgspec.Struct):
    inner: int = 0


class Outer(Embedded, frozen=True):
    members: dict[str, tuple[Loose | None, ...]]


def test_a_type_that_would_drop_members_silently_is_refused() -> None:
    with pytest.raises(TypeError, match="Loose"):
        field_decoder(Outer)


class Leaf(Embedded, frozen=True):
    cache_id: int | None = msgspec.field(name="cacheID", default=None)
    size: str = ""


class Tree(Embedded, frozen=True):
    leaf: Leaf | None = None
    leaves: tuple[Leaf, ...] = ()
    by_name: dict[str, Leaf] = msgspec.field(default_factory=dict)


_decoder = field_decoder(Tree)


def spellings(name: str) -> st.SearchStrategy[str]:
    def spelt(shift: list[int]) -> str:
        letters = [
            (letter.lower(), letter.upper(), {"s": "\u017f", "k": "\u212a"}.get(letter, letter))[n]
            for letter, n in zip(name, shift, strict=True)
        ]
        return "".join(letters)

    shifts = st.lists(st.integers(0, 2), min_size=len(name), max_size=len(name))
    return st.one_of(st.just(name), shifts.map(spelt))


def members(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[str, str, Any]]]:
    """Lists of (exact name, written name, value)."""
    each = [st.tuples(st.just(name), spellings(name), value) for name, value in values.items()]
    unknown = st.tuples(st.just(""), st.sampled_from(["other", "cache_id", "siz"]), st.integers())
    return st.lists(st.one_of(*each, unknown), max_size=6)


def written(pairs: list[tuple[str, str, Any]]) -> str:
    return "{" + ",".join(f"{json.dumps(name)}:{text(value)}" for _, name, value in pairs) + "}"


def text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        is_object = bool(value) and isinstance(value[0], tuple) and len(value[0]) == 3
        return written(value) if is_object else "[" + ",".join(map(text, value)) + "]"
    return json.dumps(value)


def exactly(pairs: list[tuple[str, str, Any]], plain: Callable[[str, Any], Any]) -> dict[str, Any]:
    """The specification: member by member, the later over the earlier, null saying nothing."""
    result: dict[str, Any] = {}
    for name, _, value in pairs:
        if name and value is not None:
            result[name] = plain(name, value)
    return result


LEAF = members(cacheID=st.none() | st.integers(0, 9), size=st.text(max_size=2)).filter(bool)


def leaf(pairs: list[tuple[str, str, Any]]) -> dict[str, Any]:
    return exactly(pairs, lambda _, value: value)


@given(
    members(
        leaf=st.none() | LEAF,
        leaves=st.lists(LEAF, min_size=1, max_size=2),
        byName=st.dictionaries(st.sampled_from(["A", "a"]), LEAF, min_size=1),
    )
)
def test_a_text_means_what_its_exact_spelling_means(pairs: list[tuple[str, str, Any]]) -> None:
    def plain(name: str, value: Any) -> Any:
        match name:
            case "leaf":
                return leaf(value)
            case "leaves":
                return [leaf(each) for each in value]
        return {key: leaf(each) for key, each in value.items()}

    exact = exactly(pairs, plain)
    expected = msgspec.convert(exact, Tree)
    assert decode_field(_decoder, written(pairs), obj=POD, field="x") == expected
    assert respell(json.loads(json.dumps(exact)), Tree) == (exact, "")
