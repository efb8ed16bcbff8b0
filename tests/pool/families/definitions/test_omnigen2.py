"""OmniGen 2. diffusers has no class and no pipeline for it: its module makes what the original code made of the same
weights and inputs, which are sines of their places; the loop of its pipeline is written out here."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import EngineSettings
from modelpool.pool.families.definitions import omnigen2
from modelpool.pool.families.parts.forward import ModelKwargs
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.diffusion.omnigen2_module import OmniGen2Transformer2DModel
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnknownArchitecture, UserError
from modelpool.pool.values.core.stage_params import EncodeImageParams, EncodeParams, Latent, SampleParams
from modelpool.pool.values.specs.spec import JobId, Role
from tests.each_case import each_case
from tests.pool.device_waits import WaitRecorder
from tests.pool.families.definitions.compared import Compared, check_texts_of_two_lengths
from tests.pool.families.test_device_waits import SENT
from tests.pool.families.test_from_images import image
from tests.pool.families.test_transformers_as_folders import assert_same_model
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_pairs import write_tokenizers
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH, TinyFamily, kl_vae, seeded, words
from tests.pool.families.whole_transformer import NEGATIVE, Whole
from tests.pool.inference.conditioning.test_image_concat import assert_equal
from tests.pool.input_names import results_read
from tests.pool.models.components.text import cases as texts
from tests.pool.models.text.tiny_tokenizers import for_transformers
from tests.pool.pipeline import QUIET

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[3] / "golden" / "omnigen2.json").read_text())
NOT_COMPARED = {
    "omnigen2": "diffusers has no class and no pipeline for it: compared with what the code of its authors makes"
}
SEED, STEPS, CFG, IMAGE_CFG = 11, 3, 4.0, 1.5
SIZES: dict[str, Any] = {
    "width": 96, "height": 64, "steps": STEPS, "seed": SEED, "negative": NEGATIVE, "cfg": CFG, "prompt": "a red cat",
}  # fmt: skip
#: Source: the chat template of Qwen/Qwen2.5-VL-3B-Instruct, and `_apply_chat_template` of the pipeline
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant that generates high-quality images based on user instructions."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
)


def _model(width: int = WIDTH) -> Any:
    return OmniGen2Transformer2DModel(
        in_channels=16, hidden_size=48, num_layers=2, num_refiner_layers=2, num_attention_heads=4, num_kv_heads=2,
        out_channels=16, multiple_of=1, ffn_dim_multiplier=1.25, axes_dim_rope=(4, 4, 4),
        axes_lens=(1024, 1664, 1664), text_feat_dim=width, timestep_scale=1000.0,
    )  # fmt: skip


#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"omnigen2": ("layers.0.attn.to_q", "transformer.{}")}
TINY = TinyFamily(
    "omnigen2",
    _model,
    dict,
    {"qwen25_3b": (lambda: texts.qwen2(words=words("qwen")), texts.under("model.", "visual.x.weight"))},
    lambda: kl_vae(16),
)


def _wide_encoder() -> Any:
    """With keys and values as wide as published, by which a file of it alone is recognised."""
    own = {**texts.DECODER, "vocab_size": words("qwen"), "hidden_size": 256, "num_attention_heads": 2}
    positions = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    del own["head_dim"]
    config = transformers.Qwen2_5_VLTextConfig(**own, rms_norm_eps=1e-6, rope_parameters=positions)
    return texts.seeded(transformers.Qwen2_5_VLTextModel(config))


PUBLISHED_WIDTH = replace(
    TINY,
    model=lambda: _model(256),
    encoders={"qwen25_3b": (_wide_encoder, texts.under("model.", "visual.x.weight"))},
)


def _waves(shape: tuple[int, ...], pitch: float, scale: float = 1.0) -> Tensor:
    places = torch.arange(math.prod(shape), dtype=torch.float64)
    return (torch.sin(places * pitch + pitch) * scale).float().reshape(shape)


@each_case("name", list(GOLDEN["velocities"]))
def test_velocities_are_those_of_the_original_code(name: str) -> None:
    """The file has what OmniGen2Transformer2DModel of VectorSpaceLab/OmniGen2 (commit 0f72fa9) makes, in float32 on a
    CPU: weights, in the order of their names, are sines of another pitch each, and so are the inputs. Its second text
    has nine words or five; its reference images have the sides 4 by 4, and 2 by 8."""
    module = OmniGen2Transformer2DModel(**GOLDEN["config"]).eval().requires_grad_(False)
    state = module.state_dict()
    assert sorted(state) == GOLDEN["names"]
    for number, key in enumerate(sorted(state)):
        scale = 0.25 if state[key].dim() > 1 else 0.9
        state[key].copy_(_waves(tuple(state[key].shape), 0.37 + 0.011 * number, scale))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1, 5:] = "short text" not in name
    images = [_waves((4, 4, 4), 0.61), _waves((4, 2, 8), 0.83)]
    count = {"one": 1, "two": 2}.get(name.removeprefix("short text, ").split()[0], 0)
    kwargs: dict[str, Tensor] = {"context": _waves((2, 9, 32), 0.53), "context_mask": mask}
    for key, shown in list(zip(("reference", "reference_2"), images, strict=True))[:count]:
        kwargs[key] = shown.expand(2, -1, -1, -1)
    found = -omnigen2.forward(module, _waves((2, 4, 4, 6), 0.71), 1 - torch.tensor([0.3, 0.85]), kwargs)
    expected = torch.tensor(GOLDEN["velocities"][name]).reshape(found.shape)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    if mask.all():  # no mask says the same
        bare = {key: value for key, value in kwargs.items() if key != "context_mask"}
        again = -omnigen2.forward(module, _waves((2, 4, 4, 6), 0.71), 1 - torch.tensor([0.3, 0.85]), bare)
        torch.testing.assert_close(again, found, atol=1e-5, rtol=0)


def test_more_reference_images_than_it_tells_apart_are_refused() -> None:
    module = OmniGen2Transformer2DModel(**GOLDEN["config"])
    x, text = _waves((1, 4, 2, 2), 0.7), _waves((1, 3, 32), 0.5)
    with pytest.raises(ValueError, match="references: found 6 images, expected up to 5"):
        module(x, torch.tensor([0.5]), text, references=[x] * 6)


def test_a_text_that_is_padded_is_read_as_the_text_alone() -> None:
    module = _model().eval().requires_grad_(False)
    check_texts_of_two_lengths(omnigen2.forward, module, 16)


def _references(tiny: TinyModel, images: list[Image.Image]) -> dict[str, Tensor]:
    """Latents of images with sides that are multiples of a patch, as the pipeline scales them; here, as in ours, what
    the encoder says is the mean."""
    vae, found = tiny.module(Role.VAE), {}
    for number, shown in enumerate(images):
        pixels = torch.from_numpy(np.asarray(shown).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
        latent = vae.encode(pixels).latent_dist.mode()
        name = "reference" if number == 0 else f"reference_{number + 1}"
        found[name] = (latent - tiny.family.latent_shift) * tiny.family.scaling_factor
    return found


def _expected(tiny: TinyModel, made: Made, images: list[Image.Image], image_cfg: float) -> Tensor:
    """The loop of `OmniGen2Pipeline.processing`: time runs from noise to image, shifted by the size of the latent."""
    module = tiny.module(Role.DIFFUSION_MODEL)
    x = ImageNoise(SEED).draw((1, *latent_shape(96, 64, 0, tiny.engine._opened(tiny.model).latent)))
    prompt, negative = (made.texts[name] for name in ("prompt_embeds", "negative_prompt_embeds"))
    shown: ModelKwargs = _references(tiny, images)
    even = np.linspace(0, 1, STEPS + 1)[:-1]
    shift = math.sqrt(x.shape[-2] * x.shape[-1]) / 40
    times = [*(even / (shift - shift * even + even)).tolist(), 1.0]
    for time, following in itertools.pairwise(times):

        def velocity(text: Tensor, inputs: ModelKwargs, time: float = time, x: Tensor = x) -> Tensor:
            found: Tensor = module(x, torch.tensor([time]), text, references=list(inputs.values()))[0]
            return found

        with torch.no_grad():
            first, last = velocity(prompt, shown), velocity(negative, {})
            found = last + CFG * (first - last)
            if images:
                second = velocity(negative, shown)
                found = last + image_cfg * (second - last) + CFG * (first - second)
        x = x + (following - time) * found
    return x


def test_runs_are_those_of_the_loop_of_its_pipeline(tmp_path: Path) -> None:
    """Without images, with one, and with two of other sizes; with each scale of the images: as much as of the text, as
    the pipeline guides without one, and 1, which leaves out the prediction without images."""
    tiny = TinyFamilyModel(tmp_path, TINY)
    both = [image(96, 64), image(32, 48)]
    for images, image_cfg in (([], 0.0), (both[:1], IMAGE_CFG), (both, IMAGE_CFG), (both, CFG), (both, 1.0)):
        fields = {"reference": images, "image_cfg": image_cfg} if images else {}
        made = tiny.made(**SIZES, **fields)
        assert_equal(made.latents[0], _expected(tiny, made, images, image_cfg))
        (work,) = (work for work in made.works.values() if isinstance(work, SampleParams))
        assert work.texts == (3 if images and image_cfg != 1 else 2)
    usual = tiny.made(**{**SIZES, "reference": both}).latents[0]
    assert torch.equal(usual, tiny.made(**SIZES, reference=both, image_cfg=2.0).latents[0])
    tiny.close()


def test_texts_are_read_with_the_template_of_the_pipeline(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, TINY)
    made = tiny.made(**{**SIZES, "steps": 1})
    tokenizer, encoder = for_transformers("qwen"), tiny.module(Role.TEXT_ENCODER)
    for text, name in ((SIZES["prompt"], "prompt_embeds"), (NEGATIVE, "negative_prompt_embeds")):
        ids = torch.tensor([tokenizer(CHAT.format(text)).input_ids])
        expected = encoder(ids, attention_mask=torch.ones_like(ids)).last_hidden_state
        torch.testing.assert_close(made.texts[name], expected, atol=2e-5, rtol=1e-4)
    texts_read = [work.text for work in tiny.made(steps=1, seed=1).works.values() if isinstance(work, EncodeParams)]
    assert texts_read[-1] == omnigen2._NEGATIVE
    tiny.close()


def test_references_keep_their_size_up_to_the_largest(tmp_path: Path) -> None:
    """As many pixels as a square of 1,024, as ComfyUI's template and the pipeline scale them; nothing is enlarged."""
    tiny = TinyFamilyModel(tmp_path, TINY)
    images = [image(40, 50), image(1365, 768), image(2048, 2048), image(16, 4096)]
    request = GenerateRequest(model="tiny", prompt="", width=64, height=64, seed=1, reference=images)
    _, graph = build_graph(InputImages(lambda result: result).bring(request)[0], JobId("job"), tiny.catalog)
    sizes = [(work.width, work.height) for work in graph.works.values() if isinstance(work, EncodeImageParams)]
    assert sizes == [(32, 48), (1360, 768), (1024, 1024), (16, 2048)]
    tiny.close()


