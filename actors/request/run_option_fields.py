"""The options of a run in a request's `options`: parsing and validation, by the table of
`pool.values.core.run_options`.

Whether the model's family has an option is checked with the catalog. Torch-free, ray-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import Field, create_model, model_validator

from modelpool.actors.request.bounds import MAX_ENTRIES, check_entries
from modelpool.actors.request.number_fields import Number, Whole, finite_number
from modelpool.actors.request.strict import Strict
from modelpool.pool.models.lora_names.blocks import canonical_block
from modelpool.pool.values.core.errors import unknown_name, unusable_field
from modelpool.pool.values.core.run_options import (
    MAIN_SETTING,
    RUN_OPTIONS,
    AttentionScale,
    BlockScale,
    FrameWindows,
    Limits,
    RotaryPositions,
    RunOption,
    RunOptions,
    limits_of,
)

_MAX_BLOCKS = 200
_BLOCKS = "factors by block, such as IN04*0.5,MID*0 or D07*0.5"
_ON, _OFF = frozenset({"on", "true", "yes"}), frozenset({"off", "false", "no"})
_FORMS = 'on, off, a number, or its settings by name, such as {"pag": {"scale": 3}}'


class _Settings(Strict):
    """The settings of one option. Accepts a mapping; values are checked by the table."""

    @model_validator(mode="before")
    @classmethod
    def _by_table(cls, values: Any) -> Any:
        name = cls.__name__
        limits = limits_of(RUN_OPTIONS[name])
        for setting in values:
            if setting not in limits:
                raise unknown_name(f"setting of options.{name}", str(setting), limits)
        return {key: _checked(f"options.{name}.{key}", value, limits[key]) for key, value in values.items()}


@cache
def _model_of(name: str) -> type[_Settings]:
    settings: dict[str, Any] = {key: (Any, Field(None)) for key in limits_of(RUN_OPTIONS[name])}
    return create_model(name, __base__=_Settings, **settings)


def parse_run_options(value: Any) -> RunOptions | None:
    """Return the options in `value`, a mapping by name; None if all are off. A name may be "pag.scale".

    Raises UserError naming the option, the setting, the value found and the value expected.
    """
    if value is None or isinstance(value, RunOptions):
        return None if value is None or value.is_empty else value
    if not isinstance(value, Mapping):
        raise unusable_field("options", value, _FORMS)
    check_entries("options", value, MAX_ENTRIES)
    found: dict[str, Any] = dict(_options(_nested(value)))
    return RunOptions(**found) if found else None


def is_run_option(name: object) -> bool:
    """Whether `name` is an option of a run, or a setting of one with a dot."""
    return isinstance(name, str) and name.partition(".")[0] in RUN_OPTIONS


def _nested(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the options with those named "pag.scale" joined to mappings."""
    found: dict[str, Any] = {}
    for full_name, given in value.items():
        name, dot, setting = str(full_name).partition(".")
        if name not in RUN_OPTIONS:
            raise unknown_name("option", name, RUN_OPTIONS)
        if not dot:
            found[name] = given if name not in found else _joined(name, given, found[name])
        else:
            found[name] = _joined(name, found.get(name), {setting: given})
    return found


