"""What the README promises of `make demo` and `make run`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.beds.containerd import GENERATIONS
from tests.beds.groups import layout
from tests.beds.image import IMAGE
from tests.beds.packages import CHECKOUT
from tests.e2e.manifests import FIRST, SHARED, ls_pod

pytestmark = pytest.mark.containerd


def _demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo", *arguments],
        cwd=CHECKOUT,
        env={**os.environ, "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A suite that a shell runs in the background ignores Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _left_by(pid: int) -> list[str]:
    _, hierarchies = layout()
    folders = [*hierarchies, Path("/tmp")]
    return [str(path) for folder in folders for path in folder.glob(f"koord-bed-{pid}-*")]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_demo_shows_values_and_their_reasons_and_cleans_up(generation: str) -> None:
    demo = _demo("--containerd", generation)
    text, _ = demo.communicate(timeout=120)
    assert demo.returncode == 0, text
    for row in (
        rf"search/main +cpuset.cpus +CPU {FIRST} allocated +{FIRST} +CPUSetAllocator: ",
        rf"web/main +cpuset.cpus +class LS +{SHARED} +CPUSetAllocator: ",
        r" +cpu\.\S+ +cpu limit 1 +80000 +CPUNormalization: ",
        r"train/main +NVIDIA_VISIBLE_DEVICES +GPU 1 +1 +GPUEnvInject: ",
        r"batch \(pod\) +cpu.idle +class BE +1 +GroupIdentity: ",
        r"web/main +cpu\.\S+ +80000 +100000$",
        r"batch \(pod\) +cpu.idle +1 +0$",
    ):
        assert re.search(row, text, re.MULTILINE), f"no line {row!r} in:\n{text}"
    assert _left_by(demo.pid) == []


def _read_until(demo: subprocess.Popen[str], *texts: str) -> str:
    """Return what the demo prints up to the line after which all texts have appeared."""
    assert demo.stdout is not None
    shown = ""
    while not all(text in shown for text in texts):
        line = demo.stdout.readline()
        assert line, f"it ended early:\n{shown}"
        shown += line
    return shown


def test_the_kept_environment_runs_pods_from_its_folder_and_ends_on_ctrl_c() -> None:
    demo = _demo("--stay")
    try:
        shown = _read_until(demo, "import -")
        found = re.search(r"pods of your own +(\S+)/", shown)
        assert found is not None
        own = ls_pod("own")
        (Path(found[1]) / "own.yaml").write_text(yaml.safe_dump(own))
        (Path(found[1]) / "bad.yaml").write_text("kind: [")
        _read_until(demo, "pod own", "bad.yaml")
        # A pod whose image is missing starts once it was added, as the demo says.
        other = ls_pod("other")
        other["spec"]["containers"][0]["image"] = "koord.test/absent:1"
        (Path(found[1]) / "other.yaml").write_text(yaml.safe_dump(other))
        _read_until(demo, 'container "main" waits for image "koord.test/absent:1"')
        ctr = re.search(r"^ +(\S+/ctr .* images) list$", shown, re.MULTILINE)
        assert ctr is not None
        tag = [*ctr[1].split(), "tag", IMAGE, "koord.test/absent:1"]
        subprocess.run(tag, check=True, capture_output=True, timeout=30)
        _read_until(demo, "pod other")
    finally:
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, rest
    assert "cleaned up" in rest
    deadline = time.monotonic() + 5
    while _left_by(demo.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _left_by(demo.pid) == []