def test_guidance_by_images_needs_images(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, TINY)
    with pytest.raises(UserError, match="image_cfg requires reference"):
        tiny.made(**SIZES, image_cfg=1.5)
    tiny.close()


def test_the_file_again_its_names_and_its_loras(tmp_path: Path) -> None:
    case = Compared(TINY, object, lambda *_: torch.empty(0), lambda *_: {}, LORAS["omnigen2"])
    case.check_namings()
    case.check_lora(tmp_path)


def test_a_folder_of_its_authors_is_the_same_model(tmp_path: Path) -> None:
    """With the text encoder in `mllm`, under the names of its class, and the configuration that tells what no shape
    does. Such a folder cannot be saved."""
    save_file(TINY.file(), tmp_path / "tiny.safetensors")
    write_tokenizers(tmp_path, TINY)
    checkpoint = open_checkpoint(tmp_path / "tiny.safetensors")
    folder = tmp_path / "folder"
    with pytest.raises(UnknownArchitecture, match="OmniGen 2 cannot be saved as a folder"):
        save_diffusers(checkpoint, folder)
    module = _model()
    parts: dict[str, tuple[str, dict[str, Tensor]]] = {}
    for key, tensor in TINY.file().items():
        for prefix, place in (
            ("model.diffusion_model.", "transformer"),
            ("text_encoders.qwen25_3b.transformer.", "mllm"),
        ):
            if key.startswith(prefix):
                parts.setdefault(place, ("", {}))[1][key.removeprefix(prefix)] = tensor
    vae = seeded(TINY.vae, 2)
    vae.register_to_config(scaling_factor=0.3611, shift_factor=0.1159)
    vae.save_pretrained(folder / "vae")
    for place, (_, tensors) in parts.items():
        (folder / place).mkdir(parents=True)
        name = "diffusion_pytorch_model" if place == "transformer" else "model"
        save_file(tensors, folder / place / f"{name}.safetensors")
    config = {key: value for key, value in module.config.items() if not key.startswith("_")}
    for place, content in (
        ("transformer/config.json", {**config, "_class_name": "OmniGen2Transformer2DModel"}),
        ("mllm/config.json", {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}),
        (
            "model_index.json",
            {
                "_class_name": "OmniGen2Pipeline",
                "mllm": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
                "transformer": ["transformer_omnigen2", "OmniGen2Transformer2DModel"],
                "vae": ["diffusers", "AutoencoderKL"],
            },
        ),
    ):
        (folder / place).write_text(json.dumps(content))
    again = open_checkpoint(folder)
    assert_same_model(checkpoint, again)


