"""`koordctl plan --offline`: koordlet's own planning, run against this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from apis.errors import InputError, InputErrors
from koordctl.errors import CommandError
from koordlet.configuration.config import Config, Mode
from koordlet.configuration.config_file import build, load, mode_of
from koordlet.configuration.flags import parse_flags
from koordlet.node.machine import layout_of, local_host
from koordlet.planning.plan import plan_offline
from koordlet.sources.objects import Directory
from linux.discovery import DiscoveryError
from linux.procfs import boot_id


def load_config(path: str | None, *, run_dir: str | None) -> Config:
    """Return koordlet's configuration; raises InputError(s). run_dir: overrides the file's."""
    flags = parse_flags([] if run_dir is None else [f"-run-dir={run_dir}"])
    mode = mode_of(os.environ, default=Mode.HOST)
    return load(path=path, flags=flags, environment=os.environ, mode=mode)


def config_in_force(tree: Mapping[str, Any]) -> Config:
    """Return the configuration of a running daemon from its `/config` answer."""
    return build(
        tree,
        obj="the running daemon",
        flags=parse_flags([]),
        environment={},
        mode=Mode.HOST,
    )


def plan(files: Mapping[str, str], *, config_path: str | None, run_dir: str | None) -> Any:
    """Return what a daemon on this machine would write under these objects."""
    try:
        config = load_config(config_path, run_dir=run_dir)
        host = local_host(config)
        layout = layout_of(config, host)
    except (InputError, InputErrors, DiscoveryError) as error:
        raise CommandError(str(error)) from None
    content = {name: text.encode() for name, text in files.items()}
    objects = Directory("", config.node_name).take(content)
    return plan_offline(config, objects, host=host, layout=layout, boot=boot_id(host))
