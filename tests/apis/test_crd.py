"""The installed CRDs are those that the types say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from apis.crd import KINDS, Kind, custom_resource_definition, structure

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
    threshold = schema("NodeSLO", "spec", "resourceUsedThresholdWithBE")["properties"]
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
    assert reservation["properties"]["template"] == {"x-kubernetes-preserve-unknown-fields": True}


def test_structure_ignores_words_but_not_properties_named_description() -> None:
    manifest = custom_resource_definition(KINDS[0])
    worded = custom_resource_definition(KINDS[0])
    top = worded["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    top["description"] = "words"
    assert structure(worded) == structure(manifest)
    top["properties"]["description"] = {"type": "string"}
    assert structure(worded) != structure(manifest)
