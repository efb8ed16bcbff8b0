"""Custom nodes of numbers: arithmetic, comparisons, seeds, settings of samplers, sizes by name. Pure.

They are here under their own names, as their public descriptions say. Like the nodes of `comfy_value_nodes`, they are
computed before a workflow is compiled; empty latents are made when it is.
"""

from __future__ import annotations

import math
import operator
import random
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_expressions import number_of
from modelpool.actors.http.comfy.comfy_node_types import (
    ANY,
    MAX_BATCH,
    MAX_SEED,
    MAX_SIDE,
    SAMPLER_NAMES,
    Builder,
    NodeType,
    NodeUnsupported,
    any_of,
    combo,
    flag,
    link,
    number,
    text,
    whole,
)
from modelpool.actors.http.comfy.comfy_pack_texts import passed, row
from modelpool.actors.http.comfy.comfy_values import BlankLatent
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS

_INT, _FLOAT = (-(2**63), 2**64 - 1), (-1e18, 1e18)
#: largest result of an operation, and largest exponent
_MOST, _MOST_EXPONENT = 2.0**64, 256
#: digits of the largest seed
_MOST_DIGITS = 20
#: what one pack of nodes writes behind common names
_LOGIC = "-\U0001f52c"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SIDES = re.compile(r"(\d{2,5})\s*[xX\u00d7]\s*(\d{2,5})")
#: the choice of the sizes that the node itself has
_CUSTOM = "custom"
_COMPARISONS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        **dict.fromkeys(("==", "=", "a == b", "a = b"), operator.eq),
        **dict.fromkeys(("!=", "a != b", "a <> b"), operator.ne),
        **dict.fromkeys(("<", "a < b"), operator.lt),
        **dict.fromkeys(("<=", "a <= b"), operator.le),
        **dict.fromkeys((">", "a > b"), operator.gt),
        **dict.fromkeys((">=", "a >= b"), operator.ge),
        "tt": lambda a, b: True,
        "ff": lambda a, b: False,
    }
)
#: comparisons as another pack names them
_NAMES_OF_RELATIONS: Mapping[str, str] = MappingProxyType(
    {
        "greater-than": ">", "greater-than or equals": ">=", "less-than": "<", "less-than or equals": "<=",
        "equals": "==", "does not equal": "!=",
    }
)  # fmt: skip
_ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        **dict.fromkeys(("add", "+", "Add", "addition"), operator.add),
        **dict.fromkeys(("subtract", "-", "Sub", "subtraction"), operator.sub),
        **dict.fromkeys(("multiply", "*", "Mul", "multiplication"), operator.mul),
        **dict.fromkeys(("divide", "/", "division"), operator.truediv),
        **dict.fromkeys(("//", "FloorDiv", "floor division"), operator.floordiv),
        **dict.fromkeys(("modulo", "%", "Mod", "modulus"), operator.mod),
        **{name: lambda a, b: _power(a, b) for name in ("power", "**", "Pow", "exponentiation")},
        "Max": max,
        "Min": min,
    }
)
#: of the sine and the like in radians
_UNARY: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "Neg": operator.neg, "Inc": lambda value: value + 1, "Dec": lambda value: value - 1, "Abs": abs,
        "Sqr": lambda value: value * value, "Cube": lambda value: value * value * value, "Sqrt": math.sqrt,
        "Sin": math.sin, "Cos": math.cos, "Tan": math.tan, "Floor": math.floor, "Ceil": math.ceil,
    }
)  # fmt: skip
#: more of numbers with fractions: angles in radians, and ComfyUI's names
_FLOAT_UNARY: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {
        **_UNARY, "Round": round, "Trunc": math.trunc, "Asin": math.asin, "Acos": math.acos, "Atan": math.atan,
        "Ln": math.log, "Log10": math.log10, "Log2": math.log2, "Sinh": math.sinh, "Cosh": math.cosh,
        "Tanh": math.tanh, "Asinh": math.asinh, "Acosh": math.acosh, "Atanh": math.atanh, "Exp": math.exp,
        "Expm1": math.expm1, "Erf": math.erf, "Erfc": math.erfc, "Gamma": math.gamma, "Radians": math.radians,
        "Degrees": math.degrees,
    }
)  # fmt: skip
_INT_UNARY: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {**{name: _UNARY[name] for name in ("Abs", "Neg", "Inc", "Dec", "Sqr", "Cube")}, "Not": operator.invert}
)
_BOOLE: Mapping[str, Callable[[bool, bool], bool]] = MappingProxyType(
    {
        "Nor": lambda a, b: not (a or b), "Xor": operator.ne, "Nand": lambda a, b: not (a and b),
        "And": lambda a, b: a and b, "Xnor": operator.eq, "Or": lambda a, b: a or b, "Eq": operator.eq,
        "Neq": operator.ne,
    }
)  # fmt: skip
_RELATIONS: Mapping[str, str] = MappingProxyType(
    {"Eq": "==", "Neq": "!=", "Gt": ">", "Lt": "<", "Geq": ">=", "Leq": "<="}
)
_QUERIES: Mapping[str, Callable[[Any], bool]] = MappingProxyType(
    {
        "IsZero": lambda value: value == 0, "IsNonZero": lambda value: value != 0,
        "IsPositive": lambda value: value > 0, "IsNegative": lambda value: value < 0,
        "IsEven": lambda value: value % 2 == 0, "IsOdd": lambda value: value % 2 == 1,
    }
)  # fmt: skip
#: how a pack rounds the number of a text
_ROUNDINGS: Mapping[str, Callable[[float], int]] = MappingProxyType(
    {"round": round, "round down": math.floor, "round up": math.ceil}
)
#: the side of a square, by the kind of a model
_SIDES_OF_MODELS: Mapping[str, int] = MappingProxyType({"SD": 512, "SDXL": 1024})
_ROUNDED: Mapping[str, Callable[[float], int]] = MappingProxyType(
    {"round": round, "floor": math.floor, "ceil": math.ceil, "ceiling": math.ceil}
)


