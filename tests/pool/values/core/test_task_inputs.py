"""Inputs are read by name: another name, or another kind of result, is an error and never another image."""

from __future__ import annotations

import numpy as np
import pytest

from modelpool.pool.values.core.stage_params import Encoded, Latent, Mask
from modelpool.pool.values.core.task_inputs import TaskInputs, WrongInputs

PROMPT, NEGATIVE = (Encoded(np.full((2, 3), value, np.float32)) for value in (1.0, 2.0))
START, MASK = Latent(np.zeros((4, 2, 2), np.float32)), Mask(np.zeros((16, 16), np.uint8))


def test_inputs_are_found_by_name_in_any_order() -> None:
    for names, results in (
        (("positive", "negative", "start"), (PROMPT, NEGATIVE, START)),
        (("start", "negative", "positive"), (START, NEGATIVE, PROMPT)),
    ):
        inputs = TaskInputs.named(names, results)
        assert inputs.read("positive", Encoded) is PROMPT
        assert inputs.read("negative", Encoded) is NEGATIVE
        assert inputs.read("start", Latent) is START
        assert set(inputs) == set(names)


def test_inputs_that_changed_places_are_an_error_that_names_both() -> None:
    swapped = TaskInputs.named(("start", "mask"), (MASK, START))
    with pytest.raises(WrongInputs, match=r"'start': found TaskInputs\(start: Mask, mask: Latent\), expected Latent"):
        swapped.read("start", Latent)


def test_a_missing_or_repeated_name_is_an_error() -> None:
    with pytest.raises(WrongInputs, match="'negative'"):
        TaskInputs({"positive": PROMPT}).read("negative", Encoded)
    for names in (("positive",), ("positive", "positive"), ("positive", "negative", "start")):
        with pytest.raises(WrongInputs, match="expected positive"):
            TaskInputs.named(names, (PROMPT, NEGATIVE))


def test_numbered_inputs_come_in_their_order() -> None:
    latents = [Latent(np.full((1, 1, 1), number, np.float32)) for number in range(12)]
    inputs = TaskInputs({f"reference.{number}": latent for number, latent in reversed(list(enumerate(latents)))})
    assert inputs.read_all("reference", Latent) == tuple(latents)
    assert inputs.read_all("control", Latent) == ()