def test_separate_files_are_a_model(tmp_path: Path) -> None:
    """As ComfyUI's graphs name them: the model without a prefix, the text encoder with its vision part, which is not
    read, and an autoencoder."""
    whole, apart = tmp_path / "whole", tmp_path / "apart"
    whole.mkdir()
    apart.mkdir()
    tiny = TinyFamilyModel(whole, PUBLISHED_WIDTH)
    fields = {**SIZES, "reference": [image(96, 64), image(32, 48)], "image_cfg": IMAGE_CFG}
    expected = tiny.made(**fields).latents[0]
    roles = (Role.DIFFUSION_MODEL, Role.TEXT_ENCODER, Role.VAE)
    weights = {role: {name: t.clone() for name, t in tiny.module(role).state_dict().items()} for role in roles}
    tiny.close()
    parts: dict[str, dict[str, Tensor]] = {"omnigen2_fp16": {}, "qwen_2.5_vl_fp16": {}, "ae": {}}
    prefixes = ("model.diffusion_model.", "text_encoders.qwen25_3b.transformer.", "vae.")
    for key, tensor in load_file(whole / "tiny.safetensors").items():
        for (_, part), prefix in zip(parts.items(), prefixes, strict=True):
            if key.startswith(prefix):
                part[key.removeprefix(prefix)] = tensor
    for name, tensors in parts.items():
        save_file(tensors, apart / f"{name}.safetensors")
    shutil.copy(whole / "tokenizer_qwen25_3b/tokenizer.json", apart / "qwen_2.5_vl_fp16.tokenizer.json")
    files = [f"{name}.safetensors" for name in parts]
    said = {"format": 1, "diffusion_model": files[0], "text_encoders": [files[1]], "vae": files[2]}
    (apart / "tiny.model.json").write_text(json.dumps(said))
    tiny = TinyModel.of_folder(apart)
    # some processors round otherwise where weights begin at other places of a file
    torch.testing.assert_close(tiny.made(**fields).latents[0], expected, rtol=1e-4, atol=1e-5 * float(expected.std()))
    for role, before in weights.items():
        now = tiny.module(role).state_dict()
        assert before.keys() == now.keys()
        assert not [name for name, tensor in now.items() if not torch.equal(tensor, before[name])]
    tiny.close()


