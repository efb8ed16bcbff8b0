"""`save_checkpoint` of a folder of diffusers: one file in the published layout of its family.

Proves: the file that a folder was made of comes back tensor for tensor in what components hold, is read as the same
family, prediction, noise and size, and is what diffusers loads; LoRAs and dtypes are as in other saves; what a file
would not be read as is refused with a name, and nothing is left of it.
"""

from __future__ import annotations

import functools
import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.families.definitions.stable_diffusion_2 import LOTUS_D, SD_X4
from modelpool.pool.families.unet_families import FAMILIES
from modelpool.pool.files.formats.safetensors_file import Shape, read_header
from modelpool.pool.models.components.published_shapes import published_shapes
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.describe import describe
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.saving import published_file
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.component_weights import ComponentWeights
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.values.core.stage_params import ModelRef
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.families.test_unet_families import LATENT_MEASURES, filling_sd2
from tests.pool.families.tiny_shown import SHOWN_LAYOUTS, SHOWN_TENSORS
from tests.pool.families.tiny_transformers import FAMILIES as TRANSFORMERS
from tests.pool.families.tiny_unclip import statistics, tiny_unclip_h, tiny_unclip_l
from tests.pool.models.loading import layouts, unet_layouts
from tests.pool.models.loading.layouts import Layout, open_clip
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.models.saving.contents import Contents, contents_made, write_contents
from tests.pool.models.saving.models import bits, lora_ref, opened
from tests.pool.models.saving.test_diffusers_folder import filling
from tests.pool.toy import make_patch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

SD2_TEXT = "cond_stage_model.model."
VELOCITY = {"v_pred": torch.empty(0)}
ZERO_TERMINAL = {**VELOCITY, "ztsnr": torch.empty(0)}
ENDS_OF_NOISE = {"edm_vpred.sigma_min": torch.tensor(0.01), "edm_vpred.sigma_max": torch.tensor(60.0)}
#: no folder has them, and no component
BESIDE = (".position_ids", ".logit_scale")


def with_whole_text(layout: Layout) -> Layout:
    """A file of SD2 with as many layers in its text encoder as the published ones have, of which one is never read."""
    own = {key: shape for key, shape in layout.items() if not key.startswith(SD2_TEXT)}
    return {**own, **open_clip(32, 24, 128, prefix=SD2_TEXT)}


#: a family, a file of it, and what that has beside random tensors
CASES: Mapping[str, tuple[str, Callable[[], Layout], Mapping[str, Tensor]]] = {
    "sd1": ("sd1", layouts.tiny_sd1, {}),
    "sd1 of velocity": ("sd1", layouts.tiny_sd1, VELOCITY),
    "sd1 to noise alone": ("sd1", layouts.tiny_sd1, ZERO_TERMINAL),
    "sd2": ("sd2", lambda: with_whole_text(layouts.tiny_sd2()), {}),
    "sd2 of velocity": ("sd2", lambda: with_whole_text(layouts.tiny_sd2()), VELOCITY),
    "sd2_inpaint": ("sd2_inpaint", lambda: with_whole_text(filling_sd2()), {}),
    "sd2_depth": ("sd2_depth", lambda: with_whole_text(SHOWN_LAYOUTS["sd2_depth"]()), {}),
    "sd21_unclip_l": (
        "sd21_unclip_l",
        lambda: with_whole_text(tiny_unclip_l()),
        {**VELOCITY, **statistics("sd21_unclip_l")},
    ),
    "sd21_unclip_h": ("sd21_unclip_h", lambda: with_whole_text(tiny_unclip_h()), VELOCITY),
    "sdxl": ("sdxl", layouts.tiny_sdxl, {}),
    "sdxl to noise alone": ("sdxl", layouts.tiny_sdxl, ZERO_TERMINAL),
    "sdxl with ends of noise": ("sdxl", layouts.tiny_sdxl, ENDS_OF_NOISE),
    "sdxl_refiner": ("sdxl_refiner", layouts.tiny_sdxl_refiner, {}),
    "sd1_inpaint": ("sd1_inpaint", lambda: filling("sd1"), {}),
    "sdxl_inpaint": ("sdxl_inpaint", lambda: filling("sdxl"), {}),
    "sd1_ip2p": ("sd1_ip2p", SHOWN_LAYOUTS["sd1_ip2p"], {}),
    "sdxl_ip2p": ("sdxl_ip2p", SHOWN_LAYOUTS["sdxl_ip2p"], {}),
    "cosxl_edit": ("cosxl_edit", SHOWN_LAYOUTS["cosxl_edit"], SHOWN_TENSORS["cosxl_edit"]),
    "playground_25": ("playground_25", layouts.tiny_sdxl, LATENT_MEASURES),
    "ssd_1b": ("ssd_1b", unet_layouts.tiny_ssd_1b, {}),
    "vega": ("vega", unet_layouts.tiny_vega, {}),
    "koala_700m": ("koala_700m", unet_layouts.tiny_koala_700m, {}),
    "koala_1b": ("koala_1b", unet_layouts.tiny_koala_1b, {}),
}


