"""What each runtime can do: one table for containerd and CRI-O, one profile per connection.

A runtime silently drops an adjustment that it does not know. So the profile lists what a reply may
hold; the reconciler repairs the rest. The profile also has the wire generation, and whether the
plugin may send an update that the runtime did not ask for.

NRI generation by module version: A up to 0.6.1, B 0.7 to 0.9, C 0.10 and 0.11, D from 0.12 on. From
0.12 on the runtime reports its NRI version; before, it follows from the runtime's own version.
Source: docs/facts/nri.md, "Versions" and "What a creation takes".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

import msgspec

from linux.resources import Resource
from nri_plugin.events import VALID_MASK, VALID_MASK_BEFORE_0_10

Version = tuple[int, int, int]
"""major, minor, patch. Pre-release and distribution suffixes are cut off."""

_VERSION = re.compile(r"v?([0-9]{1,6})\.([0-9]{1,6})(?:\.([0-9]{1,6}))?")
_PRE_RELEASE = re.compile(r"v?[0-9]+\.[0-9]+\.[0-9]+-")

UNKNOWN_VERSION: Final[Version] = (0, 0, 0)


def parse_version(text: str) -> Version | None:
    """Return the version at the start of `text`, or None when there is none.

    "v1.7.22", "1.7.22", "v1.7.22-k3s1" and "1.7.24~ds1" all name the release. A pre-release of a
    runtime ("2.4.0-rc.1") is taken for the release that it leads to: its NRI is that one's.
    """
    found = _VERSION.match(text.strip())
    if found is None:
        return None
    major, minor, patch = found.group(1), found.group(2), found.group(3)
    return int(major), int(minor), int(patch or 0)


class RuntimeKind(StrEnum):
    """The two runtimes whose tables are known. Another one gets what every runtime takes."""

    CONTAINERD = "containerd"
    CRIO = "cri-o"
    OTHER = "other"


class Generation(StrEnum):
    """Wire generations of NRI."""

    A = "A"
    B = "B"
    C = "C"
    D = "D"


_CONTAINERD_NRI: Final[Sequence[tuple[Version, Version]]] = (
    ((1, 7, 0), (0, 3, 0)),
    ((1, 7, 7), (0, 4, 0)),
    ((1, 7, 14), (0, 6, 0)),
    ((1, 7, 16), (0, 6, 1)),
    ((1, 7, 26), (0, 8, 0)),
    ((2, 0, 0), (0, 8, 0)),
    ((2, 2, 0), (0, 10, 0)),
    ((2, 2, 1), (0, 11, 0)),
    ((2, 3, 0), (0, 12, 0)),
    ((2, 4, 0), (0, 12, 1)),
)
_CRIO_NRI: Final[Sequence[tuple[Version, Version]]] = (
    ((1, 26, 0), (0, 2, 0)),
    ((1, 27, 0), (0, 3, 0)),
    ((1, 29, 0), (0, 5, 0)),
    ((1, 30, 0), (0, 6, 0)),
    ((1, 31, 0), (0, 6, 1)),
    ((1, 32, 0), (0, 9, 0)),
    ((1, 34, 0), (0, 10, 0)),
    ((1, 35, 0), (0, 11, 0)),
)
_OLDEST_NRI: Final[Version] = (0, 3, 0)

FAILURE_POLICY_SINCE: Final[Version] = (0, 12, 4)
"""The first NRI that reads `ConfigureResponse.failure_policy`."""

# What every runtime applies at creation, and in an update.
_ALWAYS_AT_CREATION: Final = frozenset(
    {
        Resource.CPU_SHARES,
        Resource.CPU_CFS_QUOTA,
        Resource.CPU_CFS_PERIOD,
        Resource.CPUSET_CPUS,
        Resource.CPUSET_MEMS,
        Resource.MEMORY_LIMIT,
        Resource.RESCTRL_GROUP,
        Resource.ENV,
        Resource.MOUNT,
        Resource.DEVICE,
    }
)
_ALWAYS_IN_UPDATE: Final = frozenset(
    {
        Resource.CPU_SHARES,
        Resource.CPU_CFS_QUOTA,
        Resource.CPU_CFS_PERIOD,
        Resource.CPUSET_CPUS,
        Resource.CPUSET_MEMS,
        Resource.MEMORY_LIMIT,
    }
)
# Through `unified`, hence on cgroup v2 only. Memory protection and throttling are known to every
# v2 kernel with the memory controller, so naming them cannot make the OCI runtime fail.
UNIFIED: Final = frozenset({Resource.MEMORY_MIN, Resource.MEMORY_LOW, Resource.MEMORY_HIGH})


class RuntimeProfile(msgspec.Struct, frozen=True):
    """What the runtime at the other end of a connection is and can do.

    nri: the NRI version, as the runtime reported it or inferred; `nri_reported` says which.
    creation, update: the resources that a reply to CreateContainer, or an update of a container,
        may carry; everything else would be dropped silently.
    valid_mask: the event bits that the runtime is certain to accept. One bit that it does not know
        fails the registration, so the bits that came with NRI 0.10 go only to a runtime that sent
        its NRI version; a version inferred from the runtime's own may be wrong.
    failure_policy: whether the runtime acts on the failure policy in our answer to Configure.
    lists_at_once: whether Synchronize follows Configure without a wait for running CRI calls.
    request_timeout_s: how long a hook may take before the connection is cut.
    warnings: sentences for `koordctl status` and the log, each with what to do.
    """

    kind: RuntimeKind
    name: str
    version: Version
    version_text: str
    nri: Version
    nri_reported: bool
    generation: Generation
    creation: frozenset[Resource]
    update: frozenset[Resource]
    valid_mask: int
    failure_policy: bool
    lists_at_once: bool
    request_timeout_s: float
    registration_timeout_s: float
    warnings: tuple[str, ...] = ()


_AS_OLDEST: Final = (
    "it is treated as the oldest NRI, with the events and values that every version takes"
)

DEFAULT_REQUEST_TIMEOUT_S: Final = 2.0
"""NRI's own default. At twice the value a hook may answer after the runtime has cut the
connection."""
DEFAULT_REGISTRATION_TIMEOUT_S: Final = 5.0
"""NRI's own default, within which a plugin has to register. Only shown: the runtime enforces it."""


