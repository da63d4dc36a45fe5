"""Four runtimes, one per wire generation, as far as a plugin can tell them apart.

Source: nri.md section 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """What differs between the generations on the runtime's side.

    conflict_by_field: conflicts name the Field enum, not a subject in words.
    """

    nri: str
    runtime_name: str
    runtime_version: str
    valid_mask: int
    tells_timeouts: bool
    tells_nri_version: bool
    splits_synchronize: bool
    dedicated_events: bool
    checks_name: bool
    conflict_by_field: bool
    closes_when_synchronize_fails: bool


A = Profile(
    nri="0.6.1",
    runtime_name="containerd",
    runtime_version="1.7.24~ds1",
    valid_mask=0x07FF,
    tells_timeouts=False,
    tells_nri_version=False,
    splits_synchronize=False,
    dedicated_events=False,
    checks_name=False,
    conflict_by_field=False,
    closes_when_synchronize_fails=False,
)
B = Profile(
    nri="0.8.0",
    runtime_name="containerd",
    runtime_version="v2.1.9",
    valid_mask=0x07FF,
    tells_timeouts=True,
    tells_nri_version=False,
    splits_synchronize=True,
    dedicated_events=False,
    checks_name=False,
    conflict_by_field=False,
    closes_when_synchronize_fails=True,
)
C = Profile(
    nri="0.11.0",
    runtime_name="containerd",
    runtime_version="v2.2.1",
    valid_mask=0x3FFF,
    tells_timeouts=True,
    tells_nri_version=False,
    splits_synchronize=True,
    dedicated_events=False,
    checks_name=False,
    conflict_by_field=True,
    closes_when_synchronize_fails=True,
)
D = Profile(
    nri="0.12.2",
    runtime_name="containerd",
    runtime_version="v2.5.0",
    valid_mask=0x3FFF,
    tells_timeouts=True,
    tells_nri_version=True,
    splits_synchronize=True,
    dedicated_events=True,
    checks_name=True,
    conflict_by_field=True,
    closes_when_synchronize_fails=True,
)

ALL = (A, B, C, D)
