"""What a test may ask of the machine, and what happens when it is not there.

A test says what it needs with a marker (`root`, `cgroups`, `containerd`, `vm`, `apiserver`,
`kubelet`, `browser`) or, for a single fact, by calling `require`. What is missing becomes a skip
that says so. With KOORD_REQUIRE=1 in the environment (CI) such a skip is a failure for everything
that CI can provide: there, "not tried" must not look like "works".
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import HealthCheck, settings

from tests.beds.browser import program as browser_program
from tests.beds.errors import BedError
from tests.beds.groups import layout
from tests.beds.kubernetes import API_SERVER, ARCHIVES, KUBELET, programs

# What CI sets up by itself; a test of another tier may be skipped there. The programs of a
# Kubernetes come from a folder beside the checkout: their tiers are required where it exists.
PROVIDED_BY_CI = frozenset({"root", "cgroups", "containerd", "vm", "browser"}) | (
    {"apiserver", "kubectl", "kubelet", "kube_scheduler"} if ARCHIVES.is_dir() else set()
)

# A test that hangs fails with the stacks of all threads, and its fixtures clean up. The slowest
# tests take a minute on a busy machine, and a bed's first one also fetches packages. At twice the
# value a hang costs twice as much.
LIMIT_S = 300.0
# Boots of an emulated machine, and random lives as many as KOORD_PROPERTY_EXAMPLES asks for.
LONG_LIMIT_S = 3600.0


def require(present: object, missing: str, *, tier: str = "root") -> None:
    """Go on only if `present` is true; otherwise skip, or fail where CI provides the tier.

    missing: what is missing and how to get it; the person who runs the tests reads it.
    """
    if present:
        return
    if os.environ.get("KOORD_REQUIRE") == "1" and tier in PROVIDED_BY_CI:
        pytest.fail(f"{missing} (KOORD_REQUIRE=1: not skipped)", pytrace=False)
    pytest.skip(missing)


def missing_root() -> str | None:
    return None if os.geteuid() == 0 else "needs root: run the tests with sudo"


def missing_cgroups() -> str | None:
    """What keeps us from making v1 groups of our own: tried by making one, not by looking."""
    if reason := missing_root():
        return reason
    for controller in ("cpu", "cpuset", "memory"):
        root = Path("/sys/fs/cgroup") / controller
        if not (root / "cgroup.procs").exists():
            return f"needs a cgroup v1 {controller} hierarchy at {root}"
        probe = root / f"koord-probe-{os.getpid()}"
        try:
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            return f"needs a writable cgroup v1 hierarchy: {probe}: {error.strerror}"
    return None


def missing_containerd() -> str | None:
    if reason := missing_root():
        return reason
    try:
        _, hierarchies = layout()
        for hierarchy in hierarchies:
            probe = hierarchy / f"koord-probe-{os.getpid()}"
            probe.mkdir()
            probe.rmdir()
    except (BedError, OSError) as error:
        return f"needs cgroups to make groups in: {error}"
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            return f"needs {tool}: the containerd bed unpacks Debian packages"
    return None


def missing_vm() -> str | None:
    if shutil.which("qemu-system-x86_64") is None:
        return "needs QEMU: apt-get install qemu-system-x86"
    return None


def missing_browser() -> str | None:
    if browser_program() is None:
        return "needs Chromium: apt-get install chromium-headless-shell"
    return None


def missing_apiserver() -> str | None:
    try:
        programs(*API_SERVER)
    except BedError as error:
        return str(error)
    return None


def missing_kubelet() -> str | None:
    if reason := missing_root():
        return reason
    try:
        programs(*KUBELET)
    except BedError as error:
        return str(error)
    return None


def missing_kube_scheduler() -> str | None:
    try:
        programs("kube-scheduler")
    except BedError as error:
        return str(error)
    return None


PROBES: Mapping[str, Callable[[], str | None]] = MappingProxyType(
    {
        "root": missing_root,
        "cgroups": missing_cgroups,
        "containerd": missing_containerd,
        "vm": missing_vm,
        "browser": missing_browser,
        "apiserver": missing_apiserver,
        "kubelet": missing_kubelet,
        "kube_scheduler": missing_kube_scheduler,
    }
)
_answers: dict[str, str | None] = {}


def pytest_configure() -> None:
    # Ending the tests from outside is like Ctrl-C: fixtures still clean up what they made.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Speed is measured in benchmarks/: a busy machine must not fail a property. The suite tries the
    # same examples each time, so that it fails for the change under test; the long runs
    # (tests.properties.long, tests.nri_plugin.fuzz) are for finding what nobody knows yet.
    settings.register_profile(
        "any machine",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its time limit, unless it has one of its own (`pytest.mark.timeout`)."""
    if not config.pluginmanager.hasplugin("timeout"):
        if os.environ.get("KOORD_REQUIRE") == "1":
            raise pytest.UsageError("needs pytest-timeout: run .ci/venv .venv")
        return
    for item in items:
        if item.get_closest_marker("timeout") is None:
            limit_s = LONG_LIMIT_S if item.get_closest_marker("long") else LIMIT_S
            item.add_marker(pytest.mark.timeout(limit_s))


def pytest_collection_finish() -> None:
    """Freeze the objects that the collection of the tests made: they live as long as the session.

    Python's garbage collector then leaves them out. Otherwise each full pass over those of nine
    thousand tests takes a third of a second.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ask each tier's probe once, and only if a test of that tier is about to run."""
    for tier, probe in PROBES.items():
        if item.get_closest_marker(tier) is None:
            continue
        if tier not in _answers:
            _answers[tier] = probe()
        require(_answers[tier] is None, _answers[tier] or "", tier=tier)
