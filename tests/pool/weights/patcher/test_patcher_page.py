"""docs/explanation/patcher.md agrees with the code: all names in its right-hand columns exist, all builders are on
it."""

from __future__ import annotations

import re
from pathlib import Path

from modelpool.pool.weights.options.callbacks import CallbackPoint
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.transformer_options import RopeOptions, TransformerOptions
from modelpool.pool.weights.options.wrappers import WrapperPoint
from modelpool.pool.weights.patcher import comfy_patches as keyed_patches
from modelpool.pool.weights.patcher import hooked_run, hooks, keyframes, model_patcher
from modelpool.pool.weights.patcher import patched_weight_cache as cache
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, PatcherState, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm

PAGE = (Path(__file__).parents[4] / "docs" / "explanation" / "patcher.md").read_text(encoding="ascii")
OWNERS = (
    ModelPatcher, PatcherState, ModelOptions, TransformerOptions, keyed_patches, model_patcher,
    hooks, keyframes, hooked_run, cache,
)  # fmt: skip
VALUES = {c.__name__ for c in (RopeOptions, WeightsTarget, WeightForm, WrapperPoint, CallbackPoint)}
#: builders whose left-hand side has no name of its own in ComfyUI, or that the prose shows
SHOWN_ELSEWHERE = {"with_options", "with_transformer", "with_dit_attention_addition", "with_dit_block_addition"}


def ours() -> set[str]:
    """The names that the page calls in a cell of ours: `name(` or `something.name(`."""
    cells = [cell for line in PAGE.splitlines() if line.startswith("| `") for cell in line.split("|")[2:]]
    return {name for cell in cells for name in re.findall(r"(\w+)\(", " ".join(re.findall(r"`([^`]+)`", cell)))}


def test_every_name_of_ours_exists() -> None:
    unknown = {n for n in ours() - VALUES if not any(hasattr(owner, n) for owner in OWNERS)}
    assert unknown - {"on_model_patcher_clone"} == set()
    assert len(ours()) > 30


def test_every_builder_is_on_the_page() -> None:
    builders = {n for c in (ModelOptions, TransformerOptions, PatcherState) for n in vars(c) if n.startswith("with_")}
    assert builders - ours() - SHOWN_ELSEWHERE - {"with_middle_block_patch"} == set()
    assert all(f"{name}(" in PAGE for name in builders)
