"""The command koord-manager."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

from cluster.flags import FlagError
from cluster.manager.flags import Settings, help_text, parse
from cluster.webhook.configuration import ConfigurationMissing
from kube.client import ApiError, Client, Unreachable
from kube.connection import ConnectionConfigError, load_connection
from kube.leader import LeadershipLost
from service import logs, open_files


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the manager; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if any(each in ("-h", "-help", "--help") for each in given):
        print(help_text())
        return 0
    try:
        settings = parse(given)
        # As upstream's log calls: levels from 5 on are details for debugging.
        verbose = settings.number("v") >= 5
    except FlagError as error:
        print(f"koord-manager: {error}", file=sys.stderr)
        return 2
    logs.set_up(level="debug" if verbose else "info", form="json")
    if settings.without_effect:
        logging.getLogger(__name__).info(
            "flags that have no effect: %s",
            ", ".join(f"--{name}" for name in settings.without_effect),
        )
    open_files.raise_limit()
    try:
        connection = load_connection(
            settings.text("kubeconfig") or None, master=settings.text("master") or None
        )
    except ConnectionConfigError as error:
        print(f"koord-manager: {error}", file=sys.stderr)
        return 2
    client = Client(
        connection,
        user_agent="koordinator-manager",
        qps=settings.number("rest-config-qps"),
        burst=int(settings.number("rest-config-burst")),
    )
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(client, settings))
    except LeadershipLost as error:
        logging.getLogger(__name__).error("%s; exiting so that another replica can lead", error)
        return 1
    except TimeoutError:
        logging.getLogger(__name__).error("exiting: the API server did not answer in time")
        return 1
    except (ApiError, Unreachable, ConfigurationMissing, OSError) as error:
        logging.getLogger(__name__).error("exiting: %s", error)
        return 1
    return 0


async def _run(client: Client, settings: Settings) -> None:
    # Imported late: it takes most of the start, and --help and flag errors do not need it.
    from cluster.collection import collect_seldom
    from cluster.manager.manager import Manager

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    collecting = asyncio.create_task(collect_seldom())
    try:
        async with client:
            await Manager(client, settings).run(stop)
    finally:
        collecting.cancel()


if __name__ == "__main__":
    sys.exit(main())
