"""A paced host does what its host does, and steps aside before what a pass repeats.

After a write, so that nothing comes between a check and the write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from linux.host import Host
from linux.paced_host import PacedHost

REPEATED = {"read", "write", "listdir", "directories", "is_dir", "inode", "core_sched_cookie"}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "write": ("/f", b"1"),
    "core_sched_cookie": (7,),
    "core_sched_create": (7,),
    "core_sched_copy": (7, [8]),
}
OPERATIONS = sorted(name for name in vars(Host) if not name.startswith("_"))


class Noting:
    """A host that notes the calls, and answers with the name of the operation."""

    def __init__(self, calls: list[tuple[Any, ...]]) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Callable[..., str]:
        def call(*arguments: Any) -> str:
            self._calls.append((name, *arguments))
            return name

        return call


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_the_hosts(name: str) -> None:
    calls: list[tuple[Any, ...]] = []
    host: Any = Noting(calls)
    paced = PacedHost(host, lambda: calls.append(("aside",)))
    arguments = ARGUMENTS.get(name, ("/f",))
    answer = getattr(paced, name)(*arguments)
    assert answer == (None if name == "write" else name)
    expected: list[tuple[Any, ...]] = [(name, *arguments)]
    if name in REPEATED:
        expected.insert(1 if name == "write" else 0, ("aside",))
    assert calls == expected


def test_an_error_of_the_host_stays_as_it_is() -> None:
    class Failing:
        def __getattr__(self, name: str) -> Callable[..., str]:
            def call(*_arguments: Any) -> str:
                raise FileNotFoundError(2, "No such file or directory", "/f")

            return call

    host: Any = Failing()
    with pytest.raises(FileNotFoundError, match="/f"):
        PacedHost(host, lambda: None).read("/f")
