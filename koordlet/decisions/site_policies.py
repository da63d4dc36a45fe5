"""Site policies: an operator's own policy files, loaded on change and isolated from the daemon.

The feature is off by default. A file of `policies.d` runs as root inside the daemon. So the file,
its directory and all directories above must belong to root or the daemon's user and must not be
writable by others. A symbolic link is refused, since its target could change unchecked. If a file
fails to load, its last good policy stays. If a call fails or takes too long, the policy is off for
that subject until its file changes, with an event; after several subjects it is off for all,
because a pod waits for every slow call. `hooks.site` defines what a policy may claim.
"""

from __future__ import annotations

import errno
import importlib.metadata
import importlib.util
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from apis.errors import InputError, InputErrors
from hooks.claim import Claimed
from hooks.policy import ClaimFunction, Policy
from hooks.site import ENTRY_POINT_GROUP, checked_policy
from hooks.subject import Subject
from koordlet.configuration.config import Config
from koordlet.decisions.decider import name_of
from koordlet.decisions.overtime import Alarm, Interrupter, Overtime
from service.events import Events, Severity

_LOG = logging.getLogger("koordlet.site")

LOAD_LIMIT_S: Final = 2.0
"""How long loading one file may take. Chosen: many times an import of a few modules, and loading
runs in a worker thread. Twice the value delays the other files of a start that much longer."""
MOST_FILES: Final = 64
_MAX_FILE_BYTES: Final = 1 << 20
"""Bounds of the directory. Chosen: many times what an operator maintains, so that a wrong directory
is an error. Twice the values allow twice the time of a load."""
MOST_SUBJECTS_OFF: Final = 8
"""A policy that is off for so many subjects is off for all. Chosen: at the default limit of 5 ms
that is 40 ms of waiting pods. Twice the value doubles that."""


class SiteLoader:
    """Loads the files and entry points. Used by one worker thread at a time."""

    def __init__(self, directory: str, interrupter: Interrupter) -> None:
        self._directory = directory
        self._interrupter = interrupter
        self._files: dict[str, tuple[_Stamp, Policy | None, str]] = {}
        self._entry_points: tuple[tuple[Policy, ...], tuple[tuple[str, str], ...]] | None = None

    def load(self) -> tuple[tuple[Policy, ...], tuple[tuple[str, str], ...]]:
        """Return the policies in force, and (origin, problem) of what could not be loaded."""
        if self._entry_points is None:
            self._entry_points = self._load_entry_points()
        installed, found_problems = self._entry_points
        policies = list(installed)
        problems = list(found_problems)
        taken = {policy.name for policy in policies}
        files: dict[str, tuple[_Stamp, Policy | None, str]] = {}
        for name in self._names(problems):
            path = f"{self._directory}/{name}"
            policy, problem = self._file(path, taken, files)
            if problem:
                problems.append((path, problem))
            if policy is not None:
                policies.append(policy)
                taken.add(policy.name)
        self._files = files
        return tuple(policies), tuple(problems)

    def _names(self, problems: list[tuple[str, str]]) -> list[str]:
        try:
            status = os.lstat(self._directory)
            names = sorted(os.listdir(self._directory))
        except FileNotFoundError:
            return []
        except OSError as error:
            problems.append((self._directory, error.strerror or str(error)))
            return []
        if stat.S_ISLNK(status.st_mode):
            problems.append((self._directory, "is a symbolic link: name the directory itself"))
            return []
        if problem := _ownership_problem(status):
            problems.append((self._directory, problem))
            return []
        if exposed := _exposed_above(self._directory):
            problems.append(exposed)
            return []
        found = [name for name in names if name.endswith(".py") and name[0] not in "._"]
        if len(found) > MOST_FILES:
            problems.append((self._directory, f"more than {MOST_FILES} files"))
        return found[:MOST_FILES]

    def _file(
        self,
        path: str,
        taken: set[str],
        files: dict[str, tuple[_Stamp, Policy | None, str]],
    ) -> tuple[Policy | None, str]:
        before = self._files.get(path)
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
            with open(os.open(path, flags), "rb") as file:
                status = os.fstat(file.fileno())
                stamp = _stamp(status)
                if before is not None and before[0] == stamp:
                    files[path] = before
                    return before[1], before[2]
                if problem := _file_problem(status):
                    raise InputError(obj=path, field="", value="", problem=problem)
                source = file.read(_MAX_FILE_BYTES + 1)
            if len(source) > _MAX_FILE_BYTES:
                raise InputError(obj=path, field="", value="", problem="larger than 1 MiB")
            policy, problem = self._execute(path, source, taken), ""
        except OSError as error:
            link = error.errno == errno.ELOOP
            problem = "is a symbolic link: copy the file" if link else error.strerror or str(error)
            return (before[1] if before else None), problem
        except InputError as error:
            # The caller reports the problem together with the file.
            policy, problem = None, error.problem if not error.field else str(error)
        except InputErrors as error:
            policy, problem = None, str(error)
        if policy is None and before is not None and before[1] is not None:
            policy, problem = before[1], f"{problem}; its last good version stays in force"
        files[path] = (stamp, policy, problem)
        return policy, problem

    def _execute(self, path: str, source: bytes, taken: set[str]) -> Policy:
        name = f"koordlet_site_{os.path.basename(path).removesuffix('.py')}"
        spec = importlib.util.spec_from_loader(name, loader=None, origin=path)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        module.__file__ = path
        sys.modules[name] = module
        try:
            code = compile(source, path, "exec")
            self._interrupter.run(lambda: exec(code, module.__dict__), LOAD_LIMIT_S)
        except Overtime:
            problem = f"took longer than {LOAD_LIMIT_S:g} s to load"
            raise InputError(obj=path, field="", value="", problem=problem) from None
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}"
            raise InputError(obj=path, field="", value="", problem=problem) from error
        return checked_policy(getattr(module, "POLICY", None), origin=path, taken=taken)

    def _load_entry_points(self) -> tuple[tuple[Policy, ...], tuple[tuple[str, str], ...]]:
        policies: list[Policy] = []
        problems: list[tuple[str, str]] = []
        for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
            taken = {policy.name for policy in policies}
            try:
                loaded = self._interrupter.run(point.load, LOAD_LIMIT_S)
                policies.append(checked_policy(loaded, origin=point.value, taken=taken))
            except Overtime:
                problems.append((point.value, f"took longer than {LOAD_LIMIT_S:g} s to load"))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - isolated, and reported
                problems.append((point.value, f"{type(error).__name__}: {error}"))
        return tuple(policies), tuple(problems)


