"""What a person reads whose field cannot be used: all that it takes, and what is there."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import inspect

from apis.annotations import parse_resctrl
from apis.device import parse_device_allocated
from apis.effective_nodeslo import decode_nodeslo
from apis.errors import InputError, InputErrors
from apis.expected import problem_of
from apis.nodeslo import (
    NodeSLOSpec,
)

_CPU_QOS = "resourceQOSStrategy.lsClass.cpuQOS"
_MEMORY_QOS = "resourceQOSStrategy.beClass.memoryQOS"


def spec_with(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return {"spec": value}


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (f"{_CPU_QOS}.groupIdentity", "1", "expected a whole number, -1 to 2, got text"),
        (f"{_CPU_QOS}.groupIdentity", 3, "expected a whole number, -1 to 2"),
        (f"{_CPU_QOS}.groupIdentity", -9, "expected a whole number, -1 to 2"),
        (f"{_CPU_QOS}.groupIdentity", 1.5, "expected a whole number, -1 to 2, got a number"),
        (f"{_CPU_QOS}.enable", 1, "expected true or false, got a whole number"),
        (f"{_MEMORY_QOS}.minLimitPercent", -1, "expected a whole number, 0 to 2^63-1"),
        (f"{_MEMORY_QOS}.wmarkScalePermill", 0, "expected a whole number, 1 to 1000"),
        ("resourceQOSStrategy", [], "expected an object, got a list"),
        ("resourceQOSStrategy.policies.cpuPolicy", "x", "expected one of groupIdentity, coreSched"),
        (
            "resourceQOSStrategy.policies.cpuPolicy",
            5,
            "expected one of groupIdentity, coreSched, got a whole number",
        ),
        (
            "resourceQOSStrategy.beClass.networkQOS.egressLimit",
            {},
            "expected a whole number or text, got an object",
        ),
        ("systemStrategy.schedFeatures", {"X": 1}, "expected true or false, got a whole number"),
        ("hostApplications", "x", "expected a list, got text"),
        ("systemStrategy.totalNetworkBandwidth", "many", "not a quantity; write a number with"),
    ],
)
def test_a_fields_error_names_all_accepted_values(path: str, value: Any, problem: str) -> None:
    with pytest.raises(InputErrors) as raised:
        decode_nodeslo(spec_with(path, value), obj="NodeSLO n1")
    (error,) = raised.value.errors
    assert error.field.startswith(f"spec.{path}")
    assert error.problem.startswith(problem)
    assert problem.startswith("not a quantity") or error.problem == problem


@pytest.mark.parametrize(
    ("parse", "text", "problem"),
    [
        (parse_resctrl, '{"llc":{"schemata":{"range":[1,2,3]}}}', "expected a list of at most 2"),
        (
            parse_device_allocated,
            f'{{"gpu":[{{"id":"{"x" * 300}"}}]}}',
            "expected text of at most 256 characters",
        ),
        (
            parse_device_allocated,
            '{"rdma":[{"extension":{"vfs":[{"busID":"0000:09:00.3"}]}}]}',
            "minor is missing",
        ),
    ],
)
def test_an_annotations_error_names_all_accepted_values(
    parse: Any, text: str, problem: str
) -> None:
    with pytest.raises(InputError) as raised:
        parse(text, obj="Pod default/web")
    assert raised.value.problem == problem


def test_no_field_of_a_nodeslo_speaks_in_the_decoders_words() -> None:
    def places(type_: inspect.Type, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        found = [path] if path else []
        if isinstance(type_, inspect.StructType):
            for each in type_.fields:
                found += places(each.type, (*path, each.encode_name))
        return found

    fields = places(inspect.type_info(NodeSLOSpec), ())
    assert len(fields) > 100
    for steps in fields:
        for wrong in ("no such thing", 2**70, -(2**70), 0.5, True, ["x"], {"x": "x"}):
            tree: Any = wrong
            for name in reversed(steps):
                tree = {name: tree}
            try:
                msgspec.convert(tree, NodeSLOSpec, strict=True)
            except msgspec.ValidationError as error:
                message = str(error).partition(" - at `")[0]
                problem = problem_of(message, NodeSLOSpec, steps, wrong)
                assert "`" not in problem, steps
                assert "another value" not in problem, steps
            except NotImplementedError:
                assert steps[-1] == "totalNetworkBandwidth"  # a quantity has a reader of its own
