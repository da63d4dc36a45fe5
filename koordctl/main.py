"""The operator's command line: queries the daemon of this node, or examines this machine.

Tables for people; `-o json` for programs, with the fields that docs/operations.md lists. Exit
status: 0; 1 for an answer with bad news (not ready, a failed check); 2 for wrong arguments or no
answer.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from typing import Any

from apis.errors import InputError, InputErrors
from koordctl import render
from koordctl.client import Client, Refused, Unreachable
from koordctl.errors import CommandError
from koordctl.help_texts import EPILOG, epilog
from koordctl.report import page
from koordctl.status import status_text
from koordctl.top import INTERVAL_S, SORTS, follow, screen
from koordctl.why import DEFAULT_SCHEDULER, why
from koordctl.why import text as why_text
from koordlet import VERSION
from service.console import guarded
from service.files import replacing

DEFAULT_RUN_DIR = "/run/koordlet"
_MOST_MANIFEST_BYTES = 24 << 20
"""Manifests of one plan. The daemon accepts bodies of 32 MiB, and JSON escapes add to the text."""

Command = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]
"""Adds a command: its name, its function, what it shows. Returns its parser."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    return guarded("koordctl", lambda: _command(arguments))


def _command(arguments: Sequence[str] | None) -> int:
    options = command_line().parse_args(arguments)
    try:
        return int(options.command(options))
    except (Unreachable, Refused, CommandError, InputError) as error:
        print(f"koordctl: {error}", file=sys.stderr)
    except InputErrors as errors:
        for each in errors.errors:
            print(f"koordctl: {each}", file=sys.stderr)
    return 2


