"""Reads the registration files of hook servers.

A registration is a JSON object in a file whose name ends in `json`, in the folder that
`--hook-server-dir` names:

| member | value |
|---|---|
| `remote-endpoint` | absolute path of the server's Unix socket, also as a `unix://` URL |
| `failure-policy` | `Fail`, `Ignore`, or empty for `Ignore` |
| `runtime-hooks` | names of the stages that the server wants; unknown names are skipped |

Member names are compared without regard to case, as Go's decoder does. A file that is not a valid
registration leaves the last valid one of its name in force. Removing a file removes its
registration. Servers are asked in the order of their file names.
"""

import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from runtime_proxy.stages import Stage
from service.unix import LONGEST_PATH

log = logging.getLogger(__name__)

_SUFFIX = "json"
# Chosen: a registration has about 300 bytes.
_MAX_FILE_BYTES = 64 * 1024


class RegistrationError(Exception):
    """A file is not a valid registration. The text names the file, the field and the value."""


@dataclass(frozen=True, slots=True)
class Registration:
    """One hook server.

    name: the file's name, which decides the order. endpoint: the path of the socket. fail: the
    failure policy is Fail: a call for which the server gives no answer fails. stages: what the
    server wants to be asked about.
    """

    name: str
    endpoint: str
    fail: bool
    stages: frozenset[Stage]


def parse_registration(name: str, content: bytes) -> Registration:
    """Return the registration in a file's content. Raises RegistrationError."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RegistrationError(f"{name}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise RegistrationError(f"{name}: not a JSON object")
    # As Go reads JSON: keys match in any case.
    fields = {str(key).lower(): value for key, value in document.items()}
    endpoint = fields.get("remote-endpoint", "")
    if not isinstance(endpoint, str) or not endpoint.removeprefix("unix://").startswith("/"):
        raise RegistrationError(
            f"{name}: remote-endpoint: {endpoint!r} is not the absolute path of a unix socket"
        )
    endpoint = endpoint.removeprefix("unix://")
    if len(os.fsencode(endpoint)) > LONGEST_PATH or "\0" in endpoint:
        raise RegistrationError(
            f"{name}: remote-endpoint: the path of a unix socket has at most {LONGEST_PATH} bytes"
        )
    policy = fields.get("failure-policy")
    if policy not in ("Fail", "Ignore", "", None):
        raise RegistrationError(f"{name}: failure-policy: {policy!r} is neither Fail nor Ignore")
    wanted = fields.get("runtime-hooks") or []
    if not isinstance(wanted, list) or not all(isinstance(hook, str) for hook in wanted):
        raise RegistrationError(f"{name}: runtime-hooks: not a list of names")
    known = {stage.value: stage for stage in Stage}
    unknown = sorted(set(wanted) - known.keys())
    if unknown:
        log.info("unknown stages are never called", extra={"file": name, "hooks": unknown})
    return Registration(
        name=name,
        endpoint=endpoint,
        fail=policy == "Fail",
        stages=frozenset(known[hook] for hook in wanted if hook in known),
    )


def _read(folder: str, name: str) -> bytes:
    """Return a file's content. Raises RegistrationError for a file that others could have written.

    The name may be a symbolic link, as in a mounted ConfigMap, where it leads through a second one
    (`koordlet.json` to `..data/koordlet.json`, `..data` to a folder). A user who
    may make links in the registration folder may register servers anyway, so only the owner of the
    link counts.
    """
    path = os.path.join(folder, name)
    link = os.lstat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in _trusted_users():
        raise RegistrationError(f"{name}: a symbolic link of user {link.st_uid}: chown -h root")
    # Without O_NONBLOCK, opening a FIFO would wait for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise RegistrationError(f"{name}: not a regular file")
        if status.st_uid not in _trusted_users() or status.st_mode & 0o022:
            raise RegistrationError(
                f"{name}: must belong to root and be writable by its owner alone "
                f"(owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}): "
                f"chown root and chmod go-w"
            )
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise RegistrationError(f"{name}: larger than {_MAX_FILE_BYTES} bytes")
    return content


def _trusted_users() -> tuple[int, int]:
    """The owners whose files count: root, and the proxy's own user."""
    return 0, os.geteuid()


class Registrations:
    """The registrations in a folder. `scan` brings them up to date."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._good: dict[str, Registration] = {}
        self._content_of: dict[str, bytes] = {}
        self._complaints: dict[str, str] = {}

    @property
    def current(self) -> tuple[Registration, ...]:
        return tuple(self._good[name] for name in sorted(self._good))

    @property
    def complaints(self) -> Mapping[str, str]:
        """Why a file is not used, by its name, for the health page."""
        return self._complaints

    def scan(self) -> bool:
        """Read every file, and return whether the registrations changed."""
        before = self.current
        try:
            names = [
                entry.name for entry in os.scandir(self.folder) if entry.name.endswith(_SUFFIX)
            ]
        except FileNotFoundError:
            names = []
        except OSError as error:
            self._complain("", f"{self.folder}: {error.strerror}")
            return False
        for gone in (self._good.keys() | self._complaints.keys()) - set(names):
            self._good.pop(gone, None)
            self._content_of.pop(gone, None)
            self._complaints.pop(gone, None)
        for name in names:
            self._update(name)
        return self.current != before

    def _update(self, name: str) -> None:
        try:
            content = _read(self.folder, name)
            if self._content_of.get(name) != content:
                self._good[name] = parse_registration(name, content)
                self._content_of[name] = content
            self._complaints.pop(name, None)
        except FileNotFoundError:
            self._good.pop(name, None)
            self._content_of.pop(name, None)
            self._complaints.pop(name, None)
        except OSError as error:
            self._complain(name, f"{name}: {error.strerror}")
        except RegistrationError as error:
            self._complain(name, str(error))

    def _complain(self, name: str, complaint: str) -> None:
        if self._complaints.get(name) != complaint:
            self._complaints[name] = complaint
            log.warning("registration cannot be used", extra={"reason": complaint})
