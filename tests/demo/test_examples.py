"""The examples are read by the daemon's own reader, without a complaint."""

from __future__ import annotations

from demo import scene
from koordlet.configuration.config import Mode
from koordlet.configuration.config_file import load
from koordlet.configuration.flags import parse_flags
from koordlet.sources.objects import Directory
from tests.beds.daemon import NODE_NAME


def test_the_node_objects_are_understood() -> None:
    read = Directory(str(scene.EXAMPLES / "objects"), NODE_NAME).scan()
    assert read.problems == ()
    assert read.slo is not None
    assert read.slo.resource_qos_strategy.be_class.cpu_qos.group_identity == -1
    assert read.topology is not None
    assert read.device is not None
    assert read.node is not None
    assert read.node.annotations["node.koordinator.sh/cpu-normalization-ratio"] == "1.25"


def test_the_pods_are_understood() -> None:
    read = Directory(str(scene.EXAMPLES / "pods"), NODE_NAME).scan()
    assert read.problems == ()
    assert {pod.metadata.name for pod in read.pods} == {"search", "web", "batch", "train"}


def test_the_configuration_is_understood() -> None:
    path = str(scene.EXAMPLES / "config.yaml")
    config = load(path=path, flags=parse_flags([]), environment={}, mode=Mode.HOST)
    assert config.node_name == NODE_NAME
    assert config.feature_gates["GPUEnvInject"]


def test_every_value_that_the_demo_shows_belongs_to_a_pod_of_the_examples() -> None:
    by_name = {pod["metadata"]["name"]: pod for pod in scene.pods()}
    for shown in scene.SHOWN:
        assert scene.requested(by_name[shown.pod], shown) != "nothing"