def both(base: Path, case: str = "sd1", dtype: torch.dtype = torch.float16) -> tuple[Path, Path]:
    """A file, and the folder of the same model."""
    write_contents(_saved(case, dtype), base)
    return base / "file.safetensors", base / "folder"


@functools.lru_cache(maxsize=4)
def _saved(case: str, dtype: torch.dtype) -> Contents:
    _, layout, tensors = CASES[case]

    def save(base: Path) -> None:
        file = write_tiny_checkpoint(base / "file.safetensors", seed=3, dtype=dtype, layout=layout())
        if tensors:
            save_file({**load_file(file), **tensors}, file)
        save_diffusers(open_checkpoint(file), base / "folder")

    return contents_made(save)


def changed(folder: Path, part: str, **said: Any) -> Path:
    """`folder`, with other things said in the configuration of a part."""
    path = next(folder / part / name for name in ("config.json", "scheduler_config.json")
                if (folder / part / name).is_file())  # fmt: skip
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    return folder


def test_every_family_of_such_files_has_a_case() -> None:
    """Except the upscaler, and Lotus, which is in no pipeline of diffusers, so that its folder is refused."""
    without = {SD_X4.name, LOTUS_D.name}
    assert {name for name, _, _ in CASES.values()} == {family.name for family in FAMILIES} - without


@pytest.mark.parametrize("case", CASES)
def test_a_file_comes_back_from_its_folder(case: str, tmp_path: Path) -> None:
    """Every tensor of a component, bit for bit, and the same model: family, prediction, noise, latents, size. The last
    layer of SD2's text encoder and its projection are in no folder, and are not made up."""
    file, folder = both(tmp_path, case)
    saved = save_checkpoint(open_checkpoint(folder), tmp_path / "again.safetensors")
    before, after = load_file(file), load_file(saved.path)
    wanted = {key for key in before if not key.endswith(BESIDE)}
    if case.startswith("sd2"):
        wanted -= {key for key in wanted if key.startswith(f"{SD2_TEXT}transformer.resblocks.23.")}
        wanted -= {f"{SD2_TEXT}text_projection"}
    assert after.keys() == wanted
    assert {key for key in wanted if bits(before[key]) != bits(after[key])} == set()
    assert (saved.tensors, saved.patched, saved.left_out) == (len(wanted), 0, ())
    first, again = open_checkpoint(file), open_checkpoint(saved.path)
    assert (again.family.name, again.family.sampling) == (CASES[case][0], first.family.sampling)
    assert again.latent == first.latent
    assert (describe(saved.path).width, describe(saved.path).height) == (describe(file).width, describe(file).height)


@pytest.mark.parametrize("case", ["sd1", "sd2", "sdxl_refiner"])
def test_diffusers_loads_the_file_as_it_loads_the_folder(case: str, tmp_path: Path) -> None:
    """Its own converters, which know nothing of ours, make the same state of it."""
    _, folder = both(tmp_path, case, torch.float32)
    saved = save_checkpoint(open_checkpoint(folder), tmp_path / "again.safetensors")
    diffusers.utils.logging.disable_progress_bar()
    expected: Any = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    found = type(expected).from_single_file(str(saved.path), config=str(folder), local_files_only=True)
    texts = [name for name in ("text_encoder", "text_encoder_2") if getattr(expected, name, None) is not None]
    for part in ("unet", "vae", *texts):
        ours, theirs = getattr(expected, part).state_dict(), getattr(found, part).state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in ours.items()), part


