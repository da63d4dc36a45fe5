"""From JSON to typed values, and every mistake on the way named with object, field and value.

All wire types of `apis` decode through here: one pair of hooks teaches msgspec quantities, and one
place turns its errors into `InputError`. Input is bounded before it is parsed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from apis.errors import InputError, InputErrors
from apis.fields import ABSENT, below
from apis.lenient import convert_leniently, fault_of
from apis.quantity import Quantity, parse_quantity

T = TypeVar("T")

LARGEST_ANNOTATION: Final = 256 * 1024
"""Bytes; Kubernetes allows as much for all annotations of an object together."""
LARGEST_OBJECT: Final = 8 * 1024 * 1024
"""Bytes; far above what an API server stores for one object (1.5 MiB)."""
_LARGEST_SEARCHED: Final = 16 * 1024
"""Bytes up to which the one bad element of a list or map is searched for, by trying each alone."""

Json = dict[str, Any] | list[Any] | str | int | float | bool | None


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
    """Return a decoder for the JSON of a whole object; it raises msgspec's errors."""
    return field_decoder(type_).decode


def field_decoder(type_: type[T]) -> msgspec.json.Decoder[T]:
    """Return a decoder for `decode_field`."""
    return msgspec.json.Decoder(type_, dec_hook=dec_hook)


def decode_field(decoder: msgspec.json.Decoder[T], text: bytes | str, *, obj: str, field: str) -> T:
    """Decode the JSON `text` of one field; raise InputError that names the inner field.

    Members that are null count as absent, as they do for Go's decoder.
    """
    shown = text if isinstance(text, str) else text.decode(errors="replace")
    if len(text) > LARGEST_ANNOTATION:
        problem = f"longer than {LARGEST_ANNOTATION} bytes"
        raise InputError(obj=obj, field=field, value=shown, problem=problem)
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        first = error
    except (msgspec.DecodeError, RecursionError) as error:
        problem = f"not valid JSON: {error}"
        raise InputError(obj=obj, field=field, value=shown, problem=problem) from None
    try:
        plain = without_nulls(msgspec.json.decode(text))
    except (msgspec.DecodeError, RecursionError) as error:
        # A wrong type may be met before the text turns out not to be JSON at all.
        problem = f"not valid JSON: {error}"
        raise InputError(obj=obj, field=field, value=shown, problem=problem) from None
    try:
        return decoder.decode(msgspec.json.encode(plain))
    except msgspec.ValidationError as error:
        first = error

    def decode(part: Any) -> T:
        return decoder.decode(msgspec.json.encode(part))

    search = decode if len(text) <= _LARGEST_SEARCHED else None
    fault = fault_of(first, plain, decoder.type, search)
    raise InputError(
        obj=obj,
        field=below(field, fault.path),
        value=shown if fault.value is ABSENT or not fault.path else fault.value,
        problem=fault.problem,
    )


def decode_optional_field(
    decoder: msgspec.json.Decoder[T], text: bytes | str, *, obj: str, field: str
) -> T | None:
    """Decode as `decode_field` does; the text `null` is None."""
    if text.strip() in ("null", b"null"):
        return None
    return decode_field(decoder, text, obj=obj, field=field)


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
    """Decode a whole object; raise InputErrors with every bad field of it."""
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
