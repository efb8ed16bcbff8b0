"""No loader takes codes for numbers: in every spelling of scales, weights are the values that they stand for, or the
file is refused by the name of the weight."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import T2IAdapter, UNet2DConditionModel
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.inference.controlnets.open_controlnet import OpenControlNet
from modelpool.pool.inference.controlnets.open_gligen import OpenGligen
from modelpool.pool.inference.image_prompts.open_adapter import OpenImagePrompt
from modelpool.pool.inference.pixels.tiny_decoder import TinyDecoder
from modelpool.pool.inference.upscalers.open_upscaler import OpenUpscaler
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.text.embeddings import read_embedding
from modelpool.pool.values.core.errors import BadQuantization, UserError
from modelpool.pool.values.core.refs import GligenRef
from modelpool.pool.values.core.stage_params import ControlRef, ImagePromptRef, UpscalerRef
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.patches.adapter_entries import read_adapters
from modelpool.pool.weights.quant.open_weights import open_weights
from tests.architecture.test_open_weights import openers
from tests.pool.families.tiny_audio import STABLE_AUDIO
from tests.pool.families.tiny_relatives import ALL_FAMILIES
from tests.pool.families.tiny_transformers import seeded
from tests.pool.families.tiny_videos import VIDEOS
from tests.pool.files.formats.gguf_files import write_gguf
from tests.pool.inference.controlnets import tiny_controls
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.inference.controlnets.tiny_gligen import gligen_state, tiny_gligen
from tests.pool.inference.image_prompts import tiny_adapters
from tests.pool.inference.upscalers.tiny_upscalers import tiny_state
from tests.pool.models.components.vae import published
from tests.pool.models.components.vae.cases import CASES
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import _random_tensors
from tests.pool.scaled_files import CODES, UNKNOWN, File, Spelling, scaled, spellings
from tests.pool.weights.quant.test_checkpoints import SHAPES, draw
from tests.pool.weights.quant.test_gguf_models import describe_model

#: of values that are unpacked to bfloat16, because a module has them in another form: scale and value are rounded
TOLERANCE = 2**-7


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    opens   the module that opens it
    plain   its tensors
    read    returns the weights that a loader makes of a file, by name
    """

    opens: str
    plain: Callable[[], Mapping[str, Tensor]]
    read: Callable[[Path], Mapping[str, Tensor]]


def values(state: Mapping[str, Tensor]) -> File:
    return {
        key: (tensor.unpack(torch.float32) if isinstance(tensor, PackedWeight) else tensor.float())
        for key, tensor in state.items()
    }


def of_checkpoint(path: Path) -> File:
    checkpoint = open_checkpoint(path, allow_pickle=True)
    return {
        f"{role.value} {key}": tensor
        for role in checkpoint.roles
        for key, tensor in values(checkpoint.build(role).module.state_dict()).items()
    }


def of_controlnet(path: Path) -> File:
    return values(OpenControlNet(ControlRef("c", str(path), "00", 1.0, 0.0, 1.0), "cpu").module.state_dict())


def of_adapter(path: Path) -> File:
    return values(OpenImagePrompt(ImagePromptRef("p", str(path), "00", 1.0), "cpu").module.state_dict())


def of_gligen(path: Path) -> File:
    return values(OpenGligen(GligenRef("g", str(path), "00"), "cpu").module.state_dict())


def of_upscaler(path: Path) -> File:
    return values(OpenUpscaler(UpscalerRef("4x", str(path), "00", 2), "cpu").module.state_dict())


def of_lora(path: Path) -> File:
    return {f"{e.name} {part}": tensor.float() for e in read_adapters(path).entries for part, tensor in e.parts.items()}


def of_embedding(path: Path) -> Mapping[str, Tensor]:
    return read_embedding(path, "word", allow_pickle=True).vectors


def layout(make: Callable[[], layouts.Layout]) -> Mapping[str, Tensor]:
    return _random_tensors(tuple(make().items()), 0, torch.float32)


def state_of(make: Callable[[], torch.nn.Module]) -> Mapping[str, Tensor]:
    return seeded(make, 3).state_dict()


