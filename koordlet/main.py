"""The command line: `koordlet run | check-config | restore | version`.

`koordlet -flag=value ...`, as upstream's DaemonSet and units call it, behaves as `run` with the
paths of upstream's DaemonSet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from apis.errors import InputError, InputErrors
from koordlet import VERSION
from koordlet.configuration.config import Config, Mode
from koordlet.configuration.config_file import DEFAULT_PATH, describe, load, mode_of
from koordlet.configuration.flags import Parsed, help_text, parse_flags
from service.console import guarded

_HELP: Final = f"""\
koordlet: sets the values that Koordinator decides for the pods and containers of this node.

usage:
  koordlet run [--config FILE] [flags]           run the daemon (default file {DEFAULT_PATH})
  koordlet check-config [--config FILE] [flags]  report errors of the configuration, or print it as
                                                 it would be in force
  koordlet restore [--config FILE] [flags]       restore every value that the daemon changed; for
                                                 uninstalling, while the daemon is stopped
  koordlet version
  koordlet -flag=value ...                       as upstream's DaemonSet calls it: as run,
                                                 with its paths unless agent_mode=hostMode

environment:
  NODE_NAME    this node's name, if the file does not set it
  agent_mode   hostMode or dsMode: selects the default paths

flags, each with one or two dashes, override the file:
{{flags}}
Other flags of upstream's koordlet are accepted; those without effect here are named in the log.
The configuration file: docs/configuration.md. To query a running daemon: koordctl --help.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return guarded("koordlet", lambda: _command(words))


def _command(words: list[str]) -> int:
    if any(each in ("-h", "-help", "--help", "help") for each in words):
        print(_HELP.format(flags=help_text()))
        return 0
    if words in (["-version"], ["--version"]):
        words = ["version"]
    command = words.pop(0) if words and not words[0].startswith("-") else ""
    default_mode = Mode.HOST
    if not command:
        if not words and not ({"NRI_PLUGIN_SOCKET", "NODE_NAME"} & set(os.environ)):
            print(_HELP.format(flags=help_text()))
            return 2
        command = "run"
        default_mode = Mode.HOST if "NRI_PLUGIN_SOCKET" in os.environ else Mode.DAEMON_SET
    known = {"run": _run, "check-config": _check_config, "restore": _restore, "version": _version}
    if command not in known:
        print(
            f"koordlet: unknown command {command!r}; known are {', '.join(known)}", file=sys.stderr
        )
        return 2
    try:
        flags = parse_flags(words)
        if flags.positional:
            raise InputError(
                obj="command line",
                field="argument",
                value=flags.positional[0],
                problem=f"koordlet {command} takes flags only",
            )
        return known[command](flags, mode_of(os.environ, default=default_mode))
    except (InputError, InputErrors) as error:
        _print_errors(error)
        return 2


def _load(flags: Parsed, mode: Mode, environment: Mapping[str, str] = os.environ) -> Config:
    return load(
        path=flags.config,
        flags=flags,
        environment=environment,
        mode=mode,
    )


def _run(flags: Parsed, mode: Mode) -> int:
    from service import logs, memory

    memory.keep_little()
    config = _load(flags, mode)
    logs.set_up(level=config.log.level, form=config.log.format)
    from koordlet.process import run_daemon

    return run_daemon(config, flags=flags, reload=lambda: _load(flags, mode))


def _check_config(flags: Parsed, mode: Mode) -> int:
    config = _load(flags, mode)
    for name in flags.without_effect:
        print(f"# flag -{name} has no effect")
    print("\n".join(describe(config)))
    return 0


def _restore(flags: Parsed, mode: Mode) -> int:
    from koordlet.daemon.restore import restore

    return restore(_load(flags, mode))


def _version(flags: Parsed, mode: Mode) -> int:
    print(f"koordlet {VERSION}, Python {sys.version.split()[0]}")
    return 0


def _print_errors(error: InputError | InputErrors) -> None:
    errors = error.errors if isinstance(error, InputErrors) else (error,)
    for each in errors:
        print(f"koordlet: {each}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
