"""Kernel files as a dictionary: what is opened, read and closed is counted."""

from __future__ import annotations

import errno

from koordlet.measurement.kernel_files import PAGE


class ScriptedFiles:
    """Stands for `kernel_files.KernelFiles`.

    content: path -> bytes, or the errno with which an open or a read fails.
    """

    def __init__(self, content: dict[str, bytes | int] | None = None) -> None:
        self.content: dict[str, bytes | int] = content or {}
        self.opened: list[tuple[str, int]] = []
        self.is_open: list[str] = []

    def look(self, path: str) -> bytes:
        found = self.content.get(path, errno.ENOENT)
        if isinstance(found, int):
            raise OSError(found, "scripted", path)
        return found

    def open(self, path: str, size: int = PAGE) -> ScriptedFile:
        self.look(path)
        self.opened.append((path, size))
        self.is_open.append(path)
        return ScriptedFile(self, path)

    def listdir(self, path: str) -> list[str]:
        below = [one[len(path) + 1 :] for one in self.content if one.startswith(f"{path}/")]
        if not below:
            raise OSError(errno.ENOENT, "scripted", path)
        return sorted({one.partition("/")[0] for one in below})


class ScriptedFile:
    def __init__(self, files: ScriptedFiles, path: str) -> None:
        self._files = files
        self._path = path
        self._open = True

    def read(self) -> bytes:
        assert self._open
        return self._files.look(self._path)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._files.is_open.remove(self._path)
