"""The limit of open files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import cluster.manager.main as manager_main
import koordlet.main as koordlet_main
import runtime_proxy.main as runtime_proxy_main

SCRIPT = """
import resource
from service.open_files import raise_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
assert raise_limit() == hard
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
assert raise_limit() == hard
def refuse(*_):
    raise OSError(1, "not permitted")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
resource.setrlimit = refuse
assert raise_limit() == 64
"""


def test_the_soft_limit_becomes_the_hard_one() -> None:
    """In a process of its own: the limit is the whole process'."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "open files stay limited to 64: [Errno 1] not permitted" in done.stderr


class Asked(BaseException):
    """The limit was asked to be raised."""


STARTS: dict[str, Callable[[], object]] = {
    "koordlet": lambda: koordlet_main.main(["run"]),
    "koord-runtime-proxy": lambda: runtime_proxy_main.main([]),
    "koord-manager": lambda: manager_main.main([]),
}


@pytest.mark.parametrize("daemon", STARTS)
def test_each_daemon_raises_it(daemon: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_limit() -> int:
        raise Asked

    monkeypatch.setattr("service.open_files.raise_limit", raise_limit)
    with pytest.raises(Asked):
        STARTS[daemon]()
