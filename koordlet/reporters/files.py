"""Reports as files, for a node without an API server and for programs beside koordlet.

A file is named after the kind, holds one manifest as JSON, and is replaced as a whole.
"""

from __future__ import annotations

import os
from typing import Any, Final

from koordlet.reporters.stored import Plain
from kube.client import encode_object
from kube.resources import Resource
from service.files import replacing

_MODE: Final = 0o644
"""Reports hold no secrets: any program of the node may read them if it may enter the directory."""


def write_manifest(directory: str, resource: Resource, plain: Plain | dict[str, Any]) -> None:
    """Replace the file of a kind, such as nodemetric.json. Raises OSError."""
    os.makedirs(directory, mode=0o755, exist_ok=True)
    with replacing(f"{directory}/{resource.kind.lower()}.json", mode=_MODE) as file:
        file.write(encode_object(resource, plain) + b"\n")
