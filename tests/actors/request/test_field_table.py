"""The table of request fields is complete, and its ranges, options and defaults are those in force."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from modelpool.actors.request.field_table import REQUEST_FIELDS
from modelpool.actors.request.number_fields import Number, Whole
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnusableField, UserError


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "m", "prompt": "", **fields})


def test_every_field_is_in_the_table_with_its_meaning_and_default() -> None:
    assert set(GenerateRequest.model_fields) == set(REQUEST_FIELDS)
    made, schema = request(), GenerateRequest.model_json_schema()["properties"]
    for name, row in REQUEST_FIELDS.items():
        assert schema[name]["description"] == row.meaning
        if not row.is_required:
            assert getattr(made, name) == row.default, name


def test_values_are_accepted_up_to_the_bounds_and_refused_beyond_them() -> None:
    for name, row in REQUEST_FIELDS.items():
        match row.check:
            case Whole(least, most, expected, step):
                good: list[Any] = [least, most, str(least), str(most), float(least), np.int64(least)]
                bad: list[Any] = [least - step, most + step, least + 0.5, f"{least}.5", "many", True, [], math.nan]
                bad += [least + 1] if step > 1 else []
            case Number(least, most, expected, above):
                good = [most, str(most), Decimal(str(most)), np.float32(most), (least + most) / 2]
                good += [] if above else [least]
                bad = [least - 1, most + 1, "many", True, [], math.nan, math.inf] + ([least] if above else [])
            case _:
                continue
        for value in good:
            assert getattr(request(**{name: value}), name) == (
                int(value) if isinstance(row.check, Whole) else float(value)
            ), (name, value)
        for value in bad:
            with pytest.raises(UnusableField) as refused:
                request(**{name: value})
            assert str(refused.value).startswith(f"{name}: found "), (name, value)
            assert expected in str(refused.value), (name, value)


def test_options_have_different_flags_and_parameters() -> None:
    options = [row.option for row in REQUEST_FIELDS.values() if row.option is not None]
    assert len({option.flag for option in options}) == len({option.parameter for option in options}) == len(options)


def test_fields_of_some_models_may_be_options() -> None:
    assert request(options={"motion": 127, "elevation": "10"}) == request(motion=127, elevation=10.0)
    assert request(options={}) == request()
    for options, message in (
        ({"motion": 3000}, "motion: found 3000"),
        ({"moton": 3}, "unknown option 'moton'.*motion"),
        (
            {"twist": 2},
            "unknown option 'twist'.*Options of a run: apg, attention_scale, .*teacache, tiled.*; fields .*motion",
        ),
        ({"steps": 3}, "unknown option 'steps'"),
        (["motion"], "options: found"),
        ({1: 2}, "unknown option '1'"),
    ):
        with pytest.raises(UserError, match=message):
            request(options=options)
    with pytest.raises(UnusableField, match="options: found 'motion'"):
        request(motion=1, options={"motion": 2})
