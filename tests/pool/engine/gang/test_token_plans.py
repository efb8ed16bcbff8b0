"""Each plan gives, on members that divide the tokens of one call of the model, what one worker computes; and each of
its entries is needed. Members are threads: real processes are in `test_gang_runs`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from modelpool.pool.engine.gang.sequence_split import modules_at
from modelpool.pool.families.definitions import defined_families
from modelpool.pool.values.core.sequence_plan import SequencePlan, Split, SplitAttention
from modelpool.pool.values.specs.spec import Role
from tests.pool.engine.gang.gang_threads import in_threads
from tests.pool.families import test_seen_wan as seen_wan
from tests.pool.families import test_wan_vace as wan_vace
from tests.pool.families.definitions import (
    test_allegro,
    test_bria,
    test_cogvideox,
    test_cogview3_plus,
    test_cogview4,
    test_ernie_image,
    test_glm_image,
    test_joyimage,
    test_kandinsky5_image,
    test_kandinsky5_video,
    test_kandinsky6,
    test_krea2,
    test_longcat_image,
    test_ltx2,
    test_omnigen2,
    test_ovis_image,
    test_wan_animate,
)
from tests.pool.families.test_videos_from_images import KEPT
from tests.pool.families.tiny_llava import LEADING_CELL
from tests.pool.families.tiny_relatives import ALL_FAMILIES
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import TinyFamily

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")

#: of the largest value
TOLERANCE = 1e-5
WIDTH, HEIGHT, FRAMES = 96, 64, 5
DEGREES = (2, 4)
#: more words than the share of a member
LONG = {"prompt": "a small red cat on the moon " * 20}


def _video(seed: int, side: int = 0, frames: int = FRAMES) -> Any:
    """No frame is like another."""
    shape = (frames, side or HEIGHT, side or WIDTH, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _image(seed: int) -> Image.Image:
    return Image.fromarray(_video(seed)[0])


@dataclass(frozen=True, eq=False)
class Case:
    """A tiny model, and its request beside a prompt."""

    tiny: TinyFamily
    more: Mapping[str, Any] = field(default_factory=dict)


def _cases() -> Iterator[tuple[str, Case]]:
    plain = (
        "flux_dev", "flux2", "qwen_image", "z_image", "sd3", "sd35_medium", "chroma", "lumina2", "auraflow",
        "pixart_sigma", "pixart_alpha", "hunyuan_dit", "hunyuan_dit_1", "hunyuan_image_21", "cosmos2_t2i", "wan_t2v",
        "hunyuan_video", "hunyuan_video_15", "ltxv", "mochi", "cosmos_t2v",
    )  # fmt: skip
    for name in plain:
        yield name, Case(ALL_FAMILIES[name], LONG if name == "mochi" else {})
    modules = (
        test_allegro, test_bria, test_cogvideox, test_cogview3_plus, test_cogview4, test_ernie_image, test_glm_image,
        test_joyimage, test_kandinsky5_image, test_kandinsky5_video, test_kandinsky6, test_krea2, test_longcat_image,
        test_ovis_image,
    )  # fmt: skip
    for module in modules:
        for name, compared in module.CASES.items():
            if name != "cogview4_control":  # refused: it follows an image
                yield name, Case(compared.tiny)
    begun = {"image": _image(1)}
    beginning = {
        "cosmos_i2v": ALL_FAMILIES["cosmos_i2v"],
        "cosmos2_i2v": ALL_FAMILIES["cosmos2_i2v"],
        "cogvideox_i2v": test_cogvideox.READING["cogvideox_i2v"].tiny,
        "cogvideox_15_i2v": test_cogvideox.READING["cogvideox_15_i2v"].tiny,
        "kandinsky6": test_kandinsky6.CASES["kandinsky6"].tiny,
        "hunyuan_video_i2v": LEADING_CELL,
        "wan21_i2v": seen_wan.ONE,
        "wan22_ti2v": KEPT,
        "ltxv": ALL_FAMILIES["ltxv"],
        "ltx2": test_ltx2.SOUNDING,
    }
    for name, tiny in beginning.items():
        yield f"{name} from an image", Case(tiny, begun)
    for name in ("text alone", "all"):
        yield f"wan_vace, {name}", Case(wan_vace.VACE, wan_vace.CALLS[name][0])
    face = {"video": _video(1), "face_video": _video(3, 512), "reference": _image(2)}
    yield "wan22_animate", Case(test_wan_animate.TINY, face)
    yield "omnigen2", Case(test_omnigen2.TINY, {"reference": [_image(5), _image(6)]})
    yield "wan21_fun_control", Case(seen_wan.FOLLOWING, {**begun, "video": _video(4)})
    yield (
        "cogvideox_fun_control",
        Case(test_cogvideox.FOLLOWING["cogvideox_fun_control"].tiny, {"video": _video(4, frames=9)}),
    )


CASES = dict(_cases())


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a model, with one text as in a gang, and its result."""

    module: nn.Module
    plan: SequencePlan
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    def of(self, module: nn.Module) -> Any:
        """The result of `module` in place of the model."""
        return module(*self.args, **self.kwargs)


