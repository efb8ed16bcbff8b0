"""Reasons for lost workers, as Ray words them, on one line."""

from __future__ import annotations

from ray.exceptions import RayActorError, RayError

from modelpool.actors.ray.ray_losses import _REASON_CHARACTERS, short_reason


def test_ids_and_colours_are_left_out() -> None:
    text = "The actor died.\n\tclass_name: X\n\tactor_id: 12\n\x1b[36mray::X.__init__()\x1b[39m failed"
    assert short_reason(RayError(text)) == "The actor died. ray::X.__init__() failed"


def test_the_last_line_of_a_long_traceback_is_kept() -> None:
    """It was cut after 400 characters: of a node without a package, only Ray's introduction was left."""
    last = "ModuleNotFoundError: No module named 'diffusers'"
    text = "The actor died because of an error in its creation task\n" + "  File x, line 1\n" * 200 + last
    reason = short_reason(RayError(text))
    assert reason.startswith("The actor died because")
    assert reason.endswith(last)
    assert len(reason) < _REASON_CHARACTERS + 10


def test_short_reasons_are_complete() -> None:
    assert short_reason(RayActorError()) == " ".join(str(RayActorError()).split())
