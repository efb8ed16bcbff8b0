"""Which tensors the part of Qwen 2.5 VL that sees images has: those of its class, each of them, and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.families.detection.qwen_layout import qwen_vision_config
from modelpool.pool.values.core.errors import UnknownArchitecture
from tests.pool.families.tiny_qwen_edit import VISION
from tests.pool.models.components.vision.test_qwen import PUBLISHED, module, shapes

OWN = {key.removeprefix("visual."): shape for key, shape in shapes(VISION).items()}


@pytest.mark.parametrize("config", [PUBLISHED, VISION])
def test_the_tensors_of_its_class_are_taken_and_tell_how_it_is_built(config: dict[str, object]) -> None:
    own = {key.removeprefix("visual."): shape for key, shape in shapes(config).items()}
    found = qwen_vision_config(own)
    assert {key: found[key] for key in config} == config
    assert module(VISION).state_dict().keys() == OWN.keys()


@given(st.sampled_from(sorted(OWN)), st.sampled_from(["left out", "longer", "of more dimensions", "beside"]))
def test_any_tensor_that_is_otherwise_makes_it_another(key: str, how: str) -> None:
    """With its own words, whatever is missing."""
    shape = OWN[key]
    others = {"longer": (*shape[:-1], shape[-1] + 1), "of more dimensions": (*shape, 1), "beside": shape}
    changed = {name: value for name, value in OWN.items() if name != key or how == "beside"}
    if how in others:
        changed[f"{key}_more" if how == "beside" else key] = others[how]
    with pytest.raises(UnknownArchitecture, match=r"^found "):
        qwen_vision_config(changed)


@pytest.mark.parametrize("own", [{}, dict.fromkeys(OWN, ())])
def test_what_has_next_to_nothing_of_it_is_refused(own: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(UnknownArchitecture, match=r"^found no "):
        qwen_vision_config(own)
