"""resctrl: groups of tasks with their share of caches and memory bandwidth.

A group costs a CLOSID, and there are only so many (ENOSPC). A write to `schemata` is taken as a
whole or not at all (EINVAL), and `info/last_cmd_status` says why. Masks have at least
`min_cbm_bits` bits, in one run unless the machine takes sparse ones; bandwidth is rounded up to the
machine's steps. Removing a group returns its tasks to the default group.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from tests.simulated.profiles import Rdt
from tests.simulated.values import list_text, refuse
from tests.simulated.vfs import Parts

if TYPE_CHECKING:
    from tests.simulated.kernel import SimulatedKernel

MAGIC = 0x7655821
AMD_UNLIMITED = 2048
U32_UNLIMITED = (1 << 32) - 1
MODES = ("shareable", "exclusive")
_inodes = count(1_000_000)


@dataclass
class Group:
    """A control group: masks and bandwidth by resource and domain id."""

    schemata: dict[str, dict[int, int]]
    inode: int = field(default_factory=lambda: next(_inodes))
    mode: str = "shareable"
    monitors: dict[str, MonitorGroup] = field(default_factory=dict)


@dataclass
class MonitorGroup:
    """A monitoring group inside a control group (`mon_groups/<name>`)."""

    inode: int = field(default_factory=lambda: next(_inodes))


@dataclass
class Counters:
    """What `mon_data` shows for one domain; text lets a test show "Unavailable" and "Error"."""

    llc_occupancy: int | str = 0
    mbm_total_bytes: int | str = 0
    mbm_local_bytes: int | str = 0


class Resctrl:
    """The mounted file system."""

    magic = MAGIC

    def __init__(self, kernel: SimulatedKernel, rdt: Rdt) -> None:
        self.kernel = kernel
        self.rdt = rdt
        self.mba_mbps = rdt.mba_mbps
        self.last_status = "ok"
        self.domains = sorted({kernel.profile.topology.l3_of(cpu) for cpu in kernel.online_cpus})
        self.groups: dict[str, Group] = {"": Group(self._everything())}
        self.counters: dict[tuple[str, int], Counters] = {}

    # Resources

    @property
    def full_mask(self) -> int:
        return (1 << self.rdt.l3_ways) - 1

    @property
    def full_bandwidth(self) -> int:
        if self.mba_mbps:
            return U32_UNLIMITED
        return 100 if self.rdt.mb == "percent" else AMD_UNLIMITED

    def _everything(self) -> dict[str, dict[int, int]]:
        made: dict[str, dict[int, int]] = {}
        if self.rdt.mb:
            made["MB"] = dict.fromkeys(self.domains, self.full_bandwidth)
        if self.rdt.smba:
            made["SMBA"] = dict.fromkeys(self.domains, AMD_UNLIMITED)
        if self.rdt.l3_ways:
            made["L3"] = dict.fromkeys(self.domains, self.full_mask)
        return made

    @property
    def closids(self) -> int:
        """A group needs the same number in every resource: the smallest counts."""
        counts = [self.rdt.l3_closids] if self.rdt.l3_ways else []
        counts += [self.rdt.mb_closids] if self.rdt.mb else []
        return min(counts)

    # Schemata

    def _schemata_text(self, group: Group) -> str:
        lines: list[str] = []
        width = max(len(name) for name in group.schemata)
        for name, values in group.schemata.items():
            form = "x" if name == "L3" else "d"
            domains = ";".join(f"{domain}={value:{form}}" for domain, value in values.items())
            lines.append(f"{name:>{max(width, 6)}}:{domains}\n")
        return "".join(lines)

    def _fail(self, why: str, code: int = errno.EINVAL) -> None:
        self.last_status = why
        refuse(code, why)

    def _mask(self, domain: int, word: str) -> int:
        if not re.fullmatch("(0x)?[0-9a-fA-F]+", word):
            self._fail(f"Non-hex character in the mask {word}")
        mask = int(word, 16)
        if mask == 0 or mask > self.full_mask:
            self._fail("Mask out of range")
        low = (mask & -mask).bit_length() - 1
        if not self.rdt.l3_sparse and (mask >> low) & ((mask >> low) + 1):
            self._fail(f"The mask {mask:x} has non-consecutive 1-bits")
        if mask.bit_count() < self.rdt.l3_min_bits:
            self._fail(f"Need at least {self.rdt.l3_min_bits} bits in the mask")
        return mask

    def _bandwidth(self, name: str, word: str) -> int:
        if not re.fullmatch("[0-9]+", word):
            self._fail(f"Non-decimal digit in MB value {word}")
        number = int(word)
        if self.mba_mbps and name == "MB":
            return min(number, U32_UNLIMITED)
        high = 100 if name == "MB" and self.rdt.mb == "percent" else AMD_UNLIMITED
        if not self.rdt.mb_min <= number <= high:
            self._fail(f"MB value {number} out of range [{self.rdt.mb_min},{high}]")
        step = self.rdt.mb_step
        return -(-number // step) * step

    def _write_schemata(self, group: Group, text: str) -> None:
        self.last_status = "ok"
        if not text.endswith("\n"):
            refuse(errno.EINVAL, "a write to schemata ends with a newline")
        if group.mode == "pseudo-locked":
            self._fail("Resource group is pseudo-locked")
        staged: dict[str, dict[int, int]] = {}
        for line in text[:-1].split("\n"):
            name, colon, rest = line.strip().partition(":")
            if not colon:
                self._fail("Missing ':'")
            if not rest.strip():
                self._fail(f"Missing '{name}' value")
            if name not in group.schemata:
                self._fail(f"Unknown or unsupported resource name '{name}'")
            for part in rest.strip().split(";"):
                if not part.strip():
                    continue
                domain_word, equals, value = part.strip().partition("=")
                if not equals or not domain_word.isdigit():
                    self._fail("Missing '=' or non-numeric domain")
                domain = int(domain_word)
                if domain not in group.schemata[name]:
                    self._fail(f"Unknown domain {domain}")
                if domain in staged.get(name, {}):
                    self._fail(f"Duplicate domain {domain}")
                number = self._mask(domain, value) if name == "L3" else self._bandwidth(name, value)
                staged.setdefault(name, {})[domain] = number
        for name, values in staged.items():
            group.schemata[name].update(values)

    # Tasks

    def tasks_of(self, path: str) -> list[int]:
        """The tids of a control group."""
        return sorted(task.pid for task in self.kernel.tasks.values() if task.closid == path)

    def _write_tasks(self, path: str, text: str) -> None:
        self.last_status = "ok"
        words = text.strip().split(",") if self.kernel.profile.kernel >= (6, 7) else [text.strip()]
        for word in words:
            if not re.fullmatch("[0-9]+", word.strip()):
                self._fail(f"Task list parsing error pid {word}")
            task = self.kernel.tasks.get(int(word))
            if task is None:
                self._fail(f"No task {word}", errno.ESRCH)
                return
            task.closid = path

    # The file system

    def _info(self) -> dict[str, str]:
        rdt = self.rdt
        files = {"last_cmd_status": self.last_status + "\n"}
        if rdt.l3_ways:
            files |= {
                "L3/cbm_mask": f"{self.full_mask:x}\n",
                "L3/min_cbm_bits": f"{rdt.l3_min_bits}\n",
                "L3/num_closids": f"{rdt.l3_closids}\n",
                "L3/shareable_bits": f"{rdt.l3_shareable:x}\n",
                "L3/bit_usage": ";".join(f"{domain}={'S' * rdt.l3_ways}" for domain in self.domains)
                + "\n",
            }
            if self.kernel.profile.kernel >= (6, 7):
                files["L3/sparse_masks"] = f"{int(rdt.l3_sparse)}\n"
        for name in [*(["MB"] if rdt.mb else []), *(["SMBA"] if rdt.smba else [])]:
            files |= {
                f"{name}/min_bandwidth": f"{rdt.mb_min}\n",
                f"{name}/bandwidth_gran": f"{rdt.mb_step}\n",
                f"{name}/delay_linear": f"{int(rdt.mb == 'percent')}\n",
                f"{name}/num_closids": f"{rdt.mb_closids}\n",
            }
        if rdt.monitoring:
            files |= {
                "L3_MON/num_rmids": "256\n",
                "L3_MON/mon_features": "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n",
                "L3_MON/max_threshold_occupancy": "65536\n",
            }
        return files

    def _mon_data(self, path: str) -> dict[str, str]:
        files: dict[str, str] = {}
        for domain in self.domains:
            counters = self.counters.get((path, domain), Counters())
            for name in ("llc_occupancy", "mbm_total_bytes", "mbm_local_bytes"):
                files[f"mon_L3_{domain:02d}/{name}"] = f"{getattr(counters, name)}\n"
        return files

    def _group_files(self, path: str, group: Group) -> dict[str, str]:
        cpus = list_text(self.kernel.online_cpus) if not path else ""
        files = {
            "schemata": self._schemata_text(group),
            "tasks": "".join(f"{tid}\n" for tid in self.tasks_of(path)),
            "mode": group.mode + "\n",
            "cpus": "0\n",
            "cpus_list": cpus + "\n",
            "size": "",
        }
        if self.rdt.monitoring:
            files |= {f"mon_data/{name}": text for name, text in self._mon_data(path).items()}
            for name in group.monitors:
                files[f"mon_groups/{name}/tasks"] = ""
                files |= {
                    f"mon_groups/{name}/mon_data/{file}": text
                    for file, text in self._mon_data(f"{path}/{name}").items()
                }
        if not path:
            files |= {f"info/{name}": text for name, text in self._info().items()}
        return files

    def _split(self, parts: Parts) -> tuple[str, Group, str]:
        """(group path, group, rest of the path inside it)."""
        if parts and parts[0] in self.groups:
            return parts[0], self.groups[parts[0]], "/".join(parts[1:])
        return "", self.groups[""], "/".join(parts)

    def _entries(self, parts: Parts) -> list[str] | str:
        """Names in a directory, or the text of a file; ENOENT."""
        path, group, inner = self._split(parts)
        files = self._group_files(path, group)
        if inner in files:
            return files[inner]
        prefix = f"{inner}/" if inner else ""
        names = {name[len(prefix) :].split("/")[0] for name in files if name.startswith(prefix)}
        if inner == "mon_groups" and self.rdt.monitoring:
            return sorted(names)
        if not inner:
            names |= {"mon_groups"} if self.rdt.monitoring else set()
            names |= {name for name in self.groups if name} if not path else set()
        if not names:
            refuse(errno.ENOENT)
        return sorted(names)

    def read(self, parts: Parts) -> bytes:
        found = self._entries(parts)
        if isinstance(found, list):
            refuse(errno.EISDIR)
        return found.encode()

    def write(self, parts: Parts, data: bytes) -> None:
        found = self._entries(parts)
        if isinstance(found, list):
            refuse(errno.EISDIR)
        path, group, inner = self._split(parts)
        text = data.decode("ascii", "replace")
        if inner == "schemata":
            self._write_schemata(group, text)
        elif inner == "tasks":
            self._write_tasks(path, text)
        elif inner == "mode":
            if text.strip() not in MODES:
                self._fail("Unknown or unsupported mode")
            group.mode = text.strip()
        else:
            refuse(errno.EACCES, "read-only")

    def listdir(self, parts: Parts) -> list[str]:
        found = self._entries(parts)
        if isinstance(found, str):
            refuse(errno.ENOTDIR)
        return found

    def is_dir(self, parts: Parts) -> bool:
        try:
            return isinstance(self._entries(parts), list)
        except OSError:
            return False

    def mkdir(self, parts: Parts, mode: int) -> None:
        self.last_status = "ok"
        if self.is_dir(parts):
            refuse(errno.EEXIST)
        path, group, inner = self._split(parts)
        if inner.startswith("mon_groups/") and inner.count("/") == 1:
            group.monitors[inner.split("/")[1]] = MonitorGroup()
            return
        if path or len(parts) != 1:
            refuse(errno.EPERM, "groups are made at the top only")
        if parts[0] in ("info", "mon_data", "mon_groups") or "\n" in parts[0]:
            refuse(errno.EINVAL)
        if len(self.groups) >= self.closids:
            self._fail("Out of CLOSIDs", errno.ENOSPC)
        self.groups[parts[0]] = Group(self._everything())

    def rmdir(self, parts: Parts) -> None:
        path, group, inner = self._split(parts)
        if inner.startswith("mon_groups/") and inner.split("/")[1] in group.monitors:
            del group.monitors[inner.split("/")[1]]
            return
        if not path or inner:
            self._entries(parts)
            refuse(errno.EPERM)
        for tid in self.tasks_of(path):
            self.kernel.tasks[tid].closid = ""
        del self.groups[path]

    def inode(self, parts: Parts) -> int:
        self._entries(parts)
        _, group, inner = self._split(parts)
        return group.inode if not inner else group.inode * 4096 + hash(inner) % 4096

    def readlink(self, parts: Parts) -> str:
        self._entries(parts)
        refuse(errno.EINVAL, "not a link")