def test_a_lora_on_the_way_is_the_lora_on_the_file(tmp_path: Path) -> None:
    """Bit for bit, and the file says what was merged."""
    file, folder = both(tmp_path)
    lora = lora_ref(write_tiny_lora(tmp_path / "light.safetensors", seed=5), 0.7)
    model = OpenModel(ModelRef("folder", str(folder), "0" * 64), "cpu")
    saved = save_checkpoint(model, tmp_path / "merged.safetensors", loras=[lora])
    save_checkpoint(opened(file), tmp_path / "expected.safetensors", loras=[lora])
    found, expected, before = (load_file(path) for path in (saved.path, tmp_path / "expected.safetensors", file))
    assert saved.patched == 6
    assert all(bits(value) == bits(expected[key]) for key, value in found.items())
    assert sum(bits(value) != bits(before[key]) for key, value in found.items()) == 6
    (merged,) = json.loads(read_header(saved.path).metadata["modelpool.merged"])
    assert merged == {"name": "light", "sha256": lora.sha256, "strength": 0.7}


def test_patches_of_one_third_are_in_the_fused_weight(tmp_path: Path) -> None:
    """And 8-bit floats that nothing patches stay the same bits beside them."""
    file, _ = both(tmp_path, "sdxl")
    second = "conditioner.embedders.1.model."
    tensors = {k: v.to(torch.float8_e4m3fn) if k.startswith(second) else v for k, v in load_file(file).items()}
    save_file(tensors, file)
    save_diffusers(open_checkpoint(file), tmp_path / "folder", overwrite=True)
    patched = PatchSet((make_patch("text_model.encoder.layers.1.self_attn.k_proj.weight", (32, 32), "k"),))
    saved = save_checkpoint(
        open_checkpoint(tmp_path / "folder"), tmp_path / "b.safetensors", patches={Role.TEXT_ENCODER_2: patched}
    )
    found, key = load_file(saved.path), f"{second}transformer.resblocks.1.attn.in_proj_weight"
    assert {name for name in found if bits(found[name]) != bits(tensors[name])} == {key}
    assert [bits(a) == bits(b) for a, b in zip(found[key].chunk(3), tensors[key].chunk(3), strict=True)] == [
        True, False, True,
    ]  # fmt: skip


def test_types_are_kept_and_where_they_are_joined_the_widest_is_taken(tmp_path: Path) -> None:
    _, folder = both(tmp_path, "sdxl")
    weights = folder / "text_encoder_2" / "model.safetensors"
    tensors = load_file(weights)
    odd = "text_model.encoder.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, odd: tensors[odd].bfloat16()}, weights)
    found = load_file(save_checkpoint(open_checkpoint(folder), tmp_path / "a.safetensors").path)
    wide = {key for key, value in found.items() if value.dtype != torch.float16}
    assert wide == {"conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight"}
    assert {found[key].dtype for key in wide} == {torch.float32}
    cast = load_file(save_checkpoint(open_checkpoint(folder), tmp_path / "b.safetensors", dtype=torch.bfloat16).path)
    assert {value.dtype for value in cast.values()} == {torch.bfloat16}


def test_the_size_that_a_folder_was_trained_for_is_said_and_hashes_of_its_parts_are_not(tmp_path: Path) -> None:
    _, folder = both(tmp_path)
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(weights), weights, {"format": "pt", "modelspec.hash_sha256": "0x12", "note": "mine"})
    changed(folder, "unet", sample_size=96)
    saved = save_checkpoint(open_checkpoint(folder), tmp_path / "a.safetensors")
    assert (describe(saved.path).width, describe(saved.path).height) == (768, 768)
    assert dict(read_header(saved.path).metadata) == {
        "format": "pt", "note": "mine", "modelspec.resolution": "768x768",
    }  # fmt: skip


def test_sd2_that_predicts_noise_says_so_whatever_its_weights_look_like(tmp_path: Path) -> None:
    """A norm's biases that are spread wide tell velocity of a file that does not say."""
    name = "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"
    layout = with_whole_text(unet_layouts.small_sd2())
    file = write_tiny_checkpoint(tmp_path / "file.safetensors", layout=layout)
    tensors = {**load_file(file), name: torch.tensor([0.2, -0.2]).repeat(16)}
    save_file(tensors, file, {"modelspec.prediction_type": "epsilon"})
    save_diffusers(open_checkpoint(file), tmp_path / "folder")
    saved = save_checkpoint(open_checkpoint(tmp_path / "folder"), tmp_path / "again.safetensors")
    assert open_checkpoint(saved.path).family.sampling == open_checkpoint(file).family.sampling


