"""A container image made on the spot: one layer with a static busybox, under two names.

No registry is asked. The archive has the layout that `docker save` writes and `ctr images import`
reads: a manifest that names the configuration and the layers, each by its SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

from tests.beds.packages import unpacked

IMAGE = "koord.test/busybox:1"
SANDBOX_IMAGE = "koord.test/pause:1"

_APPLETS = (
    "awk", "cat", "cut", "dd", "echo", "env", "false", "grep", "head", "kill", "ls", "ps", "sh",
    "sleep", "tail", "taskset", "test", "top", "tr", "true", "wc", "yes",
)  # fmt: skip
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def write_image(archive: Path) -> None:
    """Write the image to `archive` (a tar file of about 2 MB)."""
    busybox = unpacked("busybox-static", ("bookworm",)) / "bin" / "busybox"
    layer = _layer(busybox.read_bytes())
    layer_digest = hashlib.sha256(layer).hexdigest()
    machine = platform.machine()
    configuration = json.dumps(
        {
            "architecture": _ARCHITECTURES.get(machine, machine),
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sleep", "2147483647"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
            "history": [{"created_by": "busybox"}],
        }
    ).encode()
    configuration_name = f"{hashlib.sha256(configuration).hexdigest()}.json"
    layer_name = f"{layer_digest}/layer.tar"
    manifest = json.dumps(
        [
            {
                "Config": configuration_name,
                "RepoTags": [IMAGE, SANDBOX_IMAGE],
                "Layers": [layer_name],
            }
        ]
    ).encode()
    with tarfile.open(archive, "w") as tar:
        for name, content in (
            (layer_name, layer),
            (configuration_name, configuration),
            ("manifest.json", manifest),
        ):
            tar.addfile(_entry(name, len(content)), io.BytesIO(content))


def _layer(busybox: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for folder in ("bin", "dev", "etc", "proc", "sys", "tmp"):
            entry = _entry(folder, 0)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        tar.addfile(_entry("bin/busybox", len(busybox), mode=0o755), io.BytesIO(busybox))
        for applet in _APPLETS:
            entry = _entry(f"bin/{applet}", 0, mode=0o777)
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    return buffer.getvalue()


def _entry(name: str, size: int, *, mode: int = 0o644) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, mode
    return entry
