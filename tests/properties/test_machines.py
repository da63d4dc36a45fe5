"""Some random lives of a node by each state machine of this folder.

`tests.properties.long` runs more of them.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.properties.disturbed_machine import DisturbedMachine
from tests.properties.edited_machine import EditedMachine
from tests.properties.measured_machine import MeasuredMachine
from tests.properties.node_machine import NodeMachine

pytestmark = pytest.mark.long

_SETTINGS = settings(
    # A run that looks for defects sets it to thousands.
    max_examples=int(os.environ.get("KOORD_PROPERTY_EXAMPLES", "40")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

TestNode = NodeMachine.TestCase
TestNode.settings = _SETTINGS
TestEdited = EditedMachine.TestCase
TestEdited.settings = _SETTINGS
TestDisturbed = DisturbedMachine.TestCase
TestDisturbed.settings = _SETTINGS
TestMeasured = MeasuredMachine.TestCase
TestMeasured.settings = _SETTINGS
