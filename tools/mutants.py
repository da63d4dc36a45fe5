"""Small faults that a program could have, as edits of its source.

`sites` reads one module and returns, for each place that can be wrong, the faults that can be
planted there. A mutant is the module with one of them. What no test can be asked to notice is
left out: docstrings, annotations, decorators, log calls, texts for people, assertions for the type
checker.
"""

from __future__ import annotations

import ast
import bisect
import copy
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# What a comparison becomes: its neighbour at the boundary, then its opposite.
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
# Functions and methods that are easily taken for each other.
_TWINS = {
    one: other
    for pair in (
        ("min", "max"),
        ("any", "all"),
        ("floor", "ceil"),
        ("startswith", "endswith"),
        ("removeprefix", "removesuffix"),
        ("lstrip", "rstrip"),
        ("add", "discard"),
        ("append", "remove"),
        ("items", "values"),
        ("union", "intersection"),
    )
    for one, other in (pair, pair[::-1])
}
_LOGGERS = frozenset({"log", "_log", "_LOG", "logger", "_logger", "logging", "warnings"})
# Calls whose arguments serve the type checker or a reader.
_FOR_READERS = frozenset({"cast", "TypeVar", "NewType", "ParamSpec", "overload", "print"})
# Arguments that are texts for people, for argparse and the like.
_TEXTS = frozenset({"description", "epilog", "help", "metavar", "usage"})
# `zip(..., strict=True)` asserts that the lengths are equal.
_ASSERTING = frozenset({"strict"})
# Functions, also numpy's, for which the order of the arguments makes no difference.
_SYMMETRIC = frozenset({"min", "max", "minimum", "maximum"})


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """One fault: the bytes from `start` to `end` of a module become `text`."""

    start: int
    end: int
    text: str
    kind: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a module, and the faults that can be planted there (at least one)."""

    line: int
    edits: tuple[Edit, ...]


def sites(source: bytes) -> list[Site]:
    """Return the places of a module that can be wrong, in the order of the source.

    An edit is only a candidate until `is_a_change` has looked at it. Raises SyntaxError.
    """
    finder = _Finder(_line_offsets(source))
    found = [Site(line, tuple(edits)) for line, edits in finder.find(ast.parse(source))]
    return sorted(found, key=lambda site: (site.line, site.edits))


def is_a_change(source: bytes, edit: Edit) -> bool:
    """True if the edited module compiles and means something else than the original."""
    edited = edit.apply(source)
    try:
        compile(edited, "<mutant>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return ast.dump(ast.parse(edited)) != ast.dump(ast.parse(source))


def diff(path: str, source: bytes, edit: Edit) -> str:
    """Return the edit as a unified diff with one line of context."""
    before = source.decode().splitlines(keepends=True)
    after = edit.apply(source).decode().splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, path, f"{path} ({edit.kind})", n=1))


def _line_offsets(source: bytes) -> list[int]:
    """Return where each line begins, in bytes; ast counts columns in bytes of UTF-8 too."""
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets


def _unparsed(node: ast.expr) -> str:
    """Return the source of an expression that may stand wherever the original one stood."""
    text = ast.unparse(node)
    closed = isinstance(node, (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript))
    return text if closed else f"({text})"


@dataclass(frozen=True)
class _Finder:
    """Walks one module. `find` yields a line number and the edits of one site at a time."""

    offsets: Sequence[int]

    def find(self, node: ast.AST, *, within: bool = False) -> Iterator[tuple[int, list[Edit]]]:
        """Look at `node` and below. within: inside a function, not at import time."""
        if _is_for_readers(node):
            return
        if isinstance(node, ast.ExceptHandler):
            edits = self._reraised(node)
        else:
            edits = [*self._edits(node, within=within)]
        if edits:
            yield self._line(edits[0]), edits
        for child in _parts(node):
            yield from self.find(child, within=within or isinstance(node, _FUNCTIONS))

    def _edits(self, node: ast.AST, *, within: bool) -> Iterator[Edit]:
        for kind, maker in _MAKERS.get(type(node), ()):
            for made in maker(node, within):
                if isinstance(made, str):
                    assert isinstance(node, ast.stmt)
                    yield Edit(*self._span(node), made, kind)
                else:
                    part, changed = made
                    yield Edit(*self._span(part), _unparsed(changed), kind)

    def _reraised(self, node: ast.ExceptHandler) -> list[Edit]:
        first, last = node.body[0], node.body[-1]
        if isinstance(first, ast.Raise):
            return []
        start, _ = self._span(first)
        _, end = self._span(last)
        return [Edit(start, end, "raise", "exception not caught")]

    def _line(self, edit: Edit) -> int:
        return bisect.bisect_right(self.offsets, edit.start)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.offsets[node.lineno - 1] + node.col_offset
        return start, self.offsets[node.end_lineno - 1] + node.end_col_offset


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _is_for_readers(node: ast.AST) -> bool:
    """True for what documents, checks types, or logs: no test needs to notice a fault there."""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring, or `...`
            return True
        case ast.Expr(value=ast.Call(func=function)) if _is_logging(function):
            return True
        case ast.Call(func=ast.Name(id=name)) if name in _FOR_READERS:
            return True
        case ast.keyword(arg=name) if name in _TEXTS | _ASSERTING:
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("__"):
            return True
        case ast.ClassDef(bases=bases) if any(ast.unparse(one) == "Protocol" for one in bases):
            return True
    return False


def _is_logging(function: ast.expr) -> bool:
    return (
        isinstance(function, ast.Attribute)
        and ast.unparse(function.value).split(".")[-1] in _LOGGERS
    )


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node that are looked at: no annotations, decorators and class keywords."""
    left_out = {"annotation", "returns", "decorator_list", "type_params"}
    if isinstance(node, ast.ClassDef):
        left_out |= {"bases", "keywords"}
    for name, value in ast.iter_fields(node):
        if name in left_out:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


