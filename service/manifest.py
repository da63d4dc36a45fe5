"""YAML text as plain trees, within bounds: reads configuration files and objects.

PyYAML composes documents by recursion: a few kilobytes of brackets overflow the C stack and end the
process, merge keys (`<<`) multiply, and a file of six megabytes takes a gigabyte. Here the parser's
events are put together one by one, so depth and size are checked before anything is built. Callers
choose how many values a text may have; how deep it may nest is the same for all.

Scalars are read as Kubernetes reads them: times and `1:30` are text. A repeated key is an error, as
it is to kubectl, because one of its two values would be lost silently.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Only its parser is used."""

_PREFIX: Final = "tag:yaml.org,2002:"
_COLLECTIONS: Final = frozenset(_PREFIX + name for name in ("map", "seq"))
_LONGEST_NUMBER: Final = 64
"""Characters; chosen: the longest number of any field has 20 digits, and the time to read a number
grows with the square of its length."""
DEEPEST: Final = 64
"""Levels that a document may have, aliases included; chosen. The deepest objects,
CustomResourceDefinitions, have about 30. Functions that walk a tree take up to three frames of
Python a level, so 64 levels leave four fifths of the default limit of 1000 frames to others."""

_WORDS: Final[dict[str, Any]] = {
    word: value
    for words, value in (
        ("~ null Null NULL", None),
        ("true True TRUE yes Yes YES on On ON", True),
        ("false False FALSE no No NO off Off OFF", False),
    )
    for word in words.split()
}
_WORDS[""] = None
_STARTS_A_NUMBER: Final = frozenset("0123456789+-.")
_INT: Final = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)")
_FLOAT: Final = re.compile(
    r"[-+]?(?:(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|\.(?:inf|Inf|INF))"
    r"|\.(?:nan|NaN|NAN)"
)


class NotYaml(ValueError):
    """The text is not YAML that is read here; the message says what is wrong, and where."""


class _Open:
    """A mapping or a list whose end has not been read yet."""

    __slots__ = ("anchor", "before", "height", "key", "merged", "value")

    def __init__(self, value: dict[Any, Any] | list[Any], anchor: str | None, before: int) -> None:
        self.value = value
        self.anchor = anchor
        self.before = before  # values that were counted before it
        self.height = 1
        self.key: Any = _NO_KEY
        self.merged: list[dict[Any, Any]] = []


_NO_KEY: Final = object()
_MERGE_KEY: Final = object()


class _Known:
    """What an anchor stands for; size: its values with all aliases followed."""

    __slots__ = ("height", "size", "value")

    def __init__(self, value: Any, size: int, height: int) -> None:
        self.value, self.size, self.height = value, size, height


def documents(text: str, *, most_values: int) -> list[Any]:
    """Return the documents of a text as mappings, lists and scalars; raises NotYaml.

    most_values: mappings, lists and scalars of the whole text, counted as often as aliases show
    them. Aliased parts are shared in the result: copy before changing anything.
    """
    try:
        loader = _Loader(text)
        try:
            return _Builder(loader, most_values).read()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise NotYaml(f"{problem or 'not YAML'}{_at(mark)}") from None


def document(text: str, *, most_values: int) -> Any:
    """Return the only document of a text, None when it is empty; raises NotYaml."""
    found = documents(text, most_values=most_values)
    if len(found) > 1:
        raise NotYaml("more than one document (a line of ---)")
    return found[0] if found else None