def runtime_profile(
    name: str,
    version: str,
    *,
    nri_version: str = "",
    request_timeout_ms: int = 0,
    registration_timeout_ms: int = 0,
    cgroup_version: int = 1,
) -> RuntimeProfile:
    """Return the profile of the runtime that introduced itself with these values in Configure.

    Unknown names and unreadable versions give the most careful profile: the oldest generation's.
    Time-outs of 0 (generation A does not report them) stand for the defaults of 5 s and 2 s.
    """
    kind = _kind(name)
    release = parse_version(version)
    reported = _reported_nri(nri_version)
    nri = reported or _inferred_nri(kind, release)
    generation = _generation(nri)
    return RuntimeProfile(
        kind=kind,
        name=name,
        version=release or UNKNOWN_VERSION,
        version_text=version,
        nri=nri,
        nri_reported=reported is not None,
        generation=generation,
        creation=_creation(kind, release, nri, cgroup_version),
        update=_ALWAYS_IN_UPDATE | (UNIFIED if cgroup_version == 2 else frozenset()),
        # What follows rests on the NRI version that the runtime itself sent: only that proves it.
        valid_mask=VALID_MASK
        if reported is not None and nri >= (0, 10, 0)
        else VALID_MASK_BEFORE_0_10,
        failure_policy=reported is not None and nri >= FAILURE_POLICY_SINCE,
        lists_at_once=kind is not RuntimeKind.OTHER
        and release is not None
        and generation is Generation.A,
        request_timeout_s=_seconds(request_timeout_ms, DEFAULT_REQUEST_TIMEOUT_S),
        registration_timeout_s=_seconds(registration_timeout_ms, DEFAULT_REGISTRATION_TIMEOUT_S),
        warnings=_warnings(kind, release, name, version),
    )


def _kind(name: str) -> RuntimeKind:
    folded = name.strip().lower()
    if folded == "containerd":
        return RuntimeKind.CONTAINERD
    if folded in ("cri-o", "crio"):
        return RuntimeKind.CRIO
    return RuntimeKind.OTHER


def _reported_nri(text: str) -> Version | None:
    """Read a Go module version; "(devel)", "0.0.0-unknown" and an empty text are not versions.

    A pseudo-version or pre-release ("v0.12.1-0.2026…") lies before the release that it names, so
    it counts as the one before: it may lack that release's fixes.
    """
    version = parse_version(text)
    if version is None or version == UNKNOWN_VERSION:
        return None
    major, minor, patch = version
    if patch > 0 and _PRE_RELEASE.match(text.strip()):
        return major, minor, patch - 1
    return version


def _inferred_nri(kind: RuntimeKind, release: Version | None) -> Version:
    """The NRI of the nearest lower release in the table; the oldest when there is none."""
    table = {RuntimeKind.CONTAINERD: _CONTAINERD_NRI, RuntimeKind.CRIO: _CRIO_NRI}.get(kind, ())
    nri = _OLDEST_NRI
    if release is not None:
        for since, module in table:
            if release >= since:
                nri = module
    return nri


def _generation(nri: Version) -> Generation:
    if nri >= (0, 12, 0):
        return Generation.D
    if nri >= (0, 10, 0):
        return Generation.C
    if nri >= (0, 7, 0):
        return Generation.B
    return Generation.A


def _creation(
    kind: RuntimeKind, release: Version | None, nri: Version, cgroup_version: int
) -> frozenset[Resource]:
    honoured = set(_ALWAYS_AT_CREATION)
    if cgroup_version == 2:
        honoured |= UNIFIED
    # Field 4 of LinuxContainerAdjustment came with NRI 0.7; containerd applies it since
    # 1.7.26 and 2.0.0, which are the releases that brought that NRI.
    if nri >= (0, 7, 0) and kind is not RuntimeKind.OTHER:
        honoured.add(Resource.OOM_SCORE_ADJ)
    return frozenset(honoured)


def _seconds(milliseconds: int, default: float) -> float:
    return milliseconds / 1000 if milliseconds > 0 else default


def _warnings(
    kind: RuntimeKind, release: Version | None, name: str, version: str
) -> tuple[str, ...]:
    if kind is RuntimeKind.OTHER:
        return (f"runtime {name[:64]!r} is not known: {_AS_OLDEST}",)
    if release is None:
        return (f"{kind} sent no readable version ({version[:64]!r}): {_AS_OLDEST}",)
    if kind is RuntimeKind.CONTAINERD and release < (1, 7, 16):
        return (
            "this containerd can dead-lock when an NRI plugin registers (its issue 10085):"
            " upgrade to 1.7.16 or later",
        )
    return ()
