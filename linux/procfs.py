"""/proc: processes of a group, their attributes, mounts, and the few facts of the machine."""

from __future__ import annotations

from dataclasses import dataclass

from linux.host import Host


@dataclass(frozen=True, slots=True)
class MountPoint:
    """A line of /proc/<pid>/mounts."""

    path: str
    type: str
    options: frozenset[str]


def parse_mounts(content: bytes) -> list[MountPoint]:
    """Parse /proc/<pid>/mounts; escaped blanks in paths are undone."""
    found: list[MountPoint] = []
    for line in content.decode("utf-8", "replace").splitlines():
        fields = line.split(" ")
        if len(fields) >= 4:
            found.append(
                MountPoint(_unescape(fields[1]), fields[2], frozenset(fields[3].split(",")))
            )
    return found


@dataclass(frozen=True, slots=True)
class Mounted:
    """A line of /proc/<pid>/mountinfo. device: "major:minor" of the file system."""

    point: str
    device: str
    type: str
    source: str


def parse_mountinfo(content: bytes) -> list[Mounted]:
    """Parse /proc/<pid>/mountinfo, in its order; a line that is not understood is left out."""
    found: list[Mounted] = []
    for line in content.decode("utf-8", "replace").splitlines():
        before, dash, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if dash and len(fields) >= 5 and len(rest) >= 2:
            found.append(Mounted(_unescape(fields[4]), fields[2], rest[0], _unescape(rest[1])))
    return found


def _unescape(path: str) -> str:
    """Undo the kernel's octal escapes of blank, tab, newline and backslash."""
    for octal, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(octal, character)
    return path


def host_mounts(host: Host) -> list[MountPoint]:
    """Return the mounts of the node's first process, else our own."""
    for pid in ("1", "self"):
        try:
            return parse_mounts(host.read(f"/proc/{pid}/mounts"))
        except OSError:
            continue
    return []


def parse_ids(content: bytes) -> list[int]:
    """Parse `cgroup.procs`, `tasks` or `cgroup.threads`.

    0 is left out: it stands for a process of a PID namespace that we cannot see.
    """
    return [number for number in map(int, content.split()) if number]


def oom_score_adj_path(pid: int) -> str:
    return f"/proc/{pid}/oom_score_adj"


def cgroup_paths(content: bytes) -> dict[str, str]:
    """Parse /proc/<pid>/cgroup: controller -> path; "" is the v2 hierarchy."""
    paths: dict[str, str] = {}
    for line in content.decode("utf-8", "replace").splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            for controller in controllers.split(","):
                paths[controller] = path.strip("/")
    return paths


def kernel_release(host: Host) -> str:
    return host.read("/proc/sys/kernel/osrelease").decode().strip()


def boot_id(host: Host) -> str:
    """Return the id of this boot, "" if unknown. Inode numbers of cgroups start again with each."""
    try:
        return host.read("/proc/sys/kernel/random/boot_id").decode().strip()
    except OSError:
        return ""


def cpu_vendor(content: bytes) -> str:
    """Return the first processor's vendor_id in /proc/cpuinfo; "" without one (arm64)."""
    for line in content.decode("utf-8", "replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "vendor_id":
            return value.strip()
    return ""


def total_memory_bytes(host: Host) -> int:
    """Return the machine's memory as the kernel counts it (MemTotal); 0 when it is not known."""
    try:
        content = host.read("/proc/meminfo")
    except OSError:
        return 0
    for line in content.splitlines():
        fields = line.split()
        if len(fields) >= 2 and fields[0] == b"MemTotal:" and fields[1].isdigit():
            return int(fields[1]) * 1024
    return 0