class _Builder:
    """Puts events together."""

    def __init__(self, loader: Any, most_values: int) -> None:
        self._loader = loader
        self._most_values = most_values
        self._open: list[_Open] = []
        self._known: dict[str, _Known | None] = {}
        self._values = 0
        self._documents: list[Any] = []

    def read(self) -> list[Any]:
        loader = self._loader
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.ScalarEvent):
                self._scalar(event)
            elif isinstance(event, yaml.MappingStartEvent):
                self._begin({}, event)
            elif isinstance(event, yaml.SequenceStartEvent):
                self._begin([], event)
            elif isinstance(event, yaml.CollectionEndEvent):
                self._end(event)
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event)
            elif isinstance(event, yaml.DocumentStartEvent):
                self._known = {}
        return self._documents

    def _scalar(self, event: Any) -> None:
        value = self._scalar_value(event)
        self._count(1, event)
        if event.anchor is not None:
            self._known[event.anchor] = _Known(value, 1, 1)
        self._place(value, 1, event)

    def _scalar_value(self, event: Any) -> Any:
        text: str = event.value
        plain, tag = event.implicit[0], event.tag
        if text == "<<" and plain and self._expects_key():
            return _MERGE_KEY
        if tag is None or tag == "!":
            return _plain(text, event) if plain else text
        if tag == _PREFIX + "str":
            return text
        value = _plain(text, event)
        if _PREFIX + type(value).__name__.replace("NoneType", "null") != tag:
            raise NotYaml(f"{_shown(text)} is no {_shown(tag)}{_at(event.start_mark)}")
        return value

    def _begin(self, value: dict[Any, Any] | list[Any], event: Any) -> None:
        if event.tag is not None and event.tag != "!" and event.tag not in _COLLECTIONS:
            raise NotYaml(f"{_shown(event.tag)} is not read here{_at(event.start_mark)}")
        if self._expects_key():
            raise NotYaml(f"a key has to be text{_at(event.start_mark)}")
        if len(self._open) >= DEEPEST:
            raise NotYaml(f"nested deeper than {DEEPEST} levels{_at(event.start_mark)}")
        self._open.append(_Open(value, event.anchor, self._values))
        self._count(1, event)
        if event.anchor is not None:
            self._known[event.anchor] = None

    def _end(self, event: Any) -> None:
        ended = self._open.pop()
        if isinstance(ended.value, dict) and ended.merged:
            explicit = dict(ended.value)
            ended.value.clear()
            # The first of several mappings wins, and what stands here wins over all.
            for each in reversed(ended.merged):
                ended.value.update(each)
            ended.value.update(explicit)
        if ended.anchor is not None:
            size = self._values - ended.before
            self._known[ended.anchor] = _Known(ended.value, size, ended.height)
        self._place(ended.value, ended.height, event)

    def _alias(self, event: Any) -> None:
        if event.anchor not in self._known:
            raise NotYaml(f"nothing is called {_shown(event.anchor)}{_at(event.start_mark)}")
        known = self._known[event.anchor]
        if known is None:
            raise NotYaml(f"{_shown(event.anchor)} contains itself{_at(event.start_mark)}")
        if len(self._open) + known.height > DEEPEST:
            raise NotYaml(f"nested deeper than {DEEPEST} levels{_at(event.start_mark)}")
        self._count(known.size, event)
        self._place(known.value, known.height, event)

    def _expects_key(self) -> bool:
        if not self._open:
            return False
        top = self._open[-1]
        return isinstance(top.value, dict) and top.key is _NO_KEY

    def _place(self, value: Any, height: int, event: Any) -> None:
        """Put a finished value where it belongs."""
        if not self._open:
            self._documents.append(value)
            return
        top = self._open[-1]
        top.height = max(top.height, height + 1)
        if isinstance(top.value, list):
            top.value.append(value)
        elif top.key is _NO_KEY:
            if isinstance(value, dict | list):
                raise NotYaml(f"a key has to be text{_at(event.start_mark)}")
            if value is not _MERGE_KEY and value in top.value:
                raise NotYaml(f"the key {_shown(value)} stands twice{_at(event.start_mark)}")
            top.key = value
        else:
            if top.key is _MERGE_KEY:
                top.merged += _mappings(value, event)
            else:
                top.value[top.key] = value
            top.key = _NO_KEY

    def _count(self, more: int, event: Any) -> None:
        self._values += more
        if self._values > self._most_values:
            raise NotYaml(f"more than {self._most_values} values{_at(event.start_mark)}")


def _plain(text: str, event: Any) -> Any:
    """Return what an unquoted scalar means."""
    if text in _WORDS:
        return _WORDS[text]
    if text[0] not in _STARTS_A_NUMBER:
        return text
    if len(text) > _LONGEST_NUMBER:
        if _INT.fullmatch(text) or _FLOAT.fullmatch(text):
            raise NotYaml(f"a number of {len(text)} characters{_at(event.start_mark)}")
        return text
    if _INT.fullmatch(text):
        digits = text.replace("_", "")
        octal = re.fullmatch(r"[-+]?0[0-7]+", digits)
        try:
            return int(digits, 8 if octal else 0)
        except ValueError:  # 0x_ and the like
            return text
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _mappings(value: Any, event: Any) -> list[dict[Any, Any]]:
    found = value if isinstance(value, list) else [value]
    if not all(isinstance(each, dict) for each in found):
        raise NotYaml(f"<< takes mappings{_at(event.start_mark)}")
    return found


def _shown(value: object) -> str:
    text = str(value).removeprefix(_PREFIX)
    return ascii(text if len(text) <= 100 else text[:100] + "...")


def _at(mark: Any) -> str:
    return "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
