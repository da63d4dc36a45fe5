"""The command koord-scheduler."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

from apis.errors import InputError, InputErrors
from cluster.collection import collect_seldom
from cluster.flags import FlagError
from cluster.scheduler.configuration.configuration import SchedulerConfiguration
from cluster.scheduler.configuration.flags import Settings, help_text, parse
from cluster.scheduler.configuration.loading import load
from cluster.scheduler.process import RightsMissing, SchedulerProcess
from cluster.scheduler.serving.endpoints import Endpoints
from kube.client import ApiError, Unreachable
from kube.connection import ConnectionConfigError, load_connection
from kube.kept_client import KeptClient
from kube.leader import LeadershipLost
from service import logs, open_files

_log = logging.getLogger(__name__)

_CONNECTIONS: Final = 32
"""For 16 bindings, 4 conditions and 4 events at once, and some reads. With fewer, conditions wait
for the connections of bindings."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scheduler; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(each in ("-h", "-help", "--help") for each in given):
        print(help_text())
        return 0
    try:
        settings = parse(given)
        configuration = load(settings)
    except InputErrors as error:
        for each in error.errors:
            print(f"koord-scheduler: {each}", file=sys.stderr)
        return 2
    except (FlagError, InputError) as error:
        print(f"koord-scheduler: {error}", file=sys.stderr)
        return 2
    logs.set_up(level="debug" if settings.number("v") >= 5 else "info", form="json")
    if settings.without_effect:
        _log.info(
            "flags that have no effect: %s",
            ", ".join(f"--{name}" for name in settings.without_effect),
        )
    for notice in configuration.notices:
        _log.info("%s", notice)
    open_files.raise_limit()
    try:
        connection = load_connection(
            configuration.client_connection.kubeconfig or None,
            master=settings.text("master") or None,
        )
    except ConnectionConfigError as error:
        print(f"koord-scheduler: {error}", file=sys.stderr)
        return 2
    client = KeptClient(
        connection,
        user_agent="koord-scheduler",
        qps=max(0.0, configuration.client_connection.qps),
        burst=configuration.client_connection.burst,
        connections=_CONNECTIONS,
    )
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(client, configuration, settings))
    except LeadershipLost as error:
        _log.error("%s; exiting so that another replica can lead", error)
        return 1
    except RightsMissing as error:
        _log.error("exiting, so that another replica can lead; rights are missing: %s", error)
        return 1
    except (FlagError, InputError) as error:
        print(f"koord-scheduler: {error}", file=sys.stderr)
        return 2
    except (ApiError, Unreachable, OSError) as error:
        _log.error("exiting: %s", error)
        return 1
    return 0


async def _run(
    client: KeptClient, configuration: SchedulerConfiguration, settings: Settings
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    process = SchedulerProcess(
        client,
        configuration,
        longest_unschedulable_s=settings.seconds("pod-max-in-unschedulable-pods-duration"),
        controllers=settings.controllers,
        network_status=settings.on("enable-network-topology-manager"),
        auditor=settings.auditor,
    )
    endpoints = Endpoints(process, settings)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(client)
        await endpoints.start(stack)
        _log.info(
            "koord-scheduler started: profiles %s; pages on %s",
            ", ".join(process.plugins.profiles),
            " and ".join(endpoints.addresses) or "no port",
        )
        collecting = asyncio.create_task(collect_seldom(), name="garbage collection")
        stack.callback(collecting.cancel)
        await process.run(stop)
        _log.info("koord-scheduler stops as it was asked to")


if __name__ == "__main__":
    sys.exit(main())