def lora() -> File:
    shapes = {"up.weight": (24, 4), "down.weight": (4, 40)}
    return {
        f"lora_unet_{name}.lora_{part}": torch.randn(shape, generator=torch.Generator().manual_seed(place))
        for place, name in enumerate(("one", "two", "three"))
        for part, shape in shapes.items()
    }


def taesd() -> Mapping[str, Tensor]:
    return {key: tensor.contiguous() for key, tensor in published.taesd(CASES["taesd"].module().state_dict()).items()}


def gligen() -> Mapping[str, Tensor]:
    width = layouts.TINY_UNET.context_width
    blocks = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    unet = UNet2DConditionModel(8, 4, 4, down_block_types=blocks[0], up_block_types=blocks[1], layers_per_block=1,
                                block_out_channels=(48, 96), cross_attention_dim=width, norm_num_groups=16)  # fmt: skip
    return gligen_state(unet, tiny_gligen(unet, width), published=False)


CHECKPOINT, CONTROLNET = "pool/models/loading/build_checkpoint.py", "pool/inference/controlnets/open_controlnet.py"
ADAPTER, UPSCALER = "pool/inference/image_prompts/open_adapter.py", "pool/inference/upscalers/open_upscaler.py"
UNETS = {
    name: Kind(CHECKPOINT, partial(layout, getattr(layouts, name)), of_checkpoint)
    for name in ("tiny_sd1", "tiny_sd2", "tiny_sdxl")
}
TRANSFORMERS = {
    name: Kind(CHECKPOINT, family.file, of_checkpoint)
    for name, family in (ALL_FAMILIES | VIDEOS | {"stable_audio_1": STABLE_AUDIO}).items()
}
OTHERS = {
    "controlnet of sd1": Kind(CONTROLNET, lambda: layout(lambda: ldm_controlnet(layouts.TINY_UNET)), of_controlnet),
    "controlnet of flux": Kind(CONTROLNET, partial(state_of, tiny_controls.flux), of_controlnet),
    "controlnet of qwen_image": Kind(CONTROLNET, partial(state_of, tiny_controls.qwen_image), of_controlnet),
    "controlnet of sd3": Kind(CONTROLNET, partial(state_of, tiny_controls.sd3), of_controlnet),
    "t2i adapter": Kind(CONTROLNET, lambda: T2IAdapter(3, [32, 48], 2, 8, "full_adapter").state_dict(), of_controlnet),
    "ip adapter": Kind(
        ADAPTER, lambda: tiny_adapters.flat(tiny_adapters.ip_adapter("plus", [(48, 768), (96, 768)])), of_adapter
    ),
    "redux": Kind(ADAPTER, partial(state_of, lambda: ReduxImageEncoder(32, 64)), of_adapter),
    "gligen": Kind("pool/inference/controlnets/open_gligen.py", gligen, of_gligen),
    "upscaler": Kind(UPSCALER, partial(tiny_state, "esrgan_old_4x"), of_upscaler),
    "compact upscaler": Kind(UPSCALER, partial(tiny_state, "compact_4x"), of_upscaler),
    "tiny decoder": Kind(
        "pool/inference/pixels/tiny_decoder.py", taesd, lambda path: values(TinyDecoder.open(path)._module.state_dict())
    ),
    "lora": Kind("pool/weights/patches/adapter_entries.py", lora, of_lora),
}
#: families that are tried in the fast tests; the slow test tries all
FEW = ("flux_dev", "qwen_image", "wan_t2v", "hunyuan_dit")


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    shapes = ({key: tensor.shape for key, tensor in each.items()} for each in (found, expected))
    return len({tuple(sorted(each.items())) for each in shapes}) == 1 and all(
        torch.allclose(found[key], expected[key].float(), TOLERANCE, 1e-30) for key in expected
    )


def faults_of(name: str, kind: Kind, hows: list[Spelling], folder: Path) -> list[str]:
    """What a loader makes of files in these spellings that is neither right nor refused by name."""
    found, plain = [], {key: tensor.contiguous() for key, tensor in kind.plain().items()}
    for seed, how in enumerate(hows):
        file, meant = scaled(plain, how, seed)
        path = folder / "file.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in meant.items()}, path)
        expected = kind.read(path)
        save_file(file, path)
        try:
            if not close(kind.read(path), expected):
                found.append(f"{name}: {how}: other values")
        except UserError as error:
            found.append(f"{name}: {how}: {error}")
    return found


