"""`apis` as a distribution of its own: built, unpacked, used where nothing else is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]

USE = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import apis
for module in pkgutil.iter_modules(apis.__path__):
    importlib.import_module(f"apis.{module.name}")
from apis.crd import KINDS, custom_resource_definition
from apis.decode import decode_object
from apis.nodeslo import NodeSLO
data = b'{"spec":{"resourceQOSStrategy":{"beClass":{"cpuQOS":{"groupIdentity":-1}}}}}'
slo = decode_object(data, NodeSLO, obj="NodeSLO worker-1")
print(apis.__file__)
print(slo.spec.resource_qos_strategy.be_class.cpu_qos.group_identity)
print(len([custom_resource_definition(kind) for kind in KINDS]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apis")
    source = folder / "source"
    shutil.copytree(
        ROOT / "apis", source, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    )
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "wheel"),
            *("--no-deps", "--no-build-isolation", "-w", str(folder), str(source)),
        ],
        check=True,
        timeout=120,
    )
    (made,) = folder.glob("koordinator_apis-*.whl")
    return made


def bounds(requirement: str) -> set[str]:
    return set(requirement.removeprefix("msgspec").split(","))


def test_it_holds_the_package_and_asks_for_msgspec_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        fields = Parser().parsestr(archive.read(metadata).decode())
    modules = {f"apis/{path.name}" for path in (ROOT / "apis").glob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == modules | {"apis/py.typed"}
    assert any(name.endswith("/LICENSE") for name in names)
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (needed,) = (each for each in whole["dependencies"] if each.startswith("msgspec"))
    (wanted,) = fields.get_all("Requires-Dist", [])
    assert bounds(wanted) == bounds(needed)  # the build sorts them
    assert fields["Version"] == whole["version"]


def test_it_works_where_nothing_else_of_the_project_is(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    shutil.copytree(Path(msgspec.__file__).parent, tmp_path / "msgspec")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", USE, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "apis" / "__init__.py"), "-1", "13"]
