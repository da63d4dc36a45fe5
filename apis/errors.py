"""The one error for input that cannot be used: which object, which field, which value, why.

Parsers raise it. Callers that isolate faults (the engine, a source, a controller) report it and
keep the last good state. Values come from outside, so they are shortened and made printable here.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN_VALUE = 200
"""Characters; chosen: enough to recognise a value, and a log line stays readable."""


def printable(value: object) -> str:
    """Return `value` as one line of at most 200 characters that is safe to log and to print."""
    text = value if isinstance(value, str) else repr(value)
    if len(text) > _SHOWN_VALUE:
        text = text[:_SHOWN_VALUE] + "…"
    return text if text.isprintable() else ascii(text)[1:-1]


class InputError(ValueError):
    """An input object has a field whose value cannot be used.

    obj: kind and name, "Pod default/web" or "NodeSLO n1" or a file name.
    field: path inside the object, 'metadata.annotations["koordinator.sh/cpuQOS"].groupIdentity';
    "" when it is the object as a whole.
    """

    def __init__(
        self, *, obj: str, field: str, value: object, problem: str, hint: str | None = None
    ) -> None:
        self.obj = obj
        self.field = field
        self.value = printable(value)
        self.problem = problem
        self.hint = hint
        line = f"{printable(obj)}: "
        if field:
            shown = "is not set" if value is None else f"= {self.value!r}"
            line += f"{printable(field)} {shown}: "
        line += problem
        super().__init__(f"{line} ({hint})" if hint else line)

    def about(self, obj: str) -> InputError:
        """Return the same error about another object: parsers that cache do not know theirs."""
        return InputError(
            obj=obj, field=self.field, value=self.value, problem=self.problem, hint=self.hint
        )


class InputErrors(ValueError):
    """Several `InputError`s of one object, collected so that a person sees all of them at once."""

    def __init__(self, errors: Sequence[InputError]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(str(error) for error in self.errors))