# What a maker gives: the text of a statement, or a part of the node and what replaces that part.
_Made = str | tuple[ast.expr, ast.expr]
_Maker = Callable[[ast.AST, bool], Iterator[_Made]]
_MAKERS: dict[type[ast.AST], list[tuple[str, _Maker]]] = {}


def _plants(kind: str, *types: type[ast.AST]) -> Callable[[_Maker], _Maker]:
    """Declare that a maker plants faults of one kind at nodes of these types."""

    def declared(maker: _Maker) -> _Maker:
        for one in types:
            _MAKERS.setdefault(one, []).append((kind, maker))
        return maker

    return declared


@_plants("comparison", ast.Compare)
def _comparison(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, ast.Compare)
    for index, operator in enumerate(node.ops):
        for other in _COMPARISONS[type(operator)]:
            changed = copy.deepcopy(node)
            changed.ops[index] = other()
            yield node, changed


@_plants("and/or", ast.BoolOp)
def _connective(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, ast.BoolOp)
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield node, ast.BoolOp(other, node.values)


@_plants("condition left out", ast.BoolOp)
def _condition_left_out(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, ast.BoolOp)
    for index in range(len(node.values)):
        rest = [*node.values[:index], *node.values[index + 1 :]]
        yield node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)


@_plants("not", ast.UnaryOp)
def _negation(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, ast.UnaryOp)
    if isinstance(node.op, (ast.Not, ast.USub)):
        yield node, node.operand


@_plants("condition negated", ast.If, ast.While, ast.IfExp)
def _negated_condition(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, (ast.If, ast.While, ast.IfExp))
    # Comparisons and connectives have faults of their own; `while True` negated only never runs.
    if not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)


@_plants("filter left out", ast.comprehension)
def _unfiltered(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, ast.comprehension)
    for condition in node.ifs:
        yield condition, ast.Constant(True)


@_plants("constant", ast.Constant)
def _constant(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, ast.Constant)
    match node.value:
        case bool(value):
            yield node, ast.Constant(not value)
        case int(value) | float(value):
            yield node, ast.Constant(value + 1)
            yield node, ast.Constant(value - 1)
        case str(value) if _is_a_key(value):
            yield node, ast.Constant(value + "X")
        case bytes(value) if _is_a_key(value):
            yield node, ast.Constant(value + b"X")


def _is_a_key(value: str | bytes) -> bool:
    """True for a key, a path or a name; a text with blanks is taken as written for people."""
    return len(value) > 0 and len(value.split()) == 1


@_plants("arithmetic", ast.BinOp, ast.AugAssign)
def _arithmetic(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, (ast.BinOp, ast.AugAssign))
    other = _ARITHMETIC.get(type(node.op))
    # Text is joined and formatted with the same operators, and at import time `|` joins types:
    # such a fault ends in a TypeError that any test sees.
    if other is None or not within:
        return
    if isinstance(node, ast.AugAssign):
        if not _is_text(node.value):
            yield ast.unparse(ast.AugAssign(node.target, other(), node.value))
    elif not (_is_text(node.left) or _is_text(node.right)):
        yield node, ast.BinOp(node.left, other(), node.right)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )


@_plants("result", ast.Return)
def _result(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, ast.Return)
    match node.value:
        case None:
            yield "pass"
        case ast.Constant(value=None | bool()):
            return
        case _:
            yield "return None"


@_plants("statement left out", ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise)
def _statement_left_out(node: ast.AST, within: bool) -> Iterator[_Made]:
    match node:
        case ast.Assign(targets=targets) if not any(
            isinstance(one, (ast.Attribute, ast.Subscript)) for one in targets
        ):
            return  # the name would be missing, which any test sees
        case ast.Expr(value=ast.Yield() | ast.YieldFrom()):
            return  # the function would be another kind of function
    yield "pass"


@_plants("loop", ast.Break, ast.Continue)
def _loop(node: ast.AST, within: bool) -> Iterator[_Made]:
    yield "continue" if isinstance(node, ast.Break) else "break"


@_plants("arguments swapped", ast.Call)
def _swapped(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, ast.Call)
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _SYMMETRIC:
            return
    plain = [not isinstance(one, ast.Starred) for one in node.args]
    for index in range(len(node.args) - 1):
        if all(plain[: index + 2]):
            arguments = [*node.args]
            arguments[index], arguments[index + 1] = arguments[index + 1], arguments[index]
            yield node, ast.Call(node.func, arguments, node.keywords)


@_plants("argument left out", ast.Call)
def _argument_left_out(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, ast.Call)
    for index, one in enumerate(node.keywords):
        if one.arg in _TEXTS | _ASSERTING:
            continue
        rest = [*node.keywords[:index], *node.keywords[index + 1 :]]
        yield node, ast.Call(node.func, node.args, rest)


@_plants("other function", ast.Call)
def _other_function(node: ast.AST, within: bool) -> Iterator[_Made]:
    assert isinstance(node, ast.Call)
    match node.func:
        case ast.Name(id=name) if name in _TWINS:
            yield node.func, ast.Name(_TWINS[name])
        case ast.Attribute(value=value, attr=name) if name in _TWINS:
            yield node.func, ast.Attribute(value, _TWINS[name])
