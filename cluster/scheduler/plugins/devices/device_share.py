"""DeviceShare: GPUs, RDMA and FPGA devices, whole or in parts.

A node passes if it has enough devices that can give what is asked of each, and that are as close
together as the request and the node demand: in one scope of the topology, as a partition of linked
GPUs, beside devices of other types. Columns decide what can be counted; for the rest the allocation
itself is tried on the nodes that passed the columns. docs/scheduler.md, "DeviceShare".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from apis.device import DeviceType
from apis.keys import (
    LABEL_GPU_ISOLATION_PROVIDER,
    LABEL_GPU_MODEL,
    LABEL_GPU_VENDOR,
)
from cluster.scheduler.exact.devices import failures
from cluster.scheduler.exact.devices.allocate import Devices, allocate, demands_scope
from cluster.scheduler.exact.devices.candidates import NO_LIMITS, Limits
from cluster.scheduler.exact.devices.failures import Failure
from cluster.scheduler.exact.devices.records import (
    supports,
)
from cluster.scheduler.plugins.contract import (
    AppliesByShape,
    Mask,
    OfRowAlone,
    Reason,
    Restored,
    Scores,
    to_largest,
    zeros,
)
from cluster.scheduler.plugins.devices.columns import (
    Flags,
    Slots,
    beside,
    fitting,
    has_topology,
    most_together,
    needs_allocation,
    node_scores,
    selected,
    with_partition,
)
from cluster.scheduler.plugins.devices.hinted import asks_for_devices, limits_of_hint, narrowed
from cluster.scheduler.plugins.devices.reserved import limits_within
from cluster.scheduler.plugins.devices.settings import DEFAULT, NAME, Settings, requested, rules_of
from cluster.scheduler.tables.amounts import Vector
from cluster.scheduler.tables.devices.columns import DeviceColumns
from cluster.scheduler.tables.devices.partitions import PartitionRules
from cluster.scheduler.tables.devices.request import (
    DeviceRequest,
    Scope,
    TypeRequest,
    device_request,
)
from cluster.scheduler.tables.devices.table import NO_SLOT, DeviceTable
from cluster.scheduler.tables.nodes import Rows
from cluster.scheduler.tables.scheduling_hint import hint_of
from cluster.scheduler.tables.shapes import PodShape
from cluster.scheduler.tables.tables import Tables

_GPU: Final = str(DeviceType.GPU)

_NO_PROVIDER: Final = Reason("GPUIsolationProviderHAMICore not found on the node", resolvable=False)
_FAILURES: Final = tuple(Reason(one.text, one.resolvable) for one in failures.ALL)
_BITS: Final = {failure: 1 << (1 + number) for number, failure in enumerate(failures.ALL)}
_LASTING: Final = ~sum(bit for failure, bit in _BITS.items() if failure.resolvable)
"""Bits of reasons that no freed device would change."""
_FIRST_MODEL: Final = 1 + len(failures.ALL)
MOST_MODELS: Final = 32
"""Reasons for models that cannot be shared: with more models, those beyond share the last one. A
mask has 62 bits."""


class DeviceShareFilter(AppliesByShape, OfRowAlone):
    """Holds back nodes that cannot give the devices."""

    name = NAME

    def __init__(
        self,
        devices: DeviceTable,
        settings: Settings = DEFAULT,
        restored: Restored | None = None,
    ) -> None:
        """restored: devices of reservations are free for pods that may use these."""
        self._devices = devices
        self._settings = settings
        self._restored = restored
        self._models = settings.unshareable

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return requested(pod) is not None

    def reasons(self, pod: PodShape) -> tuple[Reason, ...]:
        models = [
            Reason(f'model "{model}" of vendor "{vendor}" does not support GPU Share', False)
            for vendor, model in self._models
        ]
        if len(models) > MOST_MODELS:
            models[MOST_MODELS - 1 :] = [Reason("model does not support GPU Share", False)]
        return (_NO_PROVIDER, *_FAILURES, *models)

    def filter(self, pod: PodShape, tables: Tables, rows: Rows) -> Mask:
        request = requested(pod)
        assert request is not None
        slots = self._devices.slots(rows)
        mask = zeros(len(slots))
        if request.shares_gpu:
            mask |= self._sharing(request, tables, rows)
        there = slots != NO_SLOT
        hinted = asks_for_devices(pod, self._settings)
        if hinted or not request.counted:
            for type_ in request.types:
                mask[~there] |= _BITS[failures.NO_DEVICES[type_]]
        positions = np.flatnonzero(there)
        by_columns, undecided = self._by_columns(request, slots[positions])
        mask[positions] |= by_columns
        numbers = np.arange(len(tables.nodes))[rows]
        if hinted:
            undecided |= _may_be_hinted(pod, tables, numbers[positions])
        for position in positions[undecided]:
            if mask[position] == 0:
                outcome = self._try(pod, request, int(numbers[position]))
                if isinstance(outcome, Failure):
                    mask[position] |= _BITS[outcome]
        if self._restored is not None and mask.any():
            self._allow_reserved(pod, request, tables, self._restored, numbers, mask)
        return mask

    def _try(
        self,
        pod: PodShape,
        request: DeviceRequest,
        row: int,
        without: Set[str] = frozenset(),
        limits: Limits = NO_LIMITS,
    ) -> Devices | Failure:
        devices = self._devices.view(row, without=without)
        if devices is None:
            return failures.NO_DEVICES[next(iter(request.types))]
        rules = rules_of(self._settings, self._devices)
        limits = narrowed(limits, limits_of_hint(pod, self._devices, row, self._settings))
        return allocate(devices, request, limits=limits, rules=rules)

    def _allow_reserved(
        self,
        pod: PodShape,
        request: DeviceRequest,
        tables: Tables,
        restored: Restored,
        numbers: NDArray[np.intp],
        mask: Mask,
    ) -> None:
        """Clear the mask of nodes where devices are short that are reserved for the pod."""
        rows = restored.rows(pod, tables)
        for position in np.flatnonzero((mask != 0) & np.isin(numbers, rows)):
            if mask[position] & _LASTING:
                continue
            row = int(numbers[position])
            tries = [
                (frozenset({uid}), limits_within(self._devices, tables, row, uid, restored))
                for uid in restored.on(pod, tables, row)
            ] or [(restored.ignored(pod, tables, row), NO_LIMITS)]
            if any(
                not isinstance(self._try(pod, request, row, without, limits), Failure)
                for without, limits in tries
            ):
                mask[position] = 0

    def _sharing(self, request: DeviceRequest, tables: Tables, rows: Rows) -> Mask:
        """Return the bits of nodes on which GPUs cannot be shared as the pod wants."""
        labels = tables.nodes.labels
        mask = zeros(len(self._devices.slots(rows)))
        if request.isolation:
            column = labels.column(LABEL_GPU_ISOLATION_PROVIDER)
            provider = column.known(request.isolation)
            mask[(column.ids[rows] != provider) | (provider == 0)] |= 1
        vendors, models = labels.column(LABEL_GPU_VENDOR), labels.column(LABEL_GPU_MODEL)
        for number, (vendor, model) in enumerate(self._models):
            same = (vendors.ids[rows] == vendors.known(vendor)) & (
                models.ids[rows] == models.known(model)
            )
            if vendors.known(vendor) and models.known(model):
                mask |= same.astype(np.int64) << (_FIRST_MODEL + min(number, MOST_MODELS - 1))
        return mask

    def _by_columns(self, request: DeviceRequest, slots: Slots) -> tuple[Mask, Flags]:
        """Return the mask of slots, and for which of them only an allocation can decide."""
        mask = zeros(len(slots))
        undecided: Flags = np.zeros(len(slots), dtype=np.bool_)
        rules = [self._devices.rules(int(slot)) for slot in slots]
        fits = {
            type_: fitting(self._devices.columns[type_], slots, wanted)
            for type_, wanted in request.types.items()
        }
        for type_, wanted in request.types.items():
            of_type, by_allocation = self._of_type(request, wanted, slots, rules, fits[type_])
            mask |= of_type
            undecided |= by_allocation
            if needs_allocation(request, wanted):
                undecided[:] = True
        if request.same_pcie and len(request.joint) > 1:
            apart, by_allocation = self._joint(request, slots, rules, fits)
            mask |= np.where(mask == 0, apart, 0)
            undecided |= by_allocation
        mask |= self._templates(request, slots)
        return mask, undecided

    def _of_type(
        self,
        request: DeviceRequest,
        wanted: TypeRequest,
        slots: Slots,
        rules: Sequence[PartitionRules],
        fits: Flags,
    ) -> tuple[Mask, Flags]:
        """Return, for one type, the mask of slots and which of them are undecided."""
        type_ = wanted.type
        columns = self._devices.columns[type_]
        least = np.full(len(slots), wanted.count)
        if wanted.every:
            least = np.maximum(selected(columns, slots, wanted.selector).sum(axis=1), 1)
        none = ~columns.present[slots].any(axis=1)
        short = fits.sum(axis=1) - columns.unattributed[slots] < least
        mask = none * np.int64(_BITS[failures.NO_DEVICES[type_]])
        mask |= (short & ~none) * np.int64(_BITS[failures.INSUFFICIENT[type_]])
        if wanted.functions is not None and short.any():
            whole = fitting(columns, slots, replace(wanted, functions=None)).sum(axis=1)
            functions = short & ~none & (whole - columns.unattributed[slots] >= least)
            mask[functions] = _BITS[failures.NO_FUNCTIONS[type_]]
        enough = ~short & ~none
        undecided: Flags = np.zeros(len(slots), dtype=np.bool_)
        if demands_scope(wanted):
            mask |= _in_scope(columns, wanted, slots, fits, least, enough)
        if type_ != _GPU:
            return mask, undecided
        mask |= self._of_vendor(wanted, slots)
        if not wanted.shared:
            binds = np.array([one.mandatory for one in rules], dtype=np.bool_)
            binds |= request.partition is not None
            found = with_partition(columns, slots, fits, rules, wanted, request)
            mask |= _by_partition(rules, wanted, found, enough & binds)
            if demands_scope(wanted) or (request.same_pcie and _GPU in request.joint[1:]):
                undecided |= binds
        return mask, undecided

    def _joint(
        self,
        request: DeviceRequest,
        slots: Slots,
        rules: Sequence[PartitionRules],
        fits: Mapping[str, Flags],
    ) -> tuple[Mask, Flags]:
        """Return which slots lack PCIe switches with all types, and which are undecided."""
        primary, *others = request.joint
        columns = self._devices.columns[primary]
        near = fits[primary].copy()
        undecided = columns.unknown_switch[slots]
        for type_ in others:
            other = self._devices.columns[type_]
            least = request.types[type_].count if request.types[primary].count == 1 else 1
            near &= beside(columns, other, slots, fits[type_], least)
            undecided = undecided | (other.unattributed[slots] > 0)
        apart, by_allocation = self._of_type(request, request.types[primary], slots, rules, near)
        return (apart != 0) * np.int64(_BITS[failures.NOT_JOINT]), undecided | by_allocation

    def _templates(self, request: DeviceRequest, slots: Slots) -> Mask:
        """Return the bit of slots for whose model no template equals the share."""
        mask = zeros(len(slots))
        gpu = request.types.get(_GPU)
        templates = rules_of(self._settings, self._devices).templates
        if gpu is not None and templates.concern(gpu):
            for position, slot in enumerate(slots):
                inventory = self._devices.inventory(int(slot))
                assert inventory is not None
                if not templates.of(gpu, vendor=inventory.vendor, model=inventory.model):
                    mask[position] = _BITS[failures.NO_TEMPLATE]
        return mask

    def _of_vendor(self, wanted: TypeRequest, slots: Slots) -> Mask:
        mask = zeros(len(slots))
        if self._settings.adaption and wanted.count != 1:
            for position, slot in enumerate(slots):
                inventory = self._devices.inventory(int(slot))
                assert inventory is not None
                if not supports(inventory.vendor, wanted.count):
                    mask[position] = _BITS[failures.UNSUPPORTED_COUNT]
        return mask


def _may_be_hinted(pod: PodShape, tables: Tables, rows: NDArray[np.intp]) -> Flags:
    """Return the rows to which a pod may go by the nodes of its hint."""
    names = pod.derived(hint_of).nodes
    if not names:
        return np.ones(len(rows), dtype=np.bool_)
    known = [row for row in map(tables.nodes.row, names) if row is not None]
    return np.isin(rows, known)


def _in_scope(
    columns: DeviceColumns,
    wanted: TypeRequest,
    slots: Slots,
    fits: Flags,
    least: Vector,
    enough: Flags,
) -> Mask:
    if wanted.shared and wanted.count > 1:
        return enough * np.int64(_BITS[failures.SEVERAL_SHARES])
    if wanted.scope is Scope.DEVICE:
        return enough * np.int64(_BITS[failures.NOT_IN_SCOPE[wanted.type]])
    known = has_topology(columns, slots)
    apart = most_together(columns, slots, fits, wanted.scope) < least
    mask = (enough & ~known) * np.int64(_BITS[failures.NO_TOPOLOGY[wanted.type]])
    mask |= (enough & known & apart) * np.int64(_BITS[failures.NOT_IN_SCOPE[wanted.type]])
    return mask


def _by_partition(
    rules: Sequence[PartitionRules], wanted: TypeRequest, found: Flags, concerned: Flags
) -> Mask:
    mask = zeros(len(found))
    for position in np.flatnonzero(concerned & ~found):
        table = rules[int(position)].table
        if table is None:
            failure = failures.NO_PARTITION_TABLE
        elif wanted.count not in table:
            failure = failures.UNSUPPORTED_COUNT
        else:
            failure = failures.NO_PARTITION
        mask[position] = _BITS[failure]
    return mask


class DeviceShareScore(AppliesByShape, OfRowAlone):
    """Ranks nodes by how full their devices of the requested types would be, summed over types."""

    name = NAME

    def __init__(self, devices: DeviceTable, settings: Settings = DEFAULT) -> None:
        self._devices = devices
        self._settings = settings

    def applies(self, pod: PodShape, tables: Tables) -> bool:
        return isinstance(pod.derived(device_request), DeviceRequest)

    def score(self, pod: PodShape, tables: Tables, rows: Rows) -> Scores:
        slots = self._devices.slots(rows)
        scores = zeros(len(slots))
        request = pod.derived(device_request)
        assert isinstance(request, DeviceRequest)
        there = slots != NO_SLOT
        for type_, wanted in request.types.items():
            scores[there] += node_scores(
                self._devices.columns[type_], slots[there], wanted, self._settings.scoring
            )
        return scores

    def normalize(self, raw: Scores) -> Scores:
        return to_largest(raw)