def _joined(name: str, one: Any, other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of both; `one` may be a short form that switches the option on."""
    settings = _settings(name, one)
    if one is not None and settings is None:
        raise unusable_field(f"options.{name}", one, f"on, together with {name}.{next(iter(other))}")
    if twice := sorted((settings or {}).keys() & other.keys()):
        raise unusable_field(f"options.{name}", twice[0], f"{twice[0]} once")
    return {**(settings or {}), **other}


def _options(values: Mapping[str, Any]) -> Iterator[tuple[str, RunOption]]:
    for name, value in values.items():
        settings = _settings(name, value)
        if settings is not None:
            parsed = _model_of(name)(**settings)
            kind = RUN_OPTIONS[name]
            option = kind(**{key: getattr(parsed, key) for key in parsed.model_fields_set})
            _check_acts(name, option)
            yield name, option


def _settings(name: str, value: Any) -> dict[str, Any] | None:
    """Return the settings that `value` gives to an option; None if it is off."""
    if value is None or value is False or (isinstance(value, str) and value.lower() in _OFF):
        return None
    if value is True or (isinstance(value, str) and value.lower() in _ON):
        return {}
    if isinstance(value, Mapping):
        return {str(key): each for key, each in value.items()}
    if isinstance(value, RUN_OPTIONS[name]):
        return {key: getattr(value, key) for key in limits_of(RUN_OPTIONS[name])}
    if finite_number(value) is not None and name in MAIN_SETTING:
        return {MAIN_SETTING[name]: value}
    raise unusable_field(f"options.{name}", value, _FORMS)


def _checked(field: str, value: Any, limits: Limits) -> Any:
    match limits.kind:
        case "number":
            return Number(limits.least, limits.most).parse(field, value)
        case "whole":
            return Whole(int(limits.least), int(limits.most)).parse(field, value)
        case "name":
            if value not in limits.names:
                raise unusable_field(field, value, " or ".join(limits.names))
            return value
        case "blocks":
            return _block_factors(field, value, Number(limits.least, limits.most))
        case "wholes":
            listed = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
            listed = [listed] if isinstance(listed, int) and not isinstance(listed, bool) else listed
            check_entries(field, listed, MAX_ENTRIES)
            if not isinstance(listed, list | tuple):
                raise unusable_field(field, value, "whole numbers, such as [7, 8, 9]")
            one = Whole(int(limits.least), int(limits.most))
            return tuple(sorted({one.parse(field, each) for each in listed}))


def _block_factors(field: str, value: Any, factor: Number) -> tuple[tuple[str, float], ...]:
    """Return factors by block, sorted by name, from a mapping, pairs, or text such as "IN04*0.5,MID*0"."""
    pairs = value
    if isinstance(value, str):
        pairs = [word.split("*") for word in value.split(",", _MAX_BLOCKS) if word.strip()]
    elif isinstance(value, Mapping):
        pairs = list(value.items())
    if not isinstance(pairs, list | tuple) or len(pairs) > _MAX_BLOCKS:
        raise unusable_field(field, value, _BLOCKS)
    found: dict[str, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise unusable_field(field, pair, _BLOCKS)
        name = canonical_block(pair[0])
        found[name] = factor.parse(f"{field} {name}", pair[1])
    return tuple(sorted(found.items()))


def _check_acts(name: str, option: RunOption) -> None:
    """Raise UnusableField for an option that acts in no step or changes nothing, and for tiles that do not advance."""
    start, end = getattr(option, "start", 0.0), getattr(option, "end", 1.0)
    if start >= end:
        raise unusable_field(f"options.{name}.end", end, f"a number above start, {start:g}")
    size = "length" if isinstance(option, FrameWindows) else "tile"
    overlap, most = getattr(option, "overlap", 0), getattr(option, size, 1)
    if overlap >= most:
        raise unusable_field(f"options.{name}.overlap", overlap, f"less than {size}, {most}")
    if isinstance(option, FrameWindows):
        _check_windows(name, option)
    if isinstance(option, AttentionScale) and not (option.image or option.text):
        raise unusable_field(f"options.{name}", "no blocks", f"factors by block, such as {name}.image=IN04*0.5")
    if isinstance(option, BlockScale) and not option.blocks:
        raise unusable_field(f"options.{name}", "no blocks", f"factors by block, such as {name}.blocks=D07*0.5")
    if name == "slg" and not (getattr(option, "layers", ()) or getattr(option, "single", ())):
        raise unusable_field("options.slg.layers", (), "at least one block in layers or single")
    if isinstance(option, RotaryPositions) and option.is_plain:
        raise unusable_field(
            f"options.{name}", "the positions of the model", "a scale or a shift, such as rope.scale_x=0.5"
        )


def _check_windows(name: str, option: FrameWindows) -> None:
    """Raise UnusableField for settings of another schedule."""
    if option.stride > 1 and not option.schedule.endswith("uniform"):
        raise unusable_field(f"options.{name}.stride", option.stride, f"1: windows are {option.schedule}")
    if option.closed and option.schedule != "looped_uniform":
        raise unusable_field(f"options.{name}.closed", option.closed, f"0: windows are {option.schedule}")