@pytest.mark.counted
def test_it_runs_within_what_was_counted_and_steps_do_not_wait_for_the_device(tmp_path: Path) -> None:
    """On the simulated device, where what a task takes is measured, with and without images; and streamed weights make
    what resident ones make."""
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    tiny = TinyFamilyModel(tmp_path, TINY, device="sim")
    shown = {"reference": [image(96, 64), image(32, 48)]}
    for fields in ({}, shown, {**shown, "prompt": "a cat"}, {**shown, "image_cfg": 1.0}):
        made = tiny.made(**{**SIZES, **fields})
        for task, cost in zip(made.tasks, made.costs, strict=True):
            if isinstance(made.works[task.task_id], SampleParams | EncodeParams | EncodeImageParams):
                assert cost.working_bytes <= task.activation_bytes <= 1.35 * cost.working_bytes
    (task,) = (one for one in made.tasks if isinstance(made.works[one.task_id], SampleParams))
    recorder = WaitRecorder(is_recording=False)
    with recorder:
        inputs = results_read(task, made.results)
        tiny.engine.run(task, made.works[task.task_id], inputs, recorder.hooks_of_step(1))
    assert set(recorder.places) <= {SENT}, recorder.places
    tiny.close()
    settings = EngineSettings("sim", budget_bytes=1 << 28, vram_policy=VramPolicy.NONE)
    streamed = Whole(tmp_path, TINY, write=False, settings=settings)
    work = made.works[task.task_id]
    again, _ = streamed.engine.run(task, work, inputs, QUIET)
    assert isinstance(again, Latent)
    np.testing.assert_allclose(again.samples_CHW, made.latents[0][0], atol=1e-5)
    streamed.engine.close()