def test_the_scheduler_of_a_folder_counts_and_not_what_metadata_of_its_weights_say(tmp_path: Path) -> None:
    """Of the file that the UNet once came from."""
    _, folder = both(tmp_path)
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    save_file(load_file(weights), weights, {"modelspec.prediction_type": "v", "modelspec.predict_key": "v"})
    checkpoint = open_checkpoint(folder)
    saved = save_checkpoint(checkpoint, tmp_path / "a.safetensors")
    assert checkpoint.family.sampling.prediction is Prediction.NOISE
    assert open_checkpoint(saved.path).family.sampling == checkpoint.family.sampling


def test_tensors_that_no_component_takes_are_told(tmp_path: Path) -> None:
    """Another model's; but no leftovers of training, and no tables of positions."""
    _, folder = both(tmp_path)
    for name, leftover in (
        ("vae/diffusion_pytorch_model", {"loss.logvar": torch.zeros(())}),
        ("text_encoder/model", {"text_model.embeddings.position_ids": torch.arange(77)}),
    ):
        weights = folder / f"{name}.safetensors"
        save_file({**load_file(weights), **leftover}, weights)
    assert save_checkpoint(open_checkpoint(folder), tmp_path / "a.safetensors").left_out == ()
    (folder / "image_encoder").mkdir()
    (folder / "image_encoder" / "config.json").write_text("{}")
    save_file({"visual_projection.weight": torch.ones(2, 2)}, folder / "image_encoder" / "model.safetensors")
    index = json.loads((folder / "model_index.json").read_text())
    index["image_encoder"] = ["transformers", "CLIPVisionModelWithProjection"]
    (folder / "model_index.json").write_text(json.dumps(index))
    told = save_checkpoint(open_checkpoint(folder), tmp_path / "b.safetensors").left_out
    assert told == ("image_encoder.visual_projection.weight",)


REFUSED: Mapping[str, tuple[str, str, Mapping[str, Any], str]] = {
    "heads": (
        "sd1",
        "unet",
        {"attention_head_dim": 4},
        r"diffusion_model\.\S+head_dim: found 12, expected 6, as such a file",
    ),
    "centred": ("sd1", "unet", {"center_input_sample": True}, r"diffusion_model\.center_input_sample: found True, exp"),
    "activation": (
        "sd1",
        "text_encoder",
        {"hidden_act": "gelu"},
        r"text_encoder\.encoder\S+activation_fn.class: found ",
    ),
    "scale": ("sd1", "vae", {"scaling_factor": 0.5}, "scaling_factor: found 0.5, expected 0.18215, as such a file is"),
    "shift": ("sdxl", "vae", {"shift_factor": 0.25}, "latent_shift: found 0.25, expected 0.0"),
    "norm": ("sd1", "vae", {"norm_num_groups": 4}, r"vae\.\S+num_groups: found 4, expected 8"),
    "betas": ("sd1", "scheduler", {"beta_end": 0.02}, r"noise\.beta_end: found 0\.02, expected 0\.012"),
    "linear": ("sd1", "scheduler", {"beta_schedule": "linear"}, "noise.kind: found 'linear', expected 'scaled linear'"),
    "ends": ("playground_25", "scheduler", {"sigma_max": 60.0}, "noise.sigma_max: found 60.0, expected 80.0"),
    "data": ("sdxl with ends of noise", "scheduler", {"sigma_data": 0.5}, "noise.sigma_data: found 0.5, expected 1.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_file_would_not_be_read_as_is_refused(case: str, tmp_path: Path) -> None:
    """With the folder, the component and the key; nothing is written."""
    source, part, said, message = REFUSED[case]
    _, folder = both(tmp_path, source)
    checkpoint = open_checkpoint(changed(folder, part, **said))
    with pytest.raises(UnknownArchitecture, match=message) as raised:
        save_checkpoint(checkpoint, tmp_path / "again.safetensors")
    assert str(raised.value).startswith(f"{folder}: cannot be one file of {checkpoint.family.title}: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.safetensors", "folder"]


def test_precision_of_attention_is_no_reason(tmp_path: Path) -> None:
    """Published folders of SD2.1 ask for it in float32; files cannot, and are the same model."""
    _, folder = both(tmp_path, "sd2")
    checkpoint = open_checkpoint(changed(folder, "unet", upcast_attention=True))
    assert save_checkpoint(checkpoint, tmp_path / "again.safetensors").tensors > 0


def test_weights_that_files_have_no_place_for_are_refused(tmp_path: Path) -> None:
    """What distilled models are told their guidance by."""
    _, folder = both(tmp_path)
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(weights), "time_embedding.cond_proj.weight": torch.zeros(48, 8)}, weights)
    changed(folder, "unet", time_cond_proj_dim=8)
    with pytest.raises(
        UnknownArchitecture, match=r"diffusion_model: found time_embedding\.cond_proj\.weight, expected"
    ):
        save_checkpoint(open_checkpoint(folder), tmp_path / "again.safetensors")


