"""The same files given to a real kube-scheduler, which reads them, writes what it made and ends.

No API server is needed. About 0.1 s a file, 3 s in all.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.scheduler.configuration.points import PLUGINS, Point
from cluster.scheduler.configuration.reading import default_configuration, read_configuration
from cluster.scheduler.configuration.writing import to_tree
from tests.beds.kubernetes import programs
from tests.cluster.scheduler.configuration.files import Tree, enabled, errors_of, file

pytestmark = pytest.mark.kube_scheduler

Read = Callable[[Tree], "str | None"]

KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    # Nothing listens on port 1; kube-scheduler ends before it connects.
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    "users": [{"name": "u", "user": {}}],
    "current-context": "c",
}

# Plugins that kube-scheduler has only from a version on, or only with a feature gate.
NOT_EVERYWHERE = {"NodeDeclaredFeatures", "GangScheduling"}
KUBE_SCHEDULERS = [
    name
    for name in list(PLUGINS)[: list(PLUGINS).index("LoadAwareScheduling")]
    if name not in NOT_EVERYWHERE
]


@pytest.fixture
def kube_scheduler(tmp_path: Path) -> Read:
    """Return a function that gives kube-scheduler a file: what it writes, None if it refuses."""
    kubeconfig, given, written = (tmp_path / name for name in ("kubeconfig", "given", "written"))
    kubeconfig.write_text(yaml.safe_dump(KUBECONFIG))
    program = programs("kube-scheduler") / "kube-scheduler"

    def read(tree: Tree) -> str | None:
        given.write_text(
            yaml.safe_dump(tree | {"clientConnection": {"kubeconfig": str(kubeconfig)}})
        )
        ended = subprocess.run(
            [program, f"--config={given}", f"--write-config-to={written}", "--secure-port=0"],
            capture_output=True,
            timeout=60,
        )
        return written.read_text() if ended.returncode == 0 else None

    return read


def at(point: Point, *names: str) -> Tree:
    return file(profiles=[{"plugins": {point.value: enabled(*names)}}])


def arguments(tree: Any) -> dict[str, Any]:
    (profile,) = tree["profiles"]
    return {each["name"]: each["args"] for each in profile["pluginConfig"]}


def test_its_defaults_are_ours(kube_scheduler: Read) -> None:
    text = kube_scheduler(file())
    assert text is not None
    ours = arguments(to_tree(default_configuration()))
    for name, expected in arguments(yaml.safe_load(text)).items():
        if not PLUGINS[name].left_out:
            assert ours[name] == expected
    read = read_configuration(text, obj="written").profiles[0]
    default = default_configuration().profiles[0]
    assert read.score_weights == default.score_weights
    for point in set(Point) - {Point.PRE_BIND}:  # DefaultPreBind is ours
        assert read.plugins[point] == default.plugins[point]


def test_it_takes_what_we_write(kube_scheduler: Read) -> None:
    assert kube_scheduler(to_tree(default_configuration())) is not None


@pytest.mark.parametrize("point", Point)
def test_its_plugins_extend_the_points_that_ours_do(kube_scheduler: Read, point: Point) -> None:
    here = [name for name in KUBE_SCHEDULERS if point in PLUGINS[name].points]
    elsewhere = [name for name in KUBE_SCHEDULERS if name not in here]
    assert kube_scheduler(at(point, *here)) is not None
    assert not errors_of(at(point, *here))
    wrong = elsewhere[len(point) % len(elsewhere)]  # one of them: each file takes 0.1 s
    assert kube_scheduler(at(point, wrong)) is None
    assert errors_of(at(point, wrong))
