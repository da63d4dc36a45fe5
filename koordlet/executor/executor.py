"""The executor: the one writer of kernel files.

`want` sets the desired values of one subject. `plan` reads the kernel's files, compares in numbers,
applies the kernel's rules and returns ordered writes; it writes nothing. `apply` journals the
originals, does each write once and reads it back. The kernel accepts every prefix of a plan, so a
plan may end anywhere: at the write budget, a refusal or a crash.

Facts: docs/facts/kernel.md, "What a write does".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from hooks.state import State
from koordlet.executor import node_wide, tasks, views
from koordlet.executor.applying import Applier
from koordlet.executor.block_io import plan_block_io
from koordlet.executor.files import FilePlanner
from koordlet.executor.journal import Journal, JournalError
from koordlet.executor.judging import Judge
from koordlet.executor.originals import Originals, of_container
from koordlet.executor.records import Record
from koordlet.executor.requests_ahead import RequestsAhead
from koordlet.executor.slots import Plan, ResourceView, SlotKey, Want, WriteReport, Written
from koordlet.executor.table import DEFAULT_LIMITS, Limits, SlotTable
from koordlet.executor.texts import Texts
from linux.cgroup_paths import Layout
from linux.host import Host
from linux.resources import Resource


class Executor:
    """See the module. Not thread-safe: one thread owns it.

    burst_above_quota: this kernel takes a burst above the quota (Alibaba Cloud Linux); mainline
        does not.
    written: see `Written`; None where nothing follows from single writes.
    """

    def __init__(
        self,
        host: Host,
        layout: Layout,
        journal: Journal,
        *,
        limits: Limits = DEFAULT_LIMITS,
        page_size_bytes: int = 4096,
        burst_above_quota: bool = False,
        written: Written | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        texts = Texts(host, layout, page_size_bytes=page_size_bytes)
        self._table = SlotTable(texts, journal, limits=limits, clock=clock)
        self._originals = Originals(texts, journal)
        self._files = FilePlanner(
            texts, self._originals, journal, burst_above_quota=burst_above_quota
        )
        self._judge = Judge(self._table, self._originals, self._files)
        self._applier = Applier(
            self._table, self._files, self._judge, wall_clock=wall_clock, written=written
        )

    @property
    def layout(self) -> Layout:
        return self._table.layout

    @property
    def requests(self) -> RequestsAhead:
        """The requests that desired values do not follow yet; for any thread."""
        return self._table.requests

    def set_layout(self, layout: Layout) -> None:
        """Use another layout: the pods' root appeared or moved."""
        self._table.set_layout(layout)

    def set_burst_above_quota(self, *, allowed: bool) -> None:
        """Set whether this kernel accepts a burst above the quota; see the class."""
        self._files.burst_above_quota = allowed

    # -- desired values --------------------------------------------------------------------------

    def want(self, subject: str, wants: Sequence[Want]) -> None:
        """Set all desired values of a subject; values that are no longer desired are restored."""
        self._table.want(subject, wants)

    def wanted(self, subject: str) -> Mapping[SlotKey, Want]:
        """Return the desired values of a subject."""
        return self._table.wanted(subject)

    def subjects(self) -> list[str]:
        """Return the subjects with desired values."""
        return self._table.subjects()

    def restore(self, record: Record) -> None:
        """Restore the original of `record`, unless a subject has a desired value there."""
        self._table.restore(record)

    def orphans(self) -> list[Record]:
        """Return records without a slot: leftovers of an earlier run, and supports."""
        return self._table.orphans(partial(node_wide.left_behind, self._table))

    def watch_runtime_values(self) -> None:
        """Watch files that a runtime may write again though no policy claims them."""
        self._table.watch_runtime_values()

    def adopt_deliveries(self, container_id: str, place: str) -> None:
        """Journal the values that were delivered for a container, now that its group exists."""
        waiting = self._originals.adopt_deliveries(
            container_id, place, partial(tasks.adopted, self._table)
        )
        self._judge.leave_alone((place, resource) for resource in waiting)
        self._table.journal_grew()

    def adopt_all_deliveries(self) -> None:
        """Do the same for every container with deliveries, wherever its group is."""
        waiting = self._table.journal.containers_with_deliveries()
        for container_id, place in self._originals.places_of(waiting).items():
            self.adopt_deliveries(container_id, place)

    def leave(self, subject: str) -> bool:
        """Forget a subject whose groups are gone. Returns False, and does nothing, otherwise."""
        return self._table.leave(subject)

    def look_again(self, subjects: Collection[str] | None = None) -> None:
        """At the next plan, judge all values again that are not in force as they are claimed.

        What they depend on may have changed. subjects: only values of these; None: all.
        """
        if subjects is None:
            self._table.look_again()
            return
        for slot in self._table.of_subjects(subjects):
            if not slot.as_claimed:
                slot.look_again()

    def directories_of(self, subjects: Iterable[str]) -> set[str]:
        """Return the directories of the cgroup files with desired values of these subjects."""
        slots = self._table.of_subjects(subjects)
        return {slot.directory for slot in slots if slot.file and slot.directory}

    def directories(self) -> set[str]:
        """Return the directories of all managed cgroup files."""
        return {
            slot.directory for slot in self._table.slots.values() if slot.file and slot.directory
        }

    def owner(self, path: str) -> str | None:
        """Return the subject of a managed cgroup file, "" for one to restore, None for others."""
        slot = self._table.by_path.get(path)
        return None if slot is None else slot.subject

    @contextmanager
    def one_look(self) -> Iterator[None]:
        """Read each file once during the block; nothing may be applied in it."""
        with self._table.texts.one_look():
            yield

    # -- passes ----------------------------------------------------------------------------------

    def plan(self, *, subjects: Collection[str] | None = None) -> Plan:
        """Return what has to be done now. Writes nothing.

        subjects: look only at values of these, and at values that are no longer desired since the
            last plan; the groups around them are read and not changed. None: look at everything.
        """
        table = self._table
        plan = Plan()
        now = table.clock()
        self._restore_copies()
        released, table.released = table.released, []
        if subjects is None:
            around = None
            self._judge.count_pod_groups(now)
            dirty = self._judge.dirty(table.files(), plan, now)
            virtual = table.virtual()
        else:
            near = table.of_subjects(subjects)
            near += [slot for slot in released if table.slots.get(slot.slot_key) is slot]
            around = {slot.slot_key: slot for slot in near}
            of_files = [slot for slot in near if slot.file is not None]
            dirty = self._judge.dirty(of_files, plan, now)
            # Values that are not cgroup files are shared by many subjects: all of them or none.
            virtual = table.virtual() if len(of_files) < len(near) else {}
        block_io, lacking = plan_block_io(table, virtual, plan, now)
        files = self._files.enable_controllers([*self._judge.lacking, *lacking])
        if dirty:
            files += self._files.plan(dirty, table.live() if around is None else around, plan, now)
        for slot in dirty:
            if slot.slot_key not in plan.planned:
                self._judge.conclude(slot, plan)
        files += block_io
        switches = node_wide.plan(table, virtual, plan, now)
        files = node_wide.hold_identities(table, files, switches)
        of_tasks = tasks.plan(table, virtual, plan, now)
        # Group identity and core scheduling must never be on together. So the values of the one
        # that ends go first, then the switches (off before on), then the values of the other.
        if node_wide.ends_group_identity(switches):
            plan.writes = [*of_tasks.first, *files, *switches, *of_tasks.last]
        else:
            plan.writes = [*of_tasks.first, *switches, *files, *of_tasks.last]
        return plan

    def _restore_copies(self) -> None:
        """Restore the groups that copied a CPU set of ours from a directory that is restored."""
        table = self._table
        for slot in tuple(table.released):
            if slot.want is None and slot.restoring is not None and not of_container(slot):
                copies = self._originals.copies_below(slot.restoring, table.slots.__contains__)
                # If the journal fails, the copies are written down with its next append.
                with suppress(JournalError):
                    table.journal.update(copies)
                for record in copies:
                    table.restore(record)

    def apply(self, plan: Plan) -> WriteReport:
        """Carry out `plan` as far as the budget and the kernel allow."""
        return self._applier.apply(plan)

    def fill_budget(self) -> None:
        """Allow a full burst of writes again: for an uninstall, which must not stop half-way."""
        self._applier.fill_budget()

    # -- for people ------------------------------------------------------------------------------

    @property
    def cookie_changes(self) -> Mapping[tuple[str, str], int]:
        """(core scheduling group, "succeeded" or "failed") -> changes, of the latest groups."""
        return self._applier.cookie_changes

    def views(self, subject: str) -> list[ResourceView]:
        """Return the states of a subject's desired values."""
        return views.views(self._table, subject)

    def restoring(self) -> list[ResourceView]:
        """Return the originals that are still to be restored."""
        return views.restoring(self._table)

    def states(self) -> dict[tuple[Resource, State], int]:
        """Count slots by resource and state, for metrics."""
        return views.states(self._table)

    def standing(self, resources: Collection[Resource]) -> list[tuple[str, ResourceView]]:
        """Return (subject, view) of every desired value of these resources."""
        return views.standing(self._table, resources)
