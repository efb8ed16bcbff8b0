"""Computes arithmetic expressions of nodes: numbers, names, + - * / // % **, comparisons, and a few functions.

Nothing of Python but its grammar is used: names, calls and sizes are bounded, so that an expression of a caller takes
microseconds. Pure.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from modelpool.actors.http.comfy.comfy_node_types import NodeUnsupported
from modelpool.pool.values.core.errors import counted

Number: TypeAlias = int | float
MAX_CHARACTERS = 400
#: largest number, also between two steps; largest exponent
_MOST, _MOST_EXPONENT = 2.0**64, 256
#: digits to which a number is rounded
_MOST_DIGITS = 20
_OPERATORS: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
        ast.Pow: operator.pow,
        ast.BitAnd: operator.and_,
        ast.BitOr: operator.or_,
        ast.BitXor: operator.xor,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.Eq: operator.eq,
        ast.NotEq: operator.ne,
    }
)
_SIGNS: Mapping[type[ast.AST], Callable[[Any], Any]] = MappingProxyType(
    {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: lambda value: int(not value)}
)
FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "abs": abs,
        "ceil": math.ceil,
        "floor": math.floor,
        "int": int,
        "float": float,
        "max": max,
        "min": min,
        "round": lambda value, digits=0: _rounded(value, digits),
        "sqrt": math.sqrt,
        "sum": lambda *values: sum(values),
        "pow": lambda base, exponent: _power(base, exponent),
        "log": math.log,
        "log2": math.log2,
        "log10": math.log10,
        "sin": math.sin,
        "cos": math.cos,
        "tan": math.tan,
        "iif": lambda condition, one, other: one if condition else other,
    }
)


def number_of(expression: str, names: Mapping[str, Number], values: Sequence[Number] = ()) -> Number:
    """Return the value of an expression with these names; "values" as the argument of a function stands for all of
    `values`. Raises NodeUnsupported naming what it does not know, and ArithmeticError for a quotient by 0 and for
    numbers above 2**64."""
    if len(expression) > MAX_CHARACTERS:
        found = counted(len(expression), "character")
        raise NodeUnsupported(f"expression: found {found}, expected up to {MAX_CHARACTERS}")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body, names, values)
    except (SyntaxError, RecursionError, MemoryError, TypeError, ValueError) as problem:
        if isinstance(problem, NodeUnsupported):
            raise
        raise NodeUnsupported(f"expression: found {expression[:100]!r}, expected arithmetic") from None


def _value(node: ast.AST, names: Mapping[str, Number], values: Sequence[Number]) -> Number:
    def value_of(part: ast.AST) -> Number:
        return _value(part, names, values)

    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            return _bounded(value)
        case ast.Name(id=name):
            if name not in names:
                known = ", ".join(names) or "no names"
                raise NodeUnsupported(f"expression: found the name {name[:40]}, expected {known}")
            return _bounded(names[name])
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _bounded(_SIGNS[type(sign)](value_of(operand)))
        case ast.BinOp(left=left, op=how, right=right) if type(how) in _OPERATORS:
            one, other = value_of(left), value_of(right)
            if isinstance(how, ast.Pow):
                return _power(one, other)
            return _bounded(_OPERATORS[type(how)](one, other))
        case ast.Compare(left=left, ops=[how], comparators=[right]) if type(how) in _OPERATORS:
            return int(_OPERATORS[type(how)](value_of(left), value_of(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            listed = [values if _is_listed(each, names) else (value_of(each),) for each in arguments]
            return _bounded(FUNCTIONS[name](*(each for part in listed for each in part)))
        case ast.IfExp(test=test, body=one, orelse=other):
            return value_of(one if value_of(test) else other)
        case ast.BoolOp(op=how, values=parts):
            found = value_of(parts[0])
            for part in parts[1:]:
                found = value_of(part) if bool(found) is isinstance(how, ast.And) else found
            return found
    known = ", ".join(FUNCTIONS)
    raise NodeUnsupported(f"expression: found {type(node).__name__}, expected numbers, names, operators, and {known}")


def _is_listed(node: ast.AST, names: Mapping[str, Number]) -> bool:
    """Whether an argument stands for all values."""
    return isinstance(node, ast.Name) and node.id == "values" and node.id not in names


def _power(base: Number, exponent: Number) -> Number:
    if abs(exponent) > _MOST_EXPONENT:
        raise NodeUnsupported(f"expression: found the exponent {exponent:g}, expected up to {_MOST_EXPONENT}")
    return _bounded(operator.pow(base, exponent))


def _rounded(value: Number, digits: Any) -> Number:
    """Return a number rounded to digits behind the point; before it if they are negative: of very many, the power of
    ten alone would take hours."""
    if abs(digits) > _MOST_DIGITS:
        raise NodeUnsupported(f"expression: found {digits:g} digits, expected up to {_MOST_DIGITS}")
    return round(value, digits) if digits else round(value)


def _bounded(value: Any) -> Number:
    if not isinstance(value, int | float) or not abs(value) <= _MOST:
        raise OverflowError("above 2**64")
    return value
