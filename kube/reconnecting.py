"""One connection to an API server for as long as it answers, and then the next.

Certificates, credentials and addresses in a kubeconfig change while a daemon runs. A request to a
server that has moved fails like one to a server that is away, so after a long silence the
kubeconfig is read again.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final, NoReturn

from kube.client import Client
from kube.connection import Connection, wait_for_connection

_LOG = logging.getLogger("kube")

_RECONNECT_S: Final = 300.0
"""The silence. Chosen: restarts and upgrades of a server are shorter, and need no new connection.
Twice the value delays the use of a changed kubeconfig by as much; half of it reads the file more
often for nothing."""
_LOOK_EVERY_S: Final = 5.0
"""Between two looks at whether the server answers. Chosen: short beside the silence."""
_PAUSE_S: Final = 1.0
"""Before the kubeconfig is read again, at the mean. It is spread, so that the daemons of all nodes
do not come at once."""


class _Silent(Exception):
    """The server did not answer for `_RECONNECT_S`."""


async def stay_connected(
    connect: Callable[[], Connection],
    use: Callable[[Client], Awaitable[None]],
    *,
    answers: Callable[[], bool],
    user_agent: str,
    refused: Callable[[str], None] = lambda why: None,
) -> NoReturn:
    """Run `use` with a client of the server that `connect` returns, until cancelled.

    use: is cancelled after a long silence, and run again with a new client; its errors are raised
    in an ExceptionGroup. answers: whether the server answers now, as far as `use` knows.
    connect: may block; it is called again, later and later, while it raises ConnectionConfigError.
    refused: called with the text of each such error.
    """
    while True:
        connection = await wait_for_connection(connect, refused)
        async with Client(connection, user_agent=user_agent) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(_until_silent(answers))
                    await use(client)
            except* _Silent:
                _LOG.info(
                    "the API server has not answered for %g s: reading how to reach it again",
                    _RECONNECT_S,
                )
        await asyncio.sleep(_PAUSE_S * random.uniform(0.5, 1.5))


async def _until_silent(answers: Callable[[], bool]) -> NoReturn:
    """Raise _Silent at the end of a long silence."""
    answered_at = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        if answers():
            answered_at = time.monotonic()
        elif time.monotonic() - answered_at > _RECONNECT_S:
            raise _Silent