@contextmanager
def called(case: Case, folder: Path) -> Iterator[Call]:
    """The first call of the model in a run."""
    model = TinyFamilyModel(folder, case.tiny)
    module, plan = model.module(Role.DIFFUSION_MODEL), model.family.sampling.sequence
    assert plan is not None, model.family.name
    found: list[Call] = []

    def keep(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        found.append(Call(module, plan, args, kwargs, result))

    hook = module.register_forward_hook(keep, with_kwargs=True)
    video = model.family.sampling.video
    frames = (
        {} if video is None else {"frames": len(case.more["video"]) if "video" in case.more else 1 + video.multiple}
    )
    width, height = case.tiny.sides
    model.made(**{"width": width, "height": height, **frames, "steps": 1, "seed": 3, "cfg": 1.0, **case.more})
    hook.remove()
    try:
        yield found[0]
    finally:
        model.close()


def difference(call: Call, plan: SequencePlan, members: int) -> float:
    """How far the results of members are from one worker's result, of the largest value. They are equal."""
    expected = list(_tensors(call.result))
    each = [list(_tensors(result)) for result in in_threads(call.module, plan, members, call.of)]
    worst = 0.0
    for own in each:
        for found, first, wanted in zip(own, each[0], expected, strict=True):
            assert torch.equal(found, first), "members differ"
            assert found.shape == wanted.shape
            worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    return worst


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (dict, list, tuple)):
        for each in result.values() if isinstance(result, dict) else result:
            yield from _tensors(each)


def cut_by(call: Call) -> set[Split]:
    """The entries that split tokens in the call: some inputs are for all tokens, or not given."""
    cut: set[Split] = set()

    def look(split: Split, module: nn.Module, args: Any, kwargs: Any) -> None:
        argument, _, place = split.argument.partition(".")
        given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments.get(argument)
        for each in _tensors(given[int(place)] if place and given is not None else given):
            if each.dim() != split.whole and split.dims in (0, each.dim()) and each.shape[split.dim] > 1:
                cut.add(split)

    hooks = [
        each.register_forward_pre_hook(partial(look, split), with_kwargs=True)
        for split in call.plan.splits
        for each in modules_at(call.module, split.module)
    ]
    with torch.inference_mode():
        call.of(call.module)
    for hook in hooks:
        hook.remove()
    return cut


def without_each(plan: SequencePlan) -> Iterator[tuple[Any, SequencePlan]]:
    """The plan without each of its entries."""
    for name in ("splits", "gathers", "attention", "undivided"):
        entries = getattr(plan, name)
        for entry in entries:
            others: dict[str, Any] = {name: tuple(each for each in entries if each is not entry)}
            yield entry, replace(plan, **others)


@pytest.mark.rotates
@pytest.mark.parametrize("name", CASES)
def test_members_that_divide_tokens_compute_what_one_worker_does(name: str, tmp_path: Path) -> None:
    """And without any entry of the plan, a call fails or has another result: no entry is there for nothing. Without one
    of attention it fails: that was noticed by this test alone."""
    with called(CASES[name], tmp_path) as call:
        for degree in DEGREES:
            assert difference(call, call.plan, degree) < TOLERANCE, degree
        cut = cut_by(call)
        for entry, forgetful in without_each(call.plan):
            if isinstance(entry, Split) and entry not in cut:
                continue
            try:
                found = difference(call, forgetful, 2)
            except (ValueError, RuntimeError, IndexError, AssertionError):
                continue
            assert found > 10 * TOLERANCE, f"not needed: {entry}"
            assert not isinstance(entry, SplitAttention), f"another image without an error, without {entry}"


def test_every_plan_is_tried_on_every_architecture_that_it_is_for() -> None:
    families = {family.name: family for family in defined_families()}
    tried = {
        (id(family.sampling.sequence), family.module)
        for family in (families[case.tiny.name] for case in CASES.values())
    }
    for family in families.values():
        plan = family.sampling.sequence
        assert plan is None or (id(plan), family.module) in tried, family.name
