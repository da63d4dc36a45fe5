"""From JSON to typed values, and every mistake on the way named with object, field and value.

All wire types of `apis` decode through here: one pair of hooks teaches msgspec quantities, and one
place turns its errors into `InputError`. Input is bounded before it is parsed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import inspect

from apis.errors import InputError, InputErrors, printable
from apis.expected import choices
from apis.fields import ABSENT, Path, below
from apis.lenient import convert_leniently, fault_of
from apis.members import respell
from apis.quantity import Quantity, parse_quantity

_log = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

LARGEST_ANNOTATION: Final = 256 * 1024
"""Bytes; Kubernetes allows as much for all annotations of an object together."""
LARGEST_OBJECT: Final = 8 * 1024 * 1024
"""Bytes; chosen: far above what an API server stores for one object (1.5 MiB)."""
_LARGEST_SEARCHED: Final = 16 * 1024
"""Bytes of a text in which the bad element of a list or map is searched for, decoding each alone.
The work grows with the square of the length, to about 10 ms here (measured)."""

_SHORT: Final = 4096
_CACHED_SHORT_TEXTS: Final = 512
_CACHED_LONG_TEXTS: Final = 4
"""Of each kind of annotation the last texts of up to `_SHORT` characters, more than a node has pods
(kubelet's default is 110), and the last longer ones: 2 MiB and 1 MiB at worst."""
_MOST_REPORTED: Final = 16384
"""Objects whose unknown members are remembered as reported: three annotations of 5,000 nodes, the
largest cluster that the manager is measured with. About 5 MiB when full."""


class Wire(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, dict=False):
    """Base of wire types: camelCase names, unknown fields ignored, defaults left out."""


def dec_hook(type_: type, obj: Any) -> Any:
    """Teach msgspec to read a quantity."""
    if type_ is Quantity:
        if isinstance(obj, str | int | float):
            return parse_quantity(obj)
        raise ValueError("a quantity is a number or a text such as 500m or 16Gi")
    raise NotImplementedError(f"no rule to decode {type_}")


def enc_hook(obj: Any) -> Any:
    """Teach msgspec to write a quantity."""
    if isinstance(obj, Quantity):
        return str(obj)
    raise NotImplementedError(f"no rule to encode {type(obj)}")


_encoder = msgspec.json.Encoder(enc_hook=enc_hook)
_sorted_encoder = msgspec.json.Encoder(enc_hook=enc_hook, order="sorted")


def encode(value: Any) -> bytes:
    """Return the JSON of a wire value or of plain data that holds quantities."""
    return _encoder.encode(value)


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces, as upstream writes annotations."""
    return _sorted_encoder.encode(value).decode()


def to_plain(value: Any) -> Any:
    """Return a wire value as dicts, lists and scalars, as they stand in JSON."""
    return msgspec.to_builtins(value, enc_hook=enc_hook)


def json_decoder(type_: type[T]) -> Callable[[bytes | str], T]:
    """Return a decoder for the JSON of a whole object; it raises msgspec's errors.

    Member names match exactly, as they do for Kubernetes' own clients.
    """
    return msgspec.json.Decoder(type_, dec_hook=dec_hook).decode


# --- JSON that stands as text inside an object ---------------------------------------------------


class Embedded(Wire, frozen=True, forbid_unknown_fields=True):
    """Base of types that are read from JSON text inside an annotation or a ConfigMap.

    Their member names match in any letter case (`apis.members`). That an exactly spelt text needs
    no second look is what `forbid_unknown_fields` is for: nothing is refused for an unknown member.
    """


class Decoded(NamedTuple, Generic[T]):
    """The value of a text, and its members that no field matches, described for people."""

    value: T
    unknown: str = ""


def field_decoder(type_: type[T]) -> msgspec.json.Decoder[T]:
    """Return a decoder for `decode_field`. Every Struct within `type_` must be an `Embedded`."""
    decoder = msgspec.json.Decoder(type_, dec_hook=dec_hook)
    _require_embedded(inspect.type_info(type_))
    return decoder


def decode_field(decoder: msgspec.json.Decoder[T], text: bytes | str, *, obj: str, field: str) -> T:
    """Decode the JSON `text` of one field of `obj`; raise InputError that names the inner field.

    Members that are null count as absent. An unknown member is named in the log, once.
    """
    try:
        decoded = decode_text(decoder, text, field=field)
    except InputError as error:
        raise error.about(obj) from None
    if decoded.unknown:
        name_unknown_members(obj, field, decoded.unknown)
    return decoded.value


def decode_optional_field(
    decoder: msgspec.json.Decoder[T], text: bytes | str, *, obj: str, field: str
) -> T | None:
    """Decode as `decode_field` does; the text `null` is None."""
    if text.strip() in ("null", b"null"):
        return None
    return decode_field(decoder, text, obj=obj, field=field)


def decode_text(decoder: msgspec.json.Decoder[T], text: bytes | str, *, field: str) -> Decoded[T]:
    """Decode as `decode_field` does, for an object that is not known: errors name none."""

    def refused(value: object, problem: str, path: Path = ()) -> InputError:
        return InputError(obj="", field=below(field, path), value=value, problem=problem)

    shown = text if isinstance(text, str) else text.decode(errors="replace")
    if len(text) > LARGEST_ANNOTATION:
        raise refused(shown, f"longer than {LARGEST_ANNOTATION} bytes")
    try:
        return Decoded(decoder.decode(text))
    except msgspec.ValidationError:
        pass  # perhaps only another letter case, an unknown member or null
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise refused(shown, f"not valid JSON: {error}") from None
    try:
        found = respell(_in_order(text), decoder.type)
    except (ValueError, RecursionError) as error:
        # A wrong type may be met before the text turns out not to be JSON at all.
        raise refused(shown, f"not valid JSON: {error}") from None

    def decode(part: Any) -> T:
        return decoder.decode(msgspec.json.encode(part))

    try:
        return Decoded(decode(found.tree), found.unknown)
    except msgspec.ValidationError as error:
        search = decode if len(text) <= _LARGEST_SEARCHED else None
        fault = fault_of(error, found.tree, decoder.type, search)
    whole = fault.value is ABSENT or not fault.path
    raise refused(shown if whole else fault.value, fault.problem, fault.path)


def remembered(
    decode: Callable[[str], Decoded[S]], finish: Callable[[S], T], *, field: str
) -> Callable[[str, str], T]:
    """Return (text, obj) -> value, around bounded caches of what texts mean.

    decode: as `decode_text` does; finish: makes the value of what was decoded, and may raise an
    InputError too. That a text is bad is remembered as well: finding the bad element costs more
    than a good text does, and a bad annotation is asked about at every decision.
    """

    def outcome(text: str) -> Decoded[T] | InputError:
        try:
            decoded = decode(text)
            return Decoded(finish(decoded.value), decoded.unknown)
        except InputError as error:
            return error

    of_short = lru_cache(maxsize=_CACHED_SHORT_TEXTS)(outcome)
    of_long = lru_cache(maxsize=_CACHED_LONG_TEXTS)(outcome)

    def run(text: str, obj: str) -> T:
        found = of_short(text) if len(text) <= _SHORT else of_long(text)
        if isinstance(found, InputError):
            raise found.about(obj)
        if found.unknown:
            name_unknown_members(obj, field, found.unknown)
        return found.value

    return run


@lru_cache(maxsize=_MOST_REPORTED)
def name_unknown_members(obj: str, field: str, unknown: str) -> None:
    """Write unknown members into the log, once for each object, field and text of them."""
    _log.warning("%s: %s: unknown members are ignored: %s", printable(obj), field, unknown)


def embedded_object(text: str, *, obj: str, largest: int) -> dict[str, Any]:
    """Return the JSON object that `text` spells, without null members, in the text's order.

    For `apis.members.respell`. Raises InputErrors.
    """
    parse_json_object(text, obj=obj, largest=largest)
    tree: dict[str, Any] = _in_order(text)
    return tree


def _in_order(text: bytes | str) -> Any:
    """Return the tree of a JSON text; of members with one name the last one's place counts."""
    msgspec.json.decode(text)  # refuses what `json` takes: NaN, and texts that are not UTF-8
    return json.loads(text, object_pairs_hook=_members_in_order)


def _members_in_order(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if value is not None:
            members.pop(name, None)
            members[name] = value
    return members


def _require_embedded(type_: inspect.Type) -> None:
    for choice in choices(type_):
        match choice:
            case inspect.StructType(cls=cls, fields=fields):
                if not issubclass(cls, Embedded):
                    raise TypeError(f"{cls.__name__} is read from text but is not an Embedded")
                for member in fields:
                    _require_embedded(member.type)
            case inspect.DictType(value_type=inner):
                _require_embedded(inner)
            case inspect.ListType(item_type=inner) | inspect.VarTupleType(item_type=inner):
                _require_embedded(inner)


# --- whole objects -------------------------------------------------------------------------------


def without_nulls(value: Any) -> Any:
    """Return plain data without the members that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(member) for key, member in value.items() if member is not None}
    if isinstance(value, list):
        return [without_nulls(member) for member in value]
    return value


def decode_object(
    raw: bytes | str | dict[str, Any], type_: type[T], *, obj: str, largest: int = LARGEST_OBJECT
) -> T:
    """Decode a whole object; raise InputErrors that name every bad field."""
    value, errors = decode_leniently(raw, type_, obj=obj, largest=largest)
    if errors or value is None:
        raise InputErrors(errors)
    return value


def decode_leniently(
    raw: bytes | str | dict[str, Any], type_: type[T], *, obj: str, largest: int = LARGEST_OBJECT
) -> tuple[T | None, list[InputError]]:
    """Decode what can be decoded: bad fields are left out (their defaults hold) and named.

    The value is None only where nothing can be saved: no JSON, or a required field is missing.
    """
    plain = without_nulls(parse_json_object(raw, obj=obj, largest=largest))
    return convert_leniently(plain, type_, obj=obj, dec_hook=dec_hook)


def parse_json_object(
    raw: bytes | str | dict[str, Any], *, obj: str, largest: int = LARGEST_OBJECT
) -> dict[str, Any]:
    """Return the JSON object that `raw` spells; raise InputErrors when it is none."""
    if isinstance(raw, dict):
        return raw
    try:
        if len(raw) > largest:
            raise InputErrors(
                [
                    InputError(
                        obj=obj,
                        field="(whole text)",
                        value=raw[:64],
                        problem=f"longer than {largest} bytes",
                    )
                ]
            )
        plain = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        text = raw if isinstance(raw, str) else raw.decode(errors="replace")
        raise InputErrors(
            [
                InputError(
                    obj=obj, field="(whole text)", value=text, problem=f"not valid JSON: {error}"
                )
            ]
        ) from None
    if not isinstance(plain, dict):
        raise InputErrors(
            [
                InputError(
                    obj=obj, field="(whole text)", value=plain, problem="expected a JSON object"
                )
            ]
        )
    return plain