def some(place: int, count: int) -> list[Spelling]:
    """Spellings in rotation: another kind tries others."""
    every = spellings()
    return [every[(place * count + step) % len(every)] for step in range(count)]


def test_every_spelling_is_the_values_that_it_stands_for(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (80, 48), "b": (128, 272), "c": (16, 8, 3, 3), "d": (1, 32), "e": (33, 1), "f": (48, 130)}
    plain = {f"x.{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    plain |= {"x.norm.scale": torch.ones(4), "x.logit_scale": torch.ones(()), "x.a.bias": torch.ones(80)}
    for seed, how in enumerate(spellings()):
        file, meant = scaled(plain, how, seed)
        save_file(file, tmp_path / "a.safetensors")
        weights = open_weights(tmp_path / "a.safetensors")
        assert weights.keys() == plain.keys(), how
        assert weights.shapes == {key: tuple(tensor.shape) for key, tensor in plain.items()}
        for key in plain:
            assert torch.allclose(weights.values_of(key), meant[key], 1e-6, 0), (how, key)
        halves = [weights["x.b.weight"][:64], weights["x.b.weight"][64:]]
        assert torch.allclose(torch.cat([half.float() for half in halves]), meant["x.b.weight"], TOLERANCE), how


def test_unets_and_other_files_are_read_in_the_values_of_their_spelling(tmp_path: Path) -> None:
    kinds = {**UNETS, **OTHERS}
    assert [fault for n, name in enumerate(kinds) for fault in faults_of(name, kinds[name], some(n, 2), tmp_path)] == []


def test_transformers_are_read_in_the_values_of_their_spelling(tmp_path: Path) -> None:
    faults = [faults_of(name, TRANSFORMERS[name], some(51 + n, 1), tmp_path) for n, name in enumerate(FEW)]
    assert list(itertools.chain(*faults)) == []


@pytest.mark.slow
def test_all_transformers_are_read_in_the_values_of_their_spelling(tmp_path: Path) -> None:
    names = [name for name in TRANSFORMERS if name not in FEW]
    faults = [faults_of(name, TRANSFORMERS[name], some(60 + n, 1), tmp_path) for n, name in enumerate(names)]
    assert list(itertools.chain(*faults)) == []


def test_a_scale_under_another_name_is_refused_with_both_names(tmp_path: Path) -> None:
    kinds = {**UNETS, **OTHERS, "qwen_image": TRANSFORMERS["qwen_image"]}
    for n, (name, kind) in enumerate(kinds.items()):
        plain = {key: tensor.contiguous() for key, tensor in kind.plain().items()}
        for codes, scale in zip(CODES, (UNKNOWN[(3 * n + step) % len(UNKNOWN)] for step in range(3)), strict=True):
            if n % 3 and codes != "float8_e4m3fn":
                continue  # each of the others in some kinds
            how = Spelling(codes, "weight_scale", "()")
            file, _ = scaled(plain, how, n)
            known = [key for key in file if key.endswith(".weight_scale")]
            for key in known:
                file[key.removesuffix("weight_scale") + scale] = file.pop(key)
            save_file(file, tmp_path / "file.safetensors")
            with pytest.raises(UserError) as refused:
                kind.read(tmp_path / "file.safetensors")
            stems = [key.removesuffix("weight_scale") for key in known]
            named = [stem for stem in stems if f"'{stem}weight'" in str(refused.value)]
            assert named, (name, codes, scale, refused.value)
            if codes != "int8":  # integers are refused for what they are
                assert f"'{named[0]}{scale}'" in str(refused.value), (name, codes, scale, refused.value)


def test_plain_8_bit_floats_and_legitimate_scales_stay_valid(tmp_path: Path) -> None:
    """All tensors in 8 bits, also norms that are called `scale`, tables that are called `scale_shift_table`."""
    kinds = {name: TRANSFORMERS[name] for name in ("flux_dev", "ltxv")}
    kinds |= {name: (UNETS | OTHERS)[name] for name in ("tiny_sd1", "controlnet of flux", "upscaler", "ip adapter")}
    for name, kind in kinds.items():
        plain = {key: tensor.contiguous() for key, tensor in kind.plain().items()}
        file = {
            key: tensor.to(torch.float8_e4m3fn) if tensor.is_floating_point() and key != "tokenizer" else tensor
            for key, tensor in plain.items()
        }
        save_file(file, tmp_path / "file.safetensors")
        found = kind.read(tmp_path / "file.safetensors")
        save_file(
            {key: t.float() if t.is_floating_point() else t for key, t in file.items()}, tmp_path / "file.safetensors"
        )
        assert close(found, kind.read(tmp_path / "file.safetensors")), name


def test_files_of_every_form_are_read_in_the_values_of_their_spelling(tmp_path: Path) -> None:
    """A pickle, shards, parts of an assembly, and GGUF with weights of ordinary types."""
    plain = {key: x.contiguous() for key, x in TRANSFORMERS["flux_dev"].plain().items() if x.is_floating_point()}
    for how in (
        Spelling("float8_e4m3fn", "weight_scale_inv", "32 32"),
        Spelling("float8_e5m2", "weight_scale", "(O,)", more="input_scale"),
    ):
        file, meant = scaled(plain, how)
        save_file(meant, tmp_path / "meant.safetensors")
        expected = of_checkpoint(tmp_path / "meant.safetensors")
        torch.save(file, tmp_path / "file.ckpt")
        assert close(of_checkpoint(tmp_path / "file.ckpt"), expected), how
        assert close(of_checkpoint(in_shards(tmp_path, file)), expected), how
        assert close(of_checkpoint(in_parts(tmp_path, file)), expected), how
        # converters to GGUF do not know scales: codes get an ordinary type, and a scale keeps its place
        named = {key.replace("vae.", "first_stage_model."): tensor.float() for key, tensor in file.items()}
        named = {key: tensor.reshape(1) if tensor.ndim == 0 else tensor for key, tensor in named.items()}
        write_gguf(tmp_path / "file.gguf", named, "F32", "")
        assert close(of_checkpoint(tmp_path / "file.gguf"), expected), how


def test_parts_of_a_model_may_have_blocks_of_other_sizes(tmp_path: Path) -> None:
    plain = {key: x.contiguous() for key, x in TRANSFORMERS["flux_dev"].plain().items()}
    file, meant = scaled(plain, Spelling("float8_e4m3fn", "weight_scale_inv", "32 32"))
    text, meant_text = scaled(plain, Spelling("float8_e4m3fn", "weight_scale_inv", "16 16"))
    for parts, others in ((file, text), (meant, meant_text)):
        for key in [key for key in parts if key.startswith("text_encoders.t5xxl.")]:
            del parts[key]
        parts |= {key: tensor for key, tensor in others.items() if key.startswith("text_encoders.t5xxl.")}
    save_file(meant, tmp_path / "meant.safetensors")
    assert close(of_checkpoint(in_parts(tmp_path, file)), of_checkpoint(tmp_path / "meant.safetensors"))


def in_shards(folder: Path, file: File) -> Path:
    names, places = list(file), dict[str, str]()
    for shard in range(3):  # a scale is in another file than its weight
        own = names[shard::3]
        save_file({key: file[key] for key in own}, folder / f"shard-{shard}.safetensors")
        places |= dict.fromkeys(own, f"shard-{shard}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def in_parts(folder: Path, file: File) -> Path:
    prefixes = {
        "diffusion_model": "model.diffusion_model.", "vae": "vae.", "clip_l": "text_encoders.clip_l.transformer.",
        "t5xxl": "text_encoders.t5xxl.transformer.",
    }  # fmt: skip
    for part, prefix in prefixes.items():
        own = {key.removeprefix(prefix): tensor for key, tensor in file.items() if key.startswith(prefix)}
        save_file(own, folder / f"{part}.safetensors")
    path = folder / "parts.model.json"
    describe_model(path, "diffusion_model.safetensors", "vae.safetensors", "clip_l.safetensors", "t5xxl.safetensors")
    return path


def test_the_blocks_of_a_folder_have_the_size_that_its_configuration_declares(tmp_path: Path) -> None:
    """Text encoders in 8-bit floats are published like this; 24 is no size that would be guessed."""
    save_file(dict(layout(layouts.tiny_sd1)), tmp_path / "a.safetensors")
    save_diffusers(open_checkpoint(tmp_path / "a.safetensors"), tmp_path / "folder")
    [weights] = (tmp_path / "folder" / "text_encoder").glob("*.safetensors")
    file, meant = scaled(load_file(weights), Spelling("float8_e4m3fn", "weight_scale_inv", "24 24"))
    save_file(meant, weights)
    expected = of_checkpoint(tmp_path / "folder")
    save_file(file, weights)
    with pytest.raises(BadQuantization, match=r"text_encoder\..*weight': found blocks of \d+ to .*weight_scale_inv'"):
        of_checkpoint(tmp_path / "folder")
    config = tmp_path / "folder" / "text_encoder" / "config.json"
    declared = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [24, 24]}}
    config.write_text(json.dumps(json.loads(config.read_text()) | declared))
    assert close(of_checkpoint(tmp_path / "folder"), expected)