def _power(base: Any, exponent: Any) -> Any:
    if abs(exponent) > _MOST_EXPONENT:
        raise NodeUnsupported(f"b: found the exponent {exponent:g}, expected up to {_MOST_EXPONENT}")
    return operator.pow(base, exponent)


def _bounded(value: Any) -> Any:
    if isinstance(value, complex) or not abs(value) <= _MOST:
        raise NodeUnsupported("its result is no number up to 2**64")
    return value


def _numbers(given: Mapping[str, Any], *names: str) -> list[Any]:
    """Return inputs that are numbers. Raises NodeUnsupported."""
    found = [given.get(name) for name in names]
    for name, value in zip(names, found, strict=True):
        if not isinstance(value, bool | int | float):
            raise NodeUnsupported(f"{name}: found {str(value)[:100]!r}, expected a number")
    return found


def _computed(how: str, *kinds: type, names: tuple[str, str] = ("a", "b"), whole_division: bool = False) -> Builder:
    """Return what computes a number from two of them, in the types of its outputs: `whole_division` of whole numbers
    cuts the fraction of a quotient off."""

    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        one, other = _numbers(given, *names)
        name = "//" if whole_division and given[how] in ("divide", "Div") else given[how]
        found = _bounded(_ARITHMETIC["/" if name == "Div" else name](one, other))
        return tuple(kind(found) for kind in kinds)

    return build


def _simple(name: str, kind: type) -> Builder:
    """Return what computes a fixed operation."""
    return lambda given: (kind(_bounded(_ARITHMETIC[name](*_numbers(given, "a", "b")))),)


def _compared(how: str) -> Builder:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        one, other = given.get("a"), given.get("b")
        try:
            return (bool(_COMPARISONS[given[how]](one, other)),)
        except TypeError:
            raise NodeUnsupported(f"a, b: found {str(one)[:40]!r} and {str(other)[:40]!r}, expected numbers, or "
                                  "texts") from None  # fmt: skip

    return build


def _by_boole(given: Mapping[str, Any]) -> tuple[Any, ...]:
    one, other = bool(given["bool_a"]), bool(given["bool_b"])
    return ({"and": one and other, "or": one or other, "xor": one is not other}[given["operator"]],)