def command_line() -> argparse.ArgumentParser:
    """Return the parser of all commands and options."""
    parser = argparse.ArgumentParser(
        prog="koordctl",
        description="Shows what the koordlet of this node does, and why.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"koordctl {VERSION}")
    _add_common_options(
        parser,
        run_dir=os.environ.get("KOORDLET_RUN_DIR", "") or None,
        output="table",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(
        name: str, function: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=epilog(name),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # Given after the command, these options override the same ones before it.
        _add_common_options(made, run_dir=argparse.SUPPRESS, output=argparse.SUPPRESS)
        made.set_defaults(command=function)
        return made

    _add_queries(command)
    _add_views(command)
    _add_scheduling(command)
    doctor = command("doctor", _doctor, "examine kernel, cgroups, runtime and kubelet; print fixes")
    doctor.add_argument(
        "--config",
        metavar="FILE",
        help="koordlet's configuration (default: what the running daemon uses)",
    )
    restore = command(
        "restore", _restore, "restore every value that koordlet changed; stop the daemon first"
    )
    restore.add_argument("--config", metavar="FILE", help="koordlet's configuration")
    return parser


def _add_queries(command: Command) -> None:
    """Add the commands that say why values are as they are, and how they would be."""
    explain = command(
        "explain", _explain, "why a pod, a container or a kernel file has the values that it has"
    )
    explain.add_argument(
        "kind",
        choices=("pod", "container", "file", "subject", "node"),
        help="what is named; for a node: how its batch and mid resources were computed",
    )
    explain.add_argument(
        "name",
        help="pod: namespace/name or uid; container: namespace/pod/container or the id;"
        " file: its path; subject: as status and explain show it, e.g. kubeqos/BestEffort;"
        " node: its name, looked up on the API server",
    )
    explain.add_argument(
        "resource", nargs="?", help="for a node only: batch-cpu, batch-memory, mid-cpu, mid-memory"
    )
    explain.add_argument("--kubeconfig", metavar="FILE", help="for a node only")
    plan = command("plan", _plan, "what would be written under other objects; writes nothing")
    plan.add_argument("--objects", required=True, metavar="DIR", help="directory of manifests")
    plan.add_argument(
        "--offline",
        action="store_true",
        help="plan from this machine, without the daemon; pods come from the CRI and from Pod"
        " manifests in DIR, and without any of these the exit status is 2",
    )
    plan.add_argument("--config", metavar="FILE", help="koordlet's configuration, with --offline")


def _add_views(command: Command) -> None:
    """Add the commands that show the daemon's state and what it did."""
    command("status", _status, "connection, policies, values, and unprotected containers")
    top = command("top", _top, "usage of node, classes and pods, and what the strategies do, live")
    top.add_argument(
        "--sort", choices=tuple(SORTS), default="cpu", help="order of the pods (default: cpu)"
    )
    top.add_argument(
        "--interval",
        type=_seconds,
        default=INTERVAL_S,
        metavar="SECONDS",
        help=f"between two looks (default: {INTERVAL_S:g})",
    )
    top.add_argument("--once", action="store_true", help="print one look and end")
    report = command("report", _report, "the last hour as one HTML file, on standard output")
    report.add_argument("--file", metavar="FILE", help="write it into FILE instead")
    again = command("replay", _replay, "the strategies' decisions again, from a recording")
    again.add_argument("recording", help="a file, or the directory of koordlet's recording")
    again.add_argument(
        "--nodeslo", metavar="FILE", help="compare with the decisions under this NodeSLO"
    )
    command("events", _events, "recent events that need an operator's attention")


def _add_scheduling(command: Command) -> None:
    """Add the commands about what koord-scheduler decided, and would decide."""
    asks = command("why", _why, "why a pod has its node, or none: scores, reasons, what would help")
    asks.add_argument("pod", help="namespace/name, or a name in the namespace default")
    asks.add_argument(
        "--scheduler",
        metavar="URL",
        help=f"the leading scheduler (default: {DEFAULT_SCHEDULER}, where kubectl -n"
        " koordinator-system port-forward POD 10251 brings it; else the pod's condition is shown)",
    )
    asks.add_argument("--kubeconfig", metavar="FILE", help="where the pod's condition is read")
    simulate = command(
        "simulate", _simulate, "where koord-scheduler would place pods, and why; writes nothing"
    )
    simulate.add_argument(
        "--cluster",
        required=True,
        metavar="DIR|FILE|KUBECONFIG",
        help="a folder or a file with objects as `kubectl get -o json` (fast) or yaml writes them,"
        " the path of a kubeconfig, or the word kubeconfig for the usual one",
    )
    simulate.add_argument(
        "--pods", metavar="FILE", help="pods and workloads to place; without it, all pods again"
    )
    simulate.add_argument(
        "--config",
        metavar="FILE",
        help="koord-scheduler's configuration, or the ConfigMap that holds it (default:"
        " kube-scheduler's plugins alone)",
    )
    simulate.add_argument(
        "--feature-gates",
        default="",
        metavar="NAME=BOOL,...",
        help="the scheduler's, as on its command line",
    )
    simulate.add_argument(
        "--against", metavar="FILE", help="without --pods: compare with this configuration"
    )
    simulate.add_argument(
        "--capacity", action="store_true", help="count how many more of each of the pods fit"
    )
    simulate.add_argument(
        "--limit",
        type=_positive,
        default=10_000,
        metavar="N",
        help="with --capacity: stop counting there (default: 10000)",
    )
    simulate.add_argument(
        "--scores", action="store_true", help="show the best nodes of each pod with their scores"
    )
    simulate.add_argument(
        "--as",
        dest="scheduler_name",
        default="",
        metavar="NAME",
        help="schedule all pods by this profile, whatever scheduler they name",
    )
    simulate.add_argument(
        "--seed", type=int, default=0, metavar="N", help="draws between equal nodes (default: 0)"
    )
    simulate.add_argument("--context", metavar="NAME", help="of the kubeconfig")


def _add_common_options(
    parser: argparse.ArgumentParser, *, run_dir: str | None, output: str
) -> None:
    """Add the options that every command accepts, before its name and after it."""
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        type=os.path.abspath,
        default=run_dir,
        help=f"the daemon's runDir (default: $KOORDLET_RUN_DIR or {DEFAULT_RUN_DIR}; without a"
        " daemon, runDir of its configuration)",
    )
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json"),
        default=output,
        help="for people or for programs (default: table)",
    )


def _show(options: argparse.Namespace, answer: Any, text: Callable[[Any], str]) -> None:
    if options.output == "json":
        json.dump(answer, sys.stdout, indent=2)
        print()
        return
    try:
        shown = text(answer)
    except (LookupError, TypeError, AttributeError) as error:
        raise CommandError(
            f"koordctl {VERSION} does not understand the daemon's answer"
            f" ({type(error).__name__}: {error}); use the koordctl of the daemon's version,"
            " or -o json"
        ) from None
    print(shown)


def _client(options: argparse.Namespace) -> Client:
    return Client(options.run_dir or DEFAULT_RUN_DIR)


def _explain(options: argparse.Namespace) -> int:
    if options.kind == "node":
        return _explain_node(options)
    query = {"kind": options.kind, "name": options.name}
    if options.kind == "file":
        query["name"] = os.path.abspath(options.name)
    _show(options, _client(options).get("/explain", query), render.explanation)
    return 0


def _explain_node(options: argparse.Namespace) -> int:
    # The API server's client takes long to import, and no other command needs it.
    from koordctl.node import explain_node, fetch_node
    from kube.client import ApiError
    from kube.client import Unreachable as ServerUnreachable
    from kube.connection import ConnectionConfigError

    try:
        node = fetch_node(options.name, kubeconfig=options.kubeconfig)
        answer, text = explain_node(node, options.resource)
    except (ApiError, ServerUnreachable, ConnectionConfigError, InputError) as error:
        raise CommandError(str(error)) from None
    _show(options, answer, lambda _: text)
    return 0


def _status(options: argparse.Namespace) -> int:
    answer = _client(options).get("/status")
    _show(options, answer, status_text)
    if options.output == "json":
        return 0
    return 0 if answer["ready"] and not answer["unhealthy"] else 1


def _events(options: argparse.Namespace) -> int:
    _show(options, _client(options).get("/events"), render.events)
    return 0


def _top(options: argparse.Namespace) -> int:
    client = _client(options)
    if options.output == "json":
        _show(options, client.get("/top"), screen)
    elif options.once or not sys.stdout.isatty():
        print(screen(client.get("/top"), sort=options.sort))
    else:
        follow(lambda: client.get("/top"), sort=options.sort, interval_s=options.interval)
    return 0


def _report(options: argparse.Namespace) -> int:
    client = _client(options)
    history, overview = client.get("/history"), client.get("/top")
    if options.output == "json":
        _show(options, {"history": history, "now": overview}, str)
        return 0
    if not overview["measured"]:
        raise CommandError(screen(overview))
    text = page(history, overview)
    if not options.file:
        print(text, end="")
        return 0
    try:
        with replacing(options.file, mode=0o600) as file:
            file.write(text.encode())
    except OSError as error:
        raise CommandError(f"cannot write {options.file}: {error.strerror or error}") from None
    print(f"wrote {options.file}")
    return 0


def _replay(options: argparse.Namespace) -> int:
    # NumPy, which no other command needs.
    from koordctl import replay

    slo = replay.nodeslo_of(options.nodeslo) if options.nodeslo else None
    _show(options, replay.run(options.recording, slo), replay.text)
    return 0


def _why(options: argparse.Namespace) -> int:
    answer = why(options.pod, scheduler=options.scheduler, kubeconfig=options.kubeconfig)
    _show(options, answer, why_text)
    return 0


def _simulate(options: argparse.Namespace) -> int:
    # The scheduler and NumPy, which other commands do not need.
    from koordctl import simulate

    answer = simulate.answer(options)
    _show(options, answer, simulate.text)
    return 1 if any(pod["state"] != "placed" for pod in answer.get("pods", ())) else 0


def _positive(text: str) -> int:
    """Read a positive whole number; raises ValueError, which argparse reports."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    """Read a positive number of seconds; raises ValueError, which argparse reports."""
    seconds = float(text)
    if not 0.1 <= seconds <= 3600:
        raise ValueError
    return seconds


def _plan(options: argparse.Namespace) -> int:
    files = read_manifests(options.objects)
    if options.offline:
        from koordctl.offline import plan

        answer = plan(files, config_path=options.config, run_dir=options.run_dir)
    else:
        try:
            answer = _client(options).post("/plan", {"files": files})
        except Unreachable as error:
            raise CommandError(f"{error}; or plan without the daemon: --offline") from None
    _show(options, answer, render.plan)
    if options.offline and answer["pods"] is None:
        raise CommandError(
            f"no pod of this node is known: the CRI gave no list, and {options.objects} holds no"
            " Pod; name the runtime's socket (cri.socket, with --config), add Pod manifests, or"
            " ask the daemon (without --offline)"
        )
    return 1 if any(problem["file"] for problem in answer["problems"]) else 0


def _doctor(options: argparse.Namespace) -> int:
    from koordctl.doctor import examine

    findings = examine(config_path=options.config, run_dir=options.run_dir, client=_client(options))
    _show(options, findings, render.doctor)
    return 1 if any(finding["state"] == "fail" for finding in findings) else 0


def _restore(options: argparse.Namespace) -> int:
    from koordctl.offline import load_config
    from koordlet.daemon.restore import restore

    return restore(load_config(options.config, run_dir=options.run_dir))


def read_manifests(directory: str) -> dict[str, str]:
    """Return name -> content of the manifests in a directory, or of one file."""
    try:
        if os.path.isfile(directory):
            names, directory = [os.path.basename(directory)], os.path.dirname(directory) or "."
        else:
            names = sorted(
                name
                for name in os.listdir(directory)
                if name.endswith((".yaml", ".yml", ".json")) and not name.startswith(".")
            )
        files: dict[str, str] = {}
        left = _MOST_MANIFEST_BYTES
        for name in names:
            data = _read_regular(f"{directory}/{name}", left)
            left -= len(data)
            files[name] = data.decode()
    except UnicodeDecodeError as error:
        raise CommandError(f"cannot read {directory}/{name}: not UTF-8: {error}") from None
    except OSError as error:
        raise CommandError(f"cannot read the objects: {error}") from None
    if not files:
        raise CommandError(f"no manifests (*.yaml, *.yml, *.json) in {directory}")
    return files


def _read_regular(path: str, most_bytes: int) -> bytes:
    """Return the bytes of a regular file: a FIFO would block, a device might never end."""
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CommandError(f"{path} is not a regular file; remove it from the directory")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise CommandError(
            f"{path}: the manifests of one plan are limited to {_MOST_MANIFEST_BYTES >> 20} MiB"
        )
    return data


if __name__ == "__main__":
    sys.exit(main())
