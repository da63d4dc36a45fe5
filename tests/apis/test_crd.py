"""The installed CRDs are those that the types say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from apis.crd import KINDS, Kind, custom_resource_definition
from apis.decode import Wire

CRDS = Path(__file__).parent.parent.parent / "deploy" / "crds"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_installed_crd_is_what_the_types_say(kind: Kind) -> None:
    path = CRDS / f"{kind.group}_{kind.plural}.yaml"
    stored = yaml.safe_load(path.read_text())
    assert stored == custom_resource_definition(kind), "run tools/generate_manifests.py"


def test_no_other_crd_is_installed() -> None:
    assert {path.name for path in CRDS.glob("*.yaml")} == {
        f"{kind.group}_{kind.plural}.yaml" for kind in KINDS
    }


def schema(name: str, *path: str) -> Any:
    kind = next(kind for kind in KINDS if kind.name == name)
    found: Any = custom_resource_definition(kind)["spec"]["versions"][0]["schema"]
    found = found["openAPIV3Schema"]
    for step in path:
        found = found["properties"][step]
    return found


def test_bounds_are_the_apis_and_not_the_nodes() -> None:
    block = schema("NodeSLO", "spec", "resourceUsedThresholdWithBE")
    threshold = {
        name: {key: value for key, value in member.items() if key != "description"}
        for name, member in block["properties"].items()
    }
    assert threshold["cpuSuppressThresholdPercent"] == {
        "type": "integer",
        "format": "int64",
        "minimum": 0,
        "maximum": 100,
    }
    # The node refuses what these let pass.
    assert threshold["cpuSuppressPolicy"] == {"type": "string"}
    assert threshold["cpuEvictBESatisfactionUpperPercent"] == {"type": "integer", "format": "int64"}


def test_what_the_api_server_fills_in_and_demands() -> None:
    network = schema("NodeSLO", "spec", "resourceQOSStrategy", "lsClass", "networkQOS")
    assert network["properties"]["egressLimit"]["default"] == 100
    reservation = schema("Reservation", "spec")
    assert reservation["required"] == ["owners", "template"]
    assert reservation["properties"]["ttl"]["default"] == "24h"
    template = dict(reservation["properties"]["template"])
    assert template.pop("description").startswith("Pod template")
    assert template == {"x-kubernetes-preserve-unknown-fields": True}


def undescribed(node: Any, place: str) -> Iterator[str]:
    """Yield the places of properties and objects that `kubectl explain` has no words for."""
    description = node.get("description", "")
    if "properties" in node or place.rpartition(".")[2] not in ("items", "*", "metadata"):
        shown = re.fullmatch(r"[A-Za-z0-9].*[.]", description)
        if not shown or ": :" in description or "`" in description or "_" in description:
            yield f"{place}: {description!r}"
    for name, member in node.get("properties", {}).items():
        yield from undescribed(member, f"{place}.{name}")
    for inner, name in (("items", "items"), ("additionalProperties", "*")):
        if inner in node:
            yield from undescribed(node[inner], f"{place}.{name}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_field_is_described_in_a_sentence(kind: Kind) -> None:
    versions = custom_resource_definition(kind)["spec"]["versions"]
    for version in versions:
        missing = list(undescribed(version["schema"]["openAPIV3Schema"], kind.name))
        # Names of kernel files are the words with underscores.
        kernels = ("memory.", "cpu.", "kernel.", "vm.")
        assert [place for place in missing if not any(name in place for name in kernels)] == []


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_crd_can_be_applied_from_the_client_side(kind: Kind) -> None:
    """`kubectl apply` keeps the manifest in an annotation; all annotations have 256 KiB."""
    assert len(json.dumps(custom_resource_definition(kind))) < 128 * 1024


def test_a_field_that_the_docstring_leaves_out_is_refused() -> None:
    class Spec(Wire, frozen=True):
        """A spec.

        told: What is said.
        """

        told: str = ""
        untold: str = ""

    with pytest.raises(ValueError, match="Spec does not describe untold"):
        custom_resource_definition(Kind(Spec, "example.org", "specs", True, False))