def test_the_vectors_of_an_embedding_are_multiplied_with_their_scale(tmp_path: Path) -> None:
    vectors, scale = torch.randn(3, 48), torch.tensor(0.02)
    codes = (vectors / scale).to(torch.float8_e4m3fn)
    for names, encoder in ((("emb_params", "emb_params_scale"), ""), (("clip_l", "clip_l.scale_weight"), "clip_l")):
        save_file(dict(zip(names, (codes, scale), strict=True)), tmp_path / "word.safetensors")
        assert torch.equal(of_embedding(tmp_path / "word.safetensors")[encoder], codes.float() * scale)
    save_file({"clip_l": codes, "clip_l.qscale": scale}, tmp_path / "word.safetensors")
    with pytest.raises(BadQuantization, match=r"'clip_l': .* beside 'clip_l\.qscale'"):
        of_embedding(tmp_path / "word.safetensors")


@pytest.mark.slow
def test_scaled_weights_without_a_marker_draw_the_image_of_their_values_on_every_device(tmp_path: Path) -> None:
    """Blocks of 8-bit floats, and a GGUF file with scales; with a LoRA, and streamed."""
    shapes = load_file(SHAPES / "models" / "shapes.safetensors")
    of_unet = {key: tensor for key, tensor in shapes.items() if key.startswith("model.diffusion_model.")}
    file, meant = scaled(of_unet, Spelling("float8_e4m3fn", "weight_scale_inv", "16 16"))
    metadata = {"modelspec.resolution": "64x64"}
    save_file(shapes | file, tmp_path / "blocks.safetensors", metadata)
    save_file(shapes | {key: t.float() for key, t in meant.items()}, tmp_path / "meant.safetensors", metadata)
    catalog = Catalog([tmp_path], [SHAPES / "loras"], "sim")
    expected = draw(catalog, "meant", "cpu", lora="light").astype(int)
    found = draw(catalog, "blocks", "cpu", lora="light")
    assert abs(found.astype(int) - expected).max() <= 6
    assert (draw(catalog, "blocks", "sim", 0, "light") == found).all()


def test_a_file_with_a_scale_of_unknown_name_is_neither_converted_nor_changed(tmp_path: Path) -> None:
    """Copied as it is, a file keeps its meaning; converted to another type, its codes would become weights."""
    plain = dict(layout(layouts.tiny_sd1))
    file, _ = scaled(plain, Spelling("float8_e4m3fn", "qscale", "()"))
    save_file(file, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    with pytest.raises(BadQuantization, match=r"a\.safetensors: '.*\.weight': .* beside '.*\.qscale'"):
        save_checkpoint(checkpoint, tmp_path / "b.safetensors", dtype=torch.float32)
    assert not (tmp_path / "b.safetensors").exists()
    save_checkpoint(checkpoint, tmp_path / "b.safetensors")
    assert load_file(tmp_path / "b.safetensors").keys() == file.keys()


def test_every_module_that_opens_weights_is_tried_here() -> None:
    """A new loader belongs in one of the tables above."""
    tried = {kind.opens for kind in (UNETS | TRANSFORMERS | OTHERS).values()} | {"pool/models/text/embeddings.py"}
    # checks numbers as they are stored
    assert openers() - tried == {"actors/cli/models/inspect.py"}
    assert tried <= openers()
