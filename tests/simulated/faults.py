"""Scripted trouble: what goes wrong at which operation of the program under test.

Only operations that come through `SimulatedKernel`'s own `Host` methods are counted; the other
actors (kubelet, the runtime, systemd) are not disturbed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from tests.simulated.values import refuse

Operation = Literal["read", "write", "listdir", "mkdir", "rmdir"]


class Crash(BaseException):
    """The process under test ends here. Nothing of it may catch this."""


@dataclass
class _Fault:
    operation: Operation
    path: str  # a glob over the whole path
    nth: int  # 1 is the next one; 0 is every one
    action: Callable[[], None]
    after: bool
    seen: int = 0


@dataclass
class Faults:
    """The script. Several faults may wait at once; each counts its own matches."""

    _waiting: list[_Fault] = field(default_factory=list)

    def before(
        self, operation: Operation, action: Callable[[], None], *, path: str = "*", nth: int = 1
    ) -> None:
        """Run `action` just before the nth matching operation (nth 0: before each)."""
        self._waiting.append(_Fault(operation, path, nth, action, after=False))

    def after(
        self, operation: Operation, action: Callable[[], None], *, path: str = "*", nth: int = 1
    ) -> None:
        """Run `action` just after the nth matching operation succeeded."""
        self._waiting.append(_Fault(operation, path, nth, action, after=True))

    def fail(self, operation: Operation, error: int, *, path: str = "*", nth: int = 1) -> None:
        """Let the nth matching operation fail with `error` (nth 0: each), leaving no trace."""
        self.before(operation, lambda: refuse(error, "scripted fault"), path=path, nth=nth)

    def crash(self, operation: Operation, *, path: str = "*", nth: int = 1) -> None:
        """End the process under test just before the nth matching operation."""

        def end() -> None:
            raise Crash(f"scripted crash before {operation} {nth} of {path}")

        self.before(operation, end, path=path, nth=nth)

    def clear(self) -> None:
        """Forget what is still waiting."""
        self._waiting.clear()

    def meet(self, operation: Operation, path: str, *, done: bool) -> None:
        """Called around each operation: runs what is due."""
        for fault in list(self._waiting):
            if fault.after is not done or fault.operation != operation:
                continue
            if not fnmatchcase(path, fault.path):
                continue
            fault.seen += 1
            if fault.nth == 0:
                fault.action()
            elif fault.seen == fault.nth:
                self._waiting.remove(fault)
                fault.action()