def _by_operator(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two values are together, as a truth value."""
    one, other = given.get("a"), given.get("b")
    how = given["operator"]
    if how in _COMPARISONS:
        return _compared("operator")(given)
    if how == "not":
        return (not one,)
    return ({"and": bool(one and other), "or": bool(one or other), "xor": bool(one) is not bool(other)}[how],)


def _evaluated(expression: str, names: Mapping[str, str], *kinds: Callable[[Any], Any]) -> Builder:
    """Return what computes the expression of an input, with the numbers of others by their names in it; missing ones
    are not known to it."""

    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        there = {name: _numbers(given, source)[0] for name, source in names.items() if given.get(source) is not None}
        found = number_of(given[expression], there)
        return tuple(kind(found) for kind in kinds)

    return build


def _calculated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    names = {letter: letter for letter in "ab" if given.get(letter) is not None}
    names |= {letter: f"variables.{letter}" for letter in _LETTERS if given.get(f"variables.{letter}") is not None}
    return _evaluated("expression", names, float, int, bool)(given)


def _typed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A number of a type: a whole number, one with a fraction, or 1 or 0."""
    kinds: Mapping[str, Callable[[Any], Any]] = {"integer": int, "float": float, "bool": lambda value: int(value > 0.5)}
    found = kinds[given["number_type"]](given["number"])
    return found, float(found), int(found)


def _operated(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Two numbers together: also compared, as 1 or 0."""
    one, other = _numbers(given, "number_a", "number_b")
    how = given["operation"]
    if how in _NAMES_OF_RELATIONS:
        found: Any = int(_COMPARISONS[_NAMES_OF_RELATIONS[how]](one, other))
    else:
        found = _bounded(_ARITHMETIC[how](one, other))
    return found, float(found), int(found)


def _drawn(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The number that Python's random numbers draw for the seed."""
    least, most = given["minimum"], given["maximum"]
    if least > most:
        raise NodeUnsupported(f"minimum, maximum: found {least:g} and {most:g}, expected the smaller one first")
    numbers = random.Random(given["seed"])
    found: Any
    match given["number_type"]:
        case "integer":
            found = numbers.randint(int(least), int(most))
        case "float":
            found = numbers.uniform(least, most)
        case _:
            found = numbers.random()
    return found, float(found), round(found)


def _cast(name: str, kind: Callable[[Any], Any]) -> Builder:
    return lambda given: (kind(_numbers(given, name)[0]),)


def _number_in(written: str) -> int | float:
    """Return a whole number with all its digits, and another one. Raises ValueError."""
    plain = written.strip()
    digits = plain.removeprefix("-").removeprefix("+")
    return int(plain) if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS else float(plain)


def _parsed(name: str, kind: Callable[[Any], Any]) -> Builder:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        try:
            return (_bounded(kind(_number_in(given[name]))),)
        except (ValueError, OverflowError):
            raise NodeUnsupported(f"{name}: found {given[name][:100]!r}, expected a number") from None

    return build


def _rounded(name: str, how: str) -> Builder:
    return lambda given: (_ROUNDED[given[how]](given[name]),)


def _slid(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (given["Xf"] if given["isfloatX"] else given["Xi"],)


def _slid_twice(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(given[f"{side}f"] if given[f"isfloat{side}"] else given[f"{side}i"] for side in "XY")


def _all(*names: str) -> Builder:
    return lambda given: tuple(given[name] for name in names)


def _twice(name: str) -> Builder:
    return lambda given: (given[name], given[name])


def _sides_of(name: str, found: str) -> tuple[int, int]:
    """Return the sides that a choice names, as in "3:4 portrait 896x1152". Raises NodeUnsupported."""
    sides = _SIDES.findall(found)
    if not sides:
        raise NodeUnsupported(f"{name}: found {found[:100]!r}, expected a name with WIDTHxHEIGHT")
    width, height = sides[-1]
    return int(width), int(height)


def _size_by_name(name: str) -> Builder:
    return lambda given: _sides_of(name, given[name])


def _oriented(given: Mapping[str, Any]) -> tuple[int, int]:
    """The sides of a named size, the longer one first, or, "Vertical", last."""
    short, long = sorted(_sides_of("resolution", given["resolution"]))
    if given["orientation"] not in ("Horizontal", "Vertical"):
        raise NodeUnsupported(f"orientation: found {given['orientation'][:100]!r}, expected Horizontal or Vertical")
    return (long, short) if given["orientation"] == "Horizontal" else (short, long)


def _sides_of_pixels(given: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sides of a ratio, with as many pixels as a kind of model has. Raises NodeUnsupported where the sides
    would be rounded: public descriptions do not say how."""
    if given["model_type"] not in _SIDES_OF_MODELS:
        raise NodeUnsupported(f"model_type: found {given['model_type'][:40]}, expected one of "
                              f"{', '.join(_SIDES_OF_MODELS)}")  # fmt: skip
    wide, high, side = given["aspect_ratio_width"], given["aspect_ratio_height"], _SIDES_OF_MODELS[given["model_type"]]
    width, height = (side * math.sqrt(one / other) for one, other in ((wide, high), (high, wide)))
    if width % 64 or height % 64:
        raise NodeUnsupported(
            f"aspect_ratio_width, aspect_ratio_height: found {wide} and {high}, of which the sides are rounded; "
            "expected 1 and 1, or write a width and a height"
        )
    return int(width), int(height)


def _of_whole_numbers(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an operation is of three whole numbers. Raises NodeUnsupported for quotients: how they are rounded is not
    described."""
    if odd := set(given["op"]) - set("abc+-* "):
        raise NodeUnsupported(f"op: found {''.join(sorted(odd))[:40]!r} in it, expected a, b and c with +, - and *")
    return _evaluated("op", {name: name for name in "abc"}, int)(given)


def _changed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    (value,) = _numbers(given, "a")
    return (_bounded(_UNARY[given["op"]](value)),)


def _with_one(operations: Mapping[str, Callable[[Any], Any]], kind: type) -> Builder:
    """Return what changes one number."""

    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        (value,) = _numbers(given, "a")
        try:
            return (kind(_bounded(operations[given["op"]](value))),)
        except ValueError:
            raise NodeUnsupported(f"a: found {value:g}, expected a number that {given['op']} has") from None

    return build


def _related(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (bool(_COMPARISONS[_RELATIONS[given["op"]]](*_numbers(given, "a", "b"))),)


def _asked(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (bool(_QUERIES[given["op"]](*_numbers(given, "a"))),)


def _text_to_numbers(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The number of a text, rounded and as it is, and an empty text of help."""
    how = given["round_integer"]
    if how not in _ROUNDINGS:
        raise NodeUnsupported(f"round_integer: found {how[:40]!r}, expected one of {', '.join(_ROUNDINGS)}")
    (found,) = _parsed("text", float)(given)
    return _ROUNDINGS[how](found), found, ""


def _one_of_numbers(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The first number if the third one is 1, else the second."""
    one, other, which = _numbers(given, "number_a", "number_b", "boolean_number")
    found = one if which == 1 else other
    return found, float(found), int(found)


def _number_by_comparison(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Whether two numbers are related, as 1 or 0; or the one of both that this chooses."""
    if given["comparison"] not in _NAMES_OF_RELATIONS:
        expected = ", ".join(_NAMES_OF_RELATIONS)
        raise NodeUnsupported(f"comparison: found {given['comparison'][:40]!r}, expected one of {expected}")
    one, other = _numbers(given, "number_a", "number_b")
    holds = _COMPARISONS[_NAMES_OF_RELATIONS[given["comparison"]]](one, other)
    found = int(holds) if given["return_boolean"] == "true" else one if holds else other
    return found, float(found), int(found)


def _sides_of_ratio(given: Mapping[str, Any]) -> tuple[int, int]:
    """The sides of a named ratio, or the node's own."""
    if given["aspectRatio"].strip().lower() == _CUSTOM:
        return given["width"], given["height"]
    return _sides_of("aspectRatio", given["aspectRatio"])


def _in_cells(width: int, height: int, count: int) -> BlankLatent:
    if min(width, height) < 8:
        raise NodeUnsupported(f"width, height: found {width}x{height}, expected at least 8x8")
    return BlankLatent(width // 8 * 8, height // 8 * 8, count)


def _ratio(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The sides of a named ratio, or the node's own; turned round; times a scale; what else is passed on; and empty
    latents."""
    own = given["aspect_ratio"].strip().lower() == _CUSTOM
    width, height = (given["width"], given["height"]) if own else _sides_of("aspect_ratio", given["aspect_ratio"])
    if given["swap_dimensions"] == "On":
        width, height = height, width
    scale = given.get("prescale_factor")
    passed_on = [given["upscale_factor"]]
    if scale is not None:
        width, height = int(width * scale), int(height * scale)
        passed_on.append(scale)
    count = given["batch_size"]
    return width, height, *passed_on, count, _in_cells(width, height, count), ""


def _picked(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Empty latents of a named size, of which a side may be another."""
    sides = _sides_of("resolution", given["resolution"])
    width, height = (
        own or side for own, side in zip((given["width_override"], given["height_override"]), sides, strict=True)
    )
    return _in_cells(width, height, given["batch_size"]), width, height


def _preset(given: Mapping[str, Any]) -> tuple[Any, ...]:
    width, height = _sides_of("dimensions", given["dimensions"])
    if given["invert"]:
        width, height = height, width
    return _in_cells(width, height, given["batch_size"]), width, height


def _of_two_values(name: str) -> Builder:
    return lambda given: (float(_bounded(_ARITHMETIC[name](given["Value_A"], given["Value_B"]))),)


_A_B_INT = tuple(whole(name, 0, *_INT) for name in "ab")
_A_B_FLOAT = tuple(number(name, 0.0, *_FLOAT) for name in "ab")
_SAMPLER_NAME = text("sampler_name", "euler", choices=SAMPLER_NAMES)
_SEED = whole("seed", 0, 0, MAX_SEED)
_OPERATIONS = ("add", "subtract", "multiply", "divide", "modulo", "power")
_COMPARED = ("==", "!=", "<", "<=", ">", ">=")
_IMPACT = (
    row("ImpactInt", (whole("value", 0, *_INT),), passed("value"), "INT"),
    row("ImpactFloat", (number("value", 1.0, *_FLOAT),), passed("value"), "FLOAT"),
    row("ImpactBoolean", (flag("value"),), passed("value"), "BOOLEAN"),
    row(
        "ImpactCompare",
        (
            combo("cmp", ("a = b", "a <> b", "a > b", "a < b", "a >= b", "a <= b", "tt", "ff")),
            link("a", ANY),
            link("b", ANY),
        ),
        _compared("cmp"),
        "BOOLEAN",
    ),
    row(
        "ImpactLogicalOperators",
        (combo("operator", ("and", "or", "xor")), flag("bool_a"), flag("bool_b")),
        _by_boole,
        "BOOLEAN",
    ),
    row("ImpactNeg", (flag("value"),), lambda given: (not given["value"],), "BOOLEAN"),
    row(
        "ImpactMinMax",
        (flag("mode", True), *any_of("a", "b")),
        lambda given: ((max if given["mode"] else min)(*_numbers(given, "a", "b")),),
        "INT",
    ),
)
_EASY = (
    row("easy seed", (_SEED,), passed("seed"), "INT"),
    row(
        "easy mathInt",
        (*_A_B_INT, combo("operation", _OPERATIONS)),
        _computed("operation", int, whole_division=True),
        "INT",
    ),
    row("easy mathFloat", (*_A_B_FLOAT, combo("operation", _OPERATIONS)), _computed("operation", float), "FLOAT"),
    row(
        "easy compare",
        (*any_of("a", "b"), combo("comparison", ("a == b", "a != b", "a < b", "a > b", "a <= b", "a >= b"))),
        _compared("comparison"),
        "BOOLEAN",
    ),
    row(
        "easy simpleMath",
        (text("value"), *any_of("a", "b", "c")),
        _evaluated("value", {name: name for name in "abc"}, round, float, bool),
        *("INT", "FLOAT", "BOOLEAN"),
    ),
)
_ESSENTIALS = (
    row("SimpleMathInt+", (whole("value", 0, *_INT),), passed("value"), "INT"),
    row("SimpleMathFloat+", (number("value", 0.0, *_FLOAT),), passed("value"), "FLOAT"),
    row(
        "SimpleMathBoolean+",
        (flag("value"),),
        lambda given: (given["value"], int(given["value"])),
        "BOOLEAN",
        "INT",
    ),
    row("SimpleComparison+", (*any_of("a", "b"), combo("comparison", _COMPARED)), _compared("comparison"), "BOOLEAN"),
)
_KJ = (
    row("BOOLConstant", (flag("value", True),), passed("value"), "BOOLEAN"),
    row(
        "SimpleCalculatorKJ",
        (text("expression", "a + b"), *any_of("a", "b", *(f"variables.{letter}" for letter in _LETTERS))),
        _calculated,
        *("FLOAT", "INT", "BOOLEAN"),
    ),
    row(
        "FL_FloatToInt",
        (number("float_value", 0.0, *_FLOAT), combo("rounding_method", ("round", "floor", "ceil"))),
        _rounded("float_value", "rounding_method"),
        "INT",
    ),
)
_JW = (
    row("JWIntegerToFloat", (whole("value", 0, *_INT),), _cast("value", float), "FLOAT"),
    row("JWIntegerToString", (whole("value", 0, *_INT),), lambda given: (str(given["value"]),), "STRING"),
    row("JWFloatToString", (number("value", 0.0, *_FLOAT),), lambda given: (str(given["value"]),), "STRING"),
    row("JWStringToInteger", (text("text", "0"),), _parsed("text", int), "INT"),
    row("JWStringToFloat", (text("text", "0"),), _parsed("text", float), "FLOAT"),
    row(
        "JWFloatToInteger",
        (number("value", 0.0, *_FLOAT), combo("mode", ("round", "floor", "ceiling"))),
        _rounded("value", "mode"),
        "INT",
    ),
    *(
        row(
            f"JW{kind}{name}",
            inputs,
            _simple(operation, float if name == "Div" else of),
            "FLOAT" if name == "Div" else made,
        )
        for kind, inputs, of, made in (
            ("Integer", _A_B_INT, int, "INT"),
            ("Float", _A_B_FLOAT, float, "FLOAT"),
        )
        for name, operation in (("Add", "+"), ("Sub", "-"), ("Mul", "*"), ("Div", "/"), ("Max", "Max"), ("Min", "Min"))
    ),
)
_MATH = (
    row("CM_FloatToInt", (number("a", 0.0, *_FLOAT),), _cast("a", int), "INT"),
    row("CM_IntToFloat", (whole("a", 0, *_INT),), _cast("a", float), "FLOAT"),
    row(
        "CM_IntBinaryOperation",
        (combo("op", ("Add", "Sub", "Mul", "Div", "Mod", "Pow")), *_A_B_INT),
        _computed("op", int, whole_division=True),
        "INT",
    ),
    row(
        "CM_FloatBinaryOperation",
        (combo("op", ("Add", "Sub", "Mul", "Div", "Mod", "Pow", "FloorDiv", "Max", "Min")), *_A_B_FLOAT),
        _computed("op", float),
        "FLOAT",
    ),
    *(
        row(f"CM_{name}", (given,), _cast("a", kind), output)
        for name, given, kind, output in (
            ("IntToNumber", whole("a", 0, *_INT), int, ANY),
            ("FloatToNumber", number("a", 0.0, *_FLOAT), float, ANY),
            ("NumberToInt", link("a", ANY), int, "INT"),
            ("NumberToFloat", link("a", ANY), float, "FLOAT"),
        )
    ),
    row(
        "CM_NumberBinaryOperation",
        (combo("op", ("Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow")), link("a", ANY), link("b", ANY)),
        lambda given: (
            _bounded(_ARITHMETIC["/" if given["op"] == "Div" else given["op"]](*_numbers(given, "a", "b"))),
        ),
        ANY,
    ),
    row(
        "CM_IntUnaryOperation",
        (combo("op", tuple(_INT_UNARY)), whole("a", 0, *_INT)),
        _with_one(_INT_UNARY, int),
        "INT",
    ),
    row(
        "CM_FloatUnaryOperation",
        (combo("op", tuple(_FLOAT_UNARY)), number("a", 0.0, *_FLOAT)),
        _with_one(_FLOAT_UNARY, float),
        "FLOAT",
    ),
    *(
        row(f"CM_{name}BinaryCondition", (combo("op", tuple(_RELATIONS)), *inputs), _related, "BOOLEAN")
        for name, inputs in (("Int", _A_B_INT), ("Float", _A_B_FLOAT), ("Number", any_of("a", "b")))
    ),
    row("CM_IntUnaryCondition", (combo("op", tuple(_QUERIES)), whole("a", 0, *_INT)), _asked, "BOOLEAN"),
    *(
        row(f"CM_{name}UnaryCondition", (combo("op", tuple(_QUERIES)[:4]), given), _asked, "BOOLEAN")
        for name, given in (("Float", number("a", 0.0, *_FLOAT)), ("Number", link("a", ANY)))
    ),
    row("CM_BoolUnaryOperation", (combo("op", ("Not",)), flag("a")), lambda given: (not given["a"],), "BOOLEAN"),
    row(
        "CM_BoolBinaryOperation",
        (combo("op", tuple(_BOOLE)), flag("a"), flag("b")),
        lambda given: (bool(_BOOLE[given["op"]](given["a"], given["b"])),),
        "BOOLEAN",
    ),
    row("CM_BoolToInt", (flag("a"),), lambda given: (int(given["a"]),), "INT"),
    row("CM_IntToBool", (whole("a", 0, *_INT),), lambda given: (given["a"] != 0,), "BOOLEAN"),
    row("Integer", (whole("Value", 1, *_INT),), passed("Value"), "INT"),
    row("Int to float", (whole("Value", 1, *_INT),), _cast("Value", float), "FLOAT"),
    *(
        row(name, tuple(number(f"Value_{letter}", 1.0, *_FLOAT) for letter in "AB"), _of_two_values(operation), "FLOAT")
        for name, operation in (("Sum", "+"), ("Subtract", "-"), ("Multiply", "*"), ("Divide", "/"))
    ),
    row("CM_NumberUnaryOperation", (combo("op", tuple(_UNARY)), link("a", ANY)), _changed, ANY),
    row(
        "SeargeIntegerMath",
        (
            text("op", "a * b + c"),
            *(whole(name, default, *_INT) for name, default in (("a", 0), ("b", 1), ("c", 0))),
        ),
        _of_whole_numbers,
        "INT",
    ),
    row("floatToInt _O", (number("float", 0.0, *_FLOAT),), _cast("float", int), "INT"),
    row("mxSeed", (_SEED,), passed("seed"), "INT"),
    row(
        "mxSlider",
        (whole("Xi", 20, *_INT), number("Xf", 20.0, *_FLOAT), whole("isfloatX", 0, 0, 1)),
        _slid,
        ANY,
    ),
    row(
        "mxSlider2D",
        (
            whole("Xi", 512, *_INT),
            number("Xf", 512.0, *_FLOAT),
            whole("Yi", 512, *_INT),
            number("Yf", 512.0, *_FLOAT),
            whole("isfloatX", 0, 0, 1),
            whole("isfloatY", 0, 0, 1),
        ),
        _slid_twice,
        ANY,
        ANY,
    ),
    *(
        row(f"{name}{ending}", (text("Number", "0"),), _parsed("Number", kind), name.upper())
        for ending in ("", _LOGIC)
        for name, kind in (("Int", int), ("Float", float))
    ),
    row("DF_Integer", (whole("Value", 1, *_INT),), passed("Value"), "INT"),
    row("DF_Float", (number("Value", 1.0, *_FLOAT),), passed("Value"), "FLOAT"),
    row("intToFloat _O", (whole("int", 0, *_INT),), _cast("int", float), "FLOAT"),
    *(
        row(
            f"Evaluate {kind}",
            (text("python_expression"), text("print_to_console", "False", False), *inputs),
            _evaluated("python_expression", {name: name for name in "abc"}, int, float, str),
            *("INT", "FLOAT", "STRING"),
        )
        for kind, inputs in (
            ("Integers", tuple(whole(name, 0, *_INT, False) for name in "abc")),
            ("Floats", tuple(number(name, 0.0, *_FLOAT, False) for name in "abc")),
        )
    ),
)
_COMFYROLL = (
    row(
        "CR Value",
        (number("value", 1.0, *_FLOAT),),
        lambda given: (given["value"], int(given["value"]), ""),
        *("FLOAT", "INT", "STRING"),
    ),
    row(
        "CR Float To Integer",
        (number("_float", 1.0, *_FLOAT),),
        lambda given: (int(given["_float"]), ""),
        *("INT", "STRING"),
    ),
    row(
        "CR Integer Multiple",
        (whole("integer", 1, *_INT), number("multiple", 8.0, 0.0, 1e9)),
        lambda given: (int(_bounded(given["integer"] * given["multiple"])), ""),
        *("INT", "STRING"),
    ),
    row(
        "CR Set Value On Boolean",
        (flag("boolean"), number("value_if_true", 1.0, *_FLOAT), number("value_if_false", 0.0, *_FLOAT)),
        lambda given: _value_of_both(given["value_if_true" if given["boolean"] else "value_if_false"]),
        *("INT", "FLOAT", "STRING"),
    ),
    row(
        "CR String To Number",
        (text("text", "0"), text("round_integer", "round")),
        _text_to_numbers,
        *("INT", "FLOAT", "STRING"),
    ),
    row(
        "CR Image Size",
        (*(whole(name, 512, 64, 8192) for name in ("width", "height")), number("upscale_factor", 1.0, 1.0, 2000.0)),
        lambda given: (*_all("width", "height", "upscale_factor")(given), ""),
        *("INT", "INT", "FLOAT", "STRING"),
    ),
)


def _value_of_both(value: float) -> tuple[Any, ...]:
    return int(value), float(value), ""


def _ratio_row(name: str, has_scale: bool) -> NodeType:
    scale = (number("prescale_factor", 1.0, 0.1, 8.0),) if has_scale else ()
    return row(
        name,
        (
            *(whole(side, 1024, 64, 8192) for side in ("width", "height")),
            text("aspect_ratio", _CUSTOM),
            combo("swap_dimensions", ("Off", "On")),
            number("upscale_factor", 1.0, 0.1, 100.0),
            *scale,
            whole("batch_size", 1, 1, MAX_BATCH),
        ),
        _ratio,
        *("INT", "INT", "FLOAT", *(("FLOAT",) if has_scale else ()), "INT", "LATENT", "STRING"),
    )


_SIZES = (
    _ratio_row("CR SDXL Aspect Ratio", has_scale=False),
    _ratio_row("CR SD1.5 Aspect Ratio", has_scale=False),
    _ratio_row("CR Aspect Ratio", has_scale=True),
    _ratio_row("CR Aspect Ratio Social Media", has_scale=True),
    row(
        "SDXLEmptyLatentSizePicker+",
        (
            text("resolution", "1024x1024 (1.0)"),
            whole("batch_size", 1, 1, MAX_BATCH),
            *(whole(f"{side}_override", 0, 0, MAX_SIDE) for side in ("width", "height")),
        ),
        _picked,
        *("LATENT", "INT", "INT"),
    ),
    row(
        "EmptyLatentImagePresets",
        (text("dimensions", "512 x 512 (1:1)"), flag("invert"), whole("batch_size", 1, 1, MAX_BATCH)),
        _preset,
        *("LATENT", "INT", "INT"),
    ),
    row(
        "AspectSize",
        (combo("model_type", ("SD", "SDXL", "Cascade")),
         *(whole(f"aspect_ratio_{side}", 1, 1, 10_000) for side in ("width", "height"))),
        _sides_of_pixels,
        *("INT", "INT"),
    ),
    row("SDXLResolutionPresets", (text("resolution", "Square (1024x1024)"), text("orientation", "Horizontal")),
        _oriented, "INT", "INT"),
    row(
        "SDXLAspectRatio",
        (*(whole(side, 1024, 64, 8192) for side in ("width", "height")), text("aspectRatio", _CUSTOM)),
        _sides_of_ratio,
        *("INT", "INT"),
    ),
    row("SDXL Resolutions (JPS)", (text("resolution", "square - 1024x1024 (1:1)"),), _size_by_name("resolution"),
        "INT", "INT"),
    row("CM_SDXLResolution", (text("resolution", "1024x1024"),), _size_by_name("resolution"), "INT", "INT"),
)  # fmt: skip
_LAYERS = (
    row("LayerUtility: Integer", (whole("int_value", 0, *_INT),), passed("int_value"), "INT"),
    row("LayerUtility: Float", (number("float_value", 0.0, *_FLOAT),), passed("float_value"), "FLOAT"),
    row("LayerUtility: Boolean", (flag("bool_value", True),), passed("bool_value"), "BOOLEAN"),
    row("LayerUtility: Seed", (_SEED,), passed("seed"), "INT"),
    row(
        "LayerUtility: NumberCalculator",
        (link("a", ANY), link("b", ANY), combo("operator", ("+", "-", "*", "/", "**", "//", "%"))),
        _computed("operator", int, float),
        *("INT", "FLOAT"),
    ),
    row(
        "LayerUtility: BooleanOperator",
        (link("a", ANY), link("b", ANY), combo("operator", ("==", "!=", "and", "or", "xor", "not"))),
        _by_operator,
        "BOOLEAN",
    ),
    row("Primitive integer [Crystools]", (whole("int", 1, *_INT),), passed("int"), "INT"),
    row("Primitive float [Crystools]", (number("float", 1.0, *_FLOAT),), passed("float"), "FLOAT"),
    row("Primitive boolean [Crystools]", (flag("boolean", True),), passed("boolean"), "BOOLEAN"),
)
_WAS = (
    row("Seed", (_SEED,), lambda given: (given["seed"], given["seed"], float(given["seed"]), given["seed"]),
        ANY, ANY, "FLOAT", "INT"),
    row(
        "Constant Number",
        (combo("number_type", ("integer", "float", "bool")), number("number", 0.0, *_FLOAT)),
        _typed,
        *(ANY, "FLOAT", "INT"),
    ),
    row(
        "Random Number",
        (combo("number_type", ("integer", "float", "bool")), number("minimum", 0.0, *_FLOAT),
         number("maximum", 0.0, *_FLOAT), _SEED),
        _drawn,
        *(ANY, "FLOAT", "INT"),
    ),
    row(
        "Number Operation",
        (
            link("number_a", ANY), link("number_b", ANY),
            combo("operation", ("addition", "subtraction", "division", "floor division", "multiplication",
                                "exponentiation", "modulus", "greater-than", "greater-than or equals", "less-than",
                                "less-than or equals", "equals", "does not equal")),
        ),
        _operated,
        *(ANY, "FLOAT", "INT"),
    ),
    # its outputs were (number, whole number) before there were four: each is 0 or 1
    row("Logic Boolean", (number("boolean_number", 1.0, 0.0, 1.0),),
        lambda given: (int(given["boolean_number"] > 0.5),) * 4, *(ANY,) * 4),
    row("Number Input Switch", tuple(link(name, ANY) for name in ("number_a", "number_b", "boolean_number")),
        _one_of_numbers, *(ANY, "FLOAT", "INT")),
    row("Number Input Condition", (link("number_a", ANY), link("number_b", ANY),
                                   combo("return_boolean", ("false", "true")), text("comparison", "greater-than")),
        _number_by_comparison, *(ANY, "FLOAT", "INT")),
    row("Debug Number to Console", (link("number", ANY), text("label", "Debug to Console", False)), passed("number"),
        ANY),
    row("Number to Int", (link("number", ANY),), _cast("number", int), "INT"),
    row("Number to Float", (link("number", ANY),), _cast("number", float), "FLOAT"),
    row("Number to Text", (link("number", ANY),), _cast("number", str), "STRING"),
    row("Text to Number", (text("text"),), _parsed("text", lambda found: int(found) if found == int(found) else found),
        ANY),
)  # fmt: skip
_SETTINGS = (
    row(
        "KSampler Config (rgthree)",
        (
            whole("steps_total", 30, 1, MAX_STEPS),
            whole("refiner_step", 24, 1, MAX_STEPS),
            number("cfg", 8.0, 0.0, 100.0),
            text("sampler_name", "euler", choices=SAMPLER_NAMES),
            text("scheduler", "normal"),
        ),
        _all("steps_total", "refiner_step", "cfg", "sampler_name", "scheduler"),
        *("INT", "INT", "FLOAT", ANY, ANY),
    ),
    row(
        "Input Parameters (Image Saver)",
        (
            _SEED,
            whole("steps", 20, 1, MAX_STEPS),
            number("cfg", 7.0, 0.0, 100.0),
            text("sampler", "euler"),
            text("scheduler", "normal"),
            number("denoise", 1.0, 0.0, 1.0),
        ),
        _all("seed", "steps", "cfg", "sampler", "scheduler", "denoise"),
        *("INT", "INT", "FLOAT", ANY, ANY, "FLOAT"),
    ),
    *(
        row(f"{name}{ending}", (given,), build, *outputs)
        for ending in ("", " (Image Saver)")
        for name, given, build, outputs in (
            ("Sampler Selector", _SAMPLER_NAME, _twice("sampler_name"), (ANY, "STRING")),
            ("Scheduler Selector", text("scheduler", "normal"), _twice("scheduler"), (ANY, "STRING")),
            ("Seed Generator", _SEED, passed("seed"), ("INT",)),
            ("Int Literal", whole("int", 0, *_INT), passed("int"), ("INT",)),
            ("Width/Height Literal", whole("int", 512, *_INT), passed("int"), ("INT",)),
            ("Float Literal", number("float", 1.0, *_FLOAT), passed("float"), ("FLOAT",)),
            ("Cfg Literal", number("cfg", 8.0, 0.0, 100.0), passed("cfg"), ("FLOAT",)),
            ("String Literal", text("string"), passed("string"), ("STRING",)),
        )
    ),
    row("SamplerSelector", (text("sampler", "euler"),), passed("sampler"), ANY),
    row("SchedulerSelector", (text("scheduler", "normal"),), passed("scheduler"), ANY),
    row("ttN seed", (_SEED,), passed("seed"), "INT"),
    row("ttN int", (whole("int", 0, *_INT),), lambda given: (given["int"], float(given["int"]), str(given["int"])),
        *("INT", "FLOAT", "STRING")),
    row("ttN float", (number("float", 0.0, *_FLOAT),),
        lambda given: (given["float"], int(given["float"]), str(given["float"])), *("FLOAT", "INT", "STRING")),
)  # fmt: skip
PACK_NUMBERS = (
    *_IMPACT, *_EASY, *_ESSENTIALS, *_KJ, *_JW, *_MATH, *_COMFYROLL, *_SIZES, *_LAYERS, *_WAS, *_SETTINGS,
)  # fmt: skip
