"""A headless Chromium, spoken to in its DevTools protocol over two pipes, without any port.

Messages are JSON objects that end with a zero byte. An answer carries its request's number; a
message without one is an event. https://chromedevtools.github.io/devtools-protocol describes both.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.beds.errors import BedError
from tests.beds.packages import DIES_WITH_US

_PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_PATIENCE_S = 60.0
"""Chosen: an answer takes milliseconds, the start of the browser seconds on a busy machine."""
_READS, _WRITES = 3, 4
"""The descriptors of the browser that --remote-debugging-pipe means."""
_OPTIONS = (
    "--headless", "--remote-debugging-pipe", "--disable-gpu", "--no-first-run",
    "--disable-background-networking", "--disable-dev-shm-usage",
    # Tests may run as root, for whom Chromium has no sandbox. The pages are our own.
    "--no-sandbox",
)  # fmt: skip


def program() -> str | None:
    """Return the path of the browser that is installed; None if there is none."""
    return next((found for name in _PROGRAMS if (found := shutil.which(name))), None)


class Page:
    """A tab. `events` grows with what the browser reports of it while a call is answered."""

    def __init__(self, requests: int, answers: int) -> None:
        """requests, answers: the descriptors of our ends of the pipes."""
        self._requests = requests
        self._answers = answers
        self._number = 0
        self._buffer = b""
        self._session = ""
        self.events: list[Mapping[str, Any]] = []

    def attach(self) -> None:
        """Open a tab, and have the browser report what happens in it."""
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        """Return the result of a method. Raises BedError if the browser refuses it or is silent."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._requests, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            answer = self._next(deadline, method)
            if "id" not in answer:
                self.events.append(answer)
            elif answer["id"] == number:
                if "error" in answer:
                    raise BedError(f"the browser refuses {method}: {answer['error']}")
                result: Mapping[str, Any] = answer["result"]
                return result

    def show(self, address: str) -> None:
        """Load a page, and wait until it is shown. Events of the former page are forgotten."""
        self.events.clear()
        failed = self.call("Page.navigate", url=address).get("errorText")
        if failed:
            raise BedError(f"the browser does not show {address}: {failed}")
        deadline = time.monotonic() + _PATIENCE_S
        while not self.reported("Page.loadEventFired"):
            self.events.append(self._next(deadline, "the page's load event"))

    def reported(self, method: str) -> list[Mapping[str, Any]]:
        """Return the parameters of the events with this name."""
        return [event["params"] for event in self.events if event["method"] == method]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BedError(f"{expression} fails: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def _next(self, deadline: float, awaited: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._answers], [], [], left)
            octets = os.read(self._answers, 1 << 16) if readable else b""
            if not octets:
                raise BedError(f"the browser is silent or has ended: waited for {awaited}")
            self._buffer += octets
        message, _, self._buffer = self._buffer.partition(b"\0")
        made: dict[str, Any] = json.loads(message)
        return made


@contextmanager
def browser() -> Iterator[Page]:
    """A browser with one tab; it is gone at the end of the block. Raises BedError."""
    found = program()
    if found is None:
        raise BedError("needs a browser: apt-get install chromium-headless-shell")
    to_read, requests = os.pipe()
    answers, to_write = os.pipe()
    # Above 9, so that neither is where the other one has to be.
    theirs = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (to_read, to_write)]
    places = f"{_READS}<&{theirs[0]} {_WRITES}>&{theirs[1]}"
    with tempfile.TemporaryDirectory(prefix="koord-browser-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "log"
        options = (*_OPTIONS, f"--user-data-dir={folder}/profile")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*DIES_WITH_US, "bash", "-c", f'exec "$@" {places}', "bash", found, *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=theirs,
                env={**os.environ, "HOME": folder},
            )
        for each in (to_read, to_write, *theirs):
            os.close(each)
        try:
            page = Page(requests, answers)
            try:
                page.attach()
            except (BedError, OSError) as error:
                said = log.read_text(errors="replace")[-1000:]
                raise BedError(f"{error}; it said: {said or 'nothing'}") from None
            yield page
        finally:
            process.kill()
            process.wait(_PATIENCE_S)
            os.close(requests)
            os.close(answers)
