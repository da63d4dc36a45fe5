"""Five runtimes, as far as a plugin can tell them apart: one for each wire generation of NRI, and
one with the failure policies that NRI has since 0.12.4.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Profile:
    """What differs between the generations on the runtime's side.

    conflict_by_field: conflicts name the Field enum, not a subject in words.
    largest_frame: bytes of one frame's payload that the runtime's multiplexer writes; it refuses
        a longer one, after the message's first 4096 bytes are out. 0: it writes any.
    failure_policies: a plugin's failure policy is acted on.
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
    largest_frame: int = 0
    failure_policies: bool = False


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
    largest_frame=1 << 24,
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

D_POLICY = replace(D, nri="0.12.5", failure_policies=True)

ALL = (A, B, C, D, D_POLICY)