class SiteGuard:
    """Calls site policies within their time limit, and records where they are off."""

    def __init__(
        self, events: Events, limit_s: float, run: Callable[[Callable[[], Any], float], Any]
    ) -> None:
        """run: `Alarm.run` or `Interrupter.run`, which raise Overtime after a time in seconds."""
        self._events = events
        self._limit_s = limit_s
        self._run = run
        self._off: dict[str, set[str]] = {}

    def forget(self) -> None:
        """Forget all failures, since the policies changed."""
        self._off = {}

    @property
    def off(self) -> dict[str, int]:
        """Policy -> number of subjects that it is off for."""
        return {policy: len(subjects) for policy, subjects in self._off.items()}

    def __call__(
        self, policy: str, function: ClaimFunction, rule: Any, subject: Subject
    ) -> Iterable[Claimed]:
        off = self._off.get(policy)
        if off is not None and (subject.key in off or len(off) >= MOST_SUBJECTS_OFF):
            return ()
        try:
            claims: tuple[Claimed, ...] = self._run(
                lambda: tuple(function(rule, subject)), self._limit_s
            )
        except Overtime:
            self._switch_off(policy, subject, f"took longer than {self._limit_s * 1000:g} ms")
            return ()
        except (InputError, InputErrors):
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a site's code is isolated
            self._switch_off(policy, subject, f"{type(error).__name__}: {error}")
            return ()
        return claims

    def _switch_off(self, policy: str, subject: Subject, problem: str) -> None:
        off = self._off.setdefault(policy, set())
        off.add(subject.key)
        everywhere = len(off) >= MOST_SUBJECTS_OFF
        where = "everywhere" if everywhere else "for this subject"
        self._events.add(
            "site-policy-off",
            name_of(subject),
            f"{policy} {problem}; it is off {where} until its file changes",
            severity=Severity.ERROR,
        )


class Site:
    """The loader and the two guards of a daemon. Must be created in the main thread."""

    def __init__(self, config: Config, events: Events) -> None:
        self._limit_s = config.site_policies.time_limit
        self._interrupter = Interrupter()
        self.loader = SiteLoader(config.site_policies.directory, self._interrupter)
        self.hook_guard = SiteGuard(events, self._limit_s, Alarm().run)
        self.repair_guard = SiteGuard(events, self._limit_s, self._interrupter.run)

    def plan_guard(self) -> SiteGuard:
        """Return a guard for one plan in a worker thread; it adds no events."""
        return SiteGuard(Events(), self._limit_s, self._interrupter.run)


class _Stamp(msgspec.Struct, frozen=True):
    inode: int
    size: int
    modified_ns: int
    owner: int
    mode: int


def _stamp(status: os.stat_result) -> _Stamp:
    """Return the attributes that show that a file, its owner or its mode changed."""
    return _Stamp(status.st_ino, status.st_size, status.st_mtime_ns, status.st_uid, status.st_mode)


def _file_problem(status: os.stat_result) -> str:
    return _ownership_problem(status) if stat.S_ISREG(status.st_mode) else "is not a regular file"


def _ownership_problem(status: os.stat_result) -> str:
    if status.st_uid not in (0, os.geteuid()):
        return "belongs to another user: chown root it"
    if stat.S_IMODE(status.st_mode) & 0o022:
        return "is writable by others: chmod go-w it"
    return ""


def _exposed_above(directory: str) -> tuple[str, str] | None:
    """Return (directory above, problem) if another user could replace `directory`."""
    for path in (directory, os.path.realpath(directory)):
        while (path := os.path.dirname(path)) != "/":
            status = os.stat(path)
            if status.st_uid not in (0, os.geteuid()):
                return path, "belongs to another user, who could replace what lies below it"
            shared = stat.S_IMODE(status.st_mode) & (0o002 if status.st_gid == 0 else 0o022)
            if shared and not status.st_mode & stat.S_ISVTX:
                return path, "is writable by others, who could replace what lies below it"
    return None
