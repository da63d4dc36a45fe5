"""These tests run only inside the machine; outside, tests/vm/test_machine.py boots one for them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

if os.environ.get("KOORD_VM") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.vm.inside.node import Node, node
    from tests.vm.inside.service import Service, installed

    @pytest.fixture(scope="session")
    def machine() -> Iterator[Node]:
        """This machine as a node, with kubelet's QoS slices."""
        with node() as made:
            yield made

    @pytest.fixture(scope="session")
    def service(machine: Node) -> Iterator[Service]:
        """koordlet as the unit that we ship, installed as docs/install.md says, and running."""
        with installed() as running:
            yield running