def test_a_text_encoder_of_sd2_with_other_layers_is_refused(tmp_path: Path) -> None:
    """How many of a file's layers are read follows from how many there are."""
    file = write_tiny_checkpoint(tmp_path / "file.safetensors", layout=layouts.tiny_sd2())
    save_diffusers(open_checkpoint(file), tmp_path / "folder")
    with pytest.raises(UnknownArchitecture, match=r"text_encoder\.layers_left_out: found 0, expected 1"):
        save_checkpoint(open_checkpoint(tmp_path / "folder"), tmp_path / "again.safetensors")


@pytest.mark.parametrize("lost", ["first_stage_model.", "model.diffusion_model.out.2", "cond_stage_model."])
def test_names_that_are_wrong_make_no_file(lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with the way back, the way forth finds it before anything is written."""
    _, folder = both(tmp_path)

    def wrong(*given: Any) -> dict[str, Shape]:
        return {key.replace("weight", "wieght") if key.startswith(lost) else key: shape
                for key, shape in published_shapes(*given).items()}  # fmt: skip

    monkeypatch.setattr(published_file, "published_shapes", wrong)
    with pytest.raises(UnknownArchitecture, match=str(folder)):
        save_checkpoint(open_checkpoint(folder), tmp_path / "again.safetensors")
    assert not (tmp_path / "again.safetensors").exists()


def test_families_without_such_files_are_refused(tmp_path: Path) -> None:
    """Those of transformers, and the upscaler: their folders are saved as folders."""
    save_file(TRANSFORMERS["flux_dev"].file(), tmp_path / "flux.safetensors")
    write_tiny_checkpoint(tmp_path / "upscaler.safetensors", layout=SHOWN_LAYOUTS["sd_x4"]())
    for name, title in (("flux", "Flux dev"), ("upscaler", "the Stable Diffusion x4 upscaler")):
        save_diffusers(open_checkpoint(tmp_path / f"{name}.safetensors"), tmp_path / name)
        expected = f"a folder of diffusers of {title}, expected to save it as a folder: folders that become single"
        with pytest.raises(UnusableField, match=expected):
            save_checkpoint(open_checkpoint(tmp_path / name), tmp_path / "again.safetensors")
    assert not (tmp_path / "again.safetensors").exists()


def test_the_file_is_whole_or_not_there(tmp_path: Path) -> None:
    _, folder = both(tmp_path)

    def fails(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(open_checkpoint(folder), tmp_path / "again.safetensors", progress=fails)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.safetensors", "folder"]


def test_one_weight_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are made: a fused one of three, a turned one; the others are views of the folder's files."""
    _, folder = both(tmp_path, "sdxl")
    alive: list[weakref.ref[Tensor]] = []
    source_of = ComponentWeights.source

    def watched(self: ComponentWeights, *given: Any) -> Tensor:
        assert not [each for each in alive if each() is not None], f"{given[0]}: weights before it are still there"
        tensor = source_of(self, *given)
        alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(ComponentWeights, "source", watched)
    saved = save_checkpoint(open_checkpoint(folder), tmp_path / "again.safetensors")
    assert len(alive) == saved.tensors
