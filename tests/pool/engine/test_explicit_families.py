"""Explicit control of every family that runs: what the guide documents is the pool's own result, or a refusal that
names the call and the family; never another error.

Uses the tiny models of `tests.pool.families`. Each is opened once, and all failures are reported together.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool import LoadedModel, UserError, load_checkpoint
from modelpool.pool.families.control_video_models import takes_control_video
from modelpool.pool.families.supported import running_families
from modelpool.pool.values.core.stage_params import Encoded, ImagePixels, Latent, PixelArray, VideoFrames
from tests.pool.families import test_transformers_saved as saved
from tests.pool.families.conftest import uncounted as uncounted
from tests.pool.families.definitions.in_tables import modules_with_tests
from tests.pool.families.test_unet_families import CASES as UNETS
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_shown import SHOWN_LAYOUTS, SHOWN_TENSORS
from tests.pool.families.tiny_transformers import TinyFamily
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

pytestmark = [pytest.mark.usefixtures("uncounted"), pytest.mark.filterwarnings("ignore")]

#: writes the file "tiny.safetensors" of a family, and its tokenizers, to a folder
Write = Callable[[Path], None]

AUDIO, IMAGE, VIDEO = "generates audio", "reads an image besides the text", "follows a control video"
#: the families that `sample` and `generate` refuse, and why; and all that read a control video (`_why_refused`)
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("stable_audio_1", "stable_audio_3", "ace_step_15"), AUDIO),
    **dict.fromkeys(("kandinsky6", "kandinsky6_distilled", "ltx2"), "generates videos with an audio track"),
    **dict.fromkeys(("flux_fill", "flux_control", "cogview4_control", "qwen_image_layered"), IMAGE),
    "hunyuan_image_21_refiner": IMAGE,
    **dict.fromkeys(("wan22_i2v", "cogvideox_i2v", "cogvideox_15_i2v"), IMAGE),
    **dict.fromkeys(("sd1_inpaint", "sd2_inpaint", "sdxl_inpaint", *SHOWN_LAYOUTS), IMAGE),
}
#: of the test of all families, for several processes
PARTS = 20
#: the encoder of these writes tokens of the image: only `generate` knows its size and seed
WRITES = frozenset({"glm_image"})
#: the tables of positions of these tiny models end before their native size, by which partial moves are planned
SHORT_TABLES = frozenset({"cosmos_t2v", "cosmos_i2v", "omnigen"})
#: what differs: UNets; no guidance, distilled guidance, several states of a text, tokens that are written; a video
TYPICAL = ("sdxl", "z_image", "flux_dev", "hunyuan_dit", "glm_image", "ltxv", "flux_fill")


def test_typical_families_are_controlled_as_the_guide_says(tmp_path: Path) -> None:
    """Found: `sample` raised AttributeError for every transformer, and so did `generate`."""
    assert not list(_failures({name: write for name, write in _families().items() if name in TYPICAL}, tmp_path))


@pytest.mark.slow
@pytest.mark.rotates
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family_is_controlled_as_the_guide_says_or_refused_by_name(part: int, tmp_path: Path) -> None:
    others = sorted(_families().keys() - set(TYPICAL))[part::PARTS]
    assert not list(_failures({name: _families()[name] for name in others}, tmp_path))


def test_most_families_have_a_tiny_model_here() -> None:
    """The others need a vision encoder, two experts or two stages beside it, and have tests of their own."""
    missing = running_families().keys() - _families().keys()
    assert len(missing) <= 30, sorted(missing)
    assert _families().keys() >= REFUSED.keys() | WRITES | set(TYPICAL)


def _why_refused(name: str) -> str:
    return VIDEO if takes_control_video(running_families()[name].sampling) else REFUSED.get(name, "")


@cache
def _families() -> dict[str, Write]:
    """How the tiny file of each family is written, by its name."""
    transformers: dict[str, TinyFamily] = {**saved.FAMILIES}
    for name in sorted(modules_with_tests()):
        module = importlib.import_module(f"tests.pool.families.definitions.test_{name}")
        values = [each for table in vars(module).values() if isinstance(table, dict) for each in table.values()]
        tiny = (getattr(each, "tiny", each) for each in (*values, *vars(module).values()))
        transformers |= {each.name: each for each in tiny if hasattr(each, "encoders") and hasattr(each, "file")}
    unets: dict[str, tuple[Any, Mapping[str, Tensor]]] = {
        case.family.name: (case.layout, case.tensors) for name, case in UNETS.items() if name == case.family.name
    }
    unets |= {name: (layout, SHOWN_TENSORS.get(name, {})) for name, layout in SHOWN_LAYOUTS.items()}
    return {
        **{name: _unet(layout, tensors) for name, (layout, tensors) in unets.items()},
        **{name: _transformer(family) for name, family in transformers.items()},
    }


@cache
def _lora_names() -> dict[str, tuple[str, str]]:
    """A weight of each family under its published name, and the form of the names in LoRA files."""
    names: dict[str, tuple[str, str]] = {**saved.LORAS}
    for name in sorted(modules_with_tests()):
        names |= getattr(importlib.import_module(f"tests.pool.families.definitions.test_{name}"), "LORAS", {})
    return names


def _transformer(family: TinyFamily) -> Write:
    def write(folder: Path) -> None:
        save_file(family.file(), folder / "tiny.safetensors")
        write_tokenizers(folder, family)

    return write


def _unet(layout: Any, tensors: Mapping[str, Tensor]) -> Write:
    def write(folder: Path) -> None:
        path = write_tiny_checkpoint(folder / "tiny.safetensors", dtype=torch.float32, layout=layout())
        save_file({**load_file(path), **tensors}, path)

    return write


def _failures(families: Mapping[str, Write], folder: Path) -> Iterator[str]:
    for name, write in families.items():
        own = folder / name
        own.mkdir()
        write(own)
        try:
            with load_checkpoint(own / "tiny.safetensors", device="cpu") as model:
                check = _check_refused if _why_refused(name) else _check_runs
                check(name, model, own)
        except Exception as error:  # each is a failure of this family, whatever it is
            yield f"{name}: {type(error).__name__}: {error}"
        (own / "tiny.safetensors").unlink()


def _check_refused(name: str, model: LoadedModel, folder: Path) -> None:
    text = Encoded(np.zeros((4, 32), np.float32))
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: model.generate("a b", steps=1),
        "sample": lambda: model.sample(text, text, steps=1),
    }
    for call, run in calls.items():
        with pytest.raises(UserError, match=f"^{call}: model 'tiny' ") as refused:
            run()
        assert running_families()[name].title in str(refused.value)
        assert _why_refused(name) in str(refused.value)
    if _why_refused(name) == AUDIO:  # its text encoders read the length, too
        with pytest.raises(UserError, match=r"^encode: model 'tiny' .* generates audio"):
            model.encode("a b")
    else:
        assert isinstance(model.encode("a b"), Encoded)
    assert model.to_gpu() >= 0
    assert model.to_cpu() >= 0


def _check_runs(name: str, model: LoadedModel, folder: Path) -> None:
    size = _small_size(model)
    fields = {**size, "steps": 2, "seed": 7}
    expected = _of_the_pool(folder, fields)
    generated = model.generate("a b", **fields)
    assert np.array_equal(generated, expected), "generate is not what the pool makes"
    if name in WRITES:
        with pytest.raises(UserError, match=r"^encode: model 'tiny' .* which encode\(\.\.\.\) .* generate"):
            model.encode("a b")
        return
    prompt, facts = model.encode("a b"), model._defaults.sampling
    own = "" if facts.defaults is None else facts.defaults.negative
    latent = model.sample(prompt, model.encode(own, is_negative=True), **fields)
    assert np.array_equal(model.decode(latent), generated), "the stages are not what generate makes"
    fields["steps"] = 1  # what follows compares single passes
    unguided = model.sample(prompt, cfg=1.0, **fields)
    assert np.isfinite(unguided.samples_CHW).all()
    with pytest.raises(UserError, match=r"^prompt: found 'a text 5 wide"):
        model.sample(Encoded(np.zeros((4, 5), np.float32)), cfg=1.0, **fields)
    with pytest.raises(UserError, match=r"^latent: found \(3, 2\)"):
        model.decode(Latent(np.zeros((3, 2), np.float32)))
    with pytest.raises(UserError, match=r"^width: found 7, expected a multiple of"):
        model.generate("a b", width=7)
    assert model.native_size[0] > 0
    _check_lora(name, model, folder, prompt, unguided, fields)
    _check_moves(model, prompt, unguided, fields, moves_parts=name not in SHORT_TABLES)


def _check_lora(
    name: str, model: LoadedModel, folder: Path, prompt: Encoded, expected: Latent, fields: Mapping[str, Any]
) -> None:
    """A LoRA changes the latent until it is removed."""
    loras = _lora_names()
    if name not in loras:
        return
    weight, form = loras[name]
    with safe_open(folder / "tiny.safetensors", "pt") as file:
        (key,) = [key for key in file.keys() if key.endswith(f"model.{weight}.weight")]  # noqa: SIM118
        rows, columns = file.get_slice(key).get_shape()
    base, path, drawn = form.format(weight), folder / "some.safetensors", torch.Generator().manual_seed(3)
    up, down = torch.randn(rows, 2, generator=drawn), torch.randn(2, columns, generator=drawn)
    save_file({f"{base}.lora_B.weight": up, f"{base}.lora_A.weight": down}, path)
    assert model.diffusion_model.add_lora(path, 0.5) > 0
    changed = model.sample(prompt, cfg=1.0, **fields)
    assert not np.allclose(changed.samples_CHW, expected.samples_CHW, atol=1e-4), "the LoRA changes nothing"
    model.diffusion_model.remove_loras()
    again = model.sample(prompt, cfg=1.0, **fields)
    assert np.array_equal(again.samples_CHW, expected.samples_CHW)


def _check_moves(
    model: LoadedModel, prompt: Encoded, expected: Latent, fields: Mapping[str, Any], moves_parts: bool
) -> None:
    """The latent does not depend on what is resident; the patcher's clone is the same model."""
    unet = model.diffusion_model
    assert model.to_gpu() == model.used_bytes() == sum(each.size_bytes for each in model.components)
    assert not moves_parts or unet.partially_unload(1) > 0
    assert np.array_equal(model.sample(prompt, cfg=1.0, **fields).samples_CHW, expected.samples_CHW)
    unet.patcher = unet.patcher.clone()
    assert np.array_equal(model.sample(prompt, cfg=1.0, **fields).samples_CHW, expected.samples_CHW)
    assert model.to_cpu() > 0
    assert model.used_bytes() == 0


def _small_size(model: LoadedModel) -> dict[str, int]:
    """A small output, or none if the model makes one size only."""
    own = model._defaults
    if own.extent is not None:
        return {}
    multiple = max(32, own.sampling.side_multiple)
    size = {"width": 3 * multiple, "height": 2 * multiple}
    return size if own.sampling.video is None else {**size, "frames": 1 + own.sampling.video.multiple}


def _of_the_pool(folder: Path, fields: Mapping[str, Any]) -> PixelArray:
    tiny = TinyModel.of_folder(folder)
    try:
        made = tiny.made(prompt="a b", **fields)
        result = made.results[made._wanted]
    finally:
        tiny.engine.close()
    assert isinstance(result, ImagePixels | VideoFrames)
    return result.pixels_HWC if isinstance(result, ImagePixels) else result.frames_THWC
