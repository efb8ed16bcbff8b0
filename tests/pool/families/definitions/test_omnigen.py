"""OmniGen, compared with its pipeline in diffusers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.transformers.transformer_omnigen import OmniGenSuScaledRotaryEmbedding
from diffusers.pipelines.omnigen import pipeline_omnigen, processor_omnigen
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.features.reference_graph import text_with_images
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.families.definitions import omnigen
from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.inference.pixels.latent_pixels import latent_shape
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.diffusion.adapted_modules import _OmniGenPositions
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.describe import describe
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.saving.pipelines import scheduler_facts
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField, UserError
from modelpool.pool.values.core.stage_params import Encoded, EncodeImageParams, EncodeParams, SampleParams
from modelpool.pool.values.specs.spec import JobId, Role
from tests.pool.device_waits import WaitRecorder
from tests.pool.families.definitions.compared import Compared, FamilyTests, noise_of
from tests.pool.families.test_device_waits import SENT
from tests.pool.families.test_from_images import image
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import TinyFamily, kl_vae, words
from tests.pool.families.told_pipelines import of_folder
from tests.pool.families.whole_transformer import NEGATIVE, PROMPT, STEPS, Whole
from tests.pool.inference.conditioning.test_image_concat import assert_equal
from tests.pool.input_names import results_read
from tests.pool.models.components.diffusion.image_published import File
from tests.pool.models.text.tiny_tokenizers import for_transformers

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
HEAD, SEED = 96, 11
SIZES: dict[str, Any] = {"width": 96, "height": 64, "steps": 2, "seed": SEED, "negative": NEGATIVE}
#: longer than all that it is compared with: diffusers' pipeline has the positions of the first text for all
NAMED = "a red <img><|image_1|></img> on the moon beside <img><|image_2|></img>, in oil colours"
ROPE = {"type": "su", "short_factor": list(omnigen._SHORT_FACTORS), "long_factor": list(omnigen._LONG_FACTORS)}


@pytest.fixture(autouse=True)
def _without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pipeline needs of that library, and a negative prompt that is ours."""
    transforms = SimpleNamespace(
        Compose=lambda steps: partial(_composed, steps), Lambda=lambda step: step, ToTensor=lambda: _to_tensor,
        Normalize=lambda mean, std, inplace: lambda x: (x - mean[0]) / std[0],
    )  # fmt: skip
    monkeypatch.setattr(processor_omnigen, "transforms", transforms, raising=False)
    kind = processor_omnigen.OmniGenMultiModalProcessor
    plain: Callable[..., Any] = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *args, **more: plain(*args, **{"negative_prompt": NEGATIVE, **more}))
    monkeypatch.setattr(pipeline_omnigen, "OmniGenMultiModalProcessor", kind, raising=False)
    # it draws from what its encoder says of an image; here, as in ours, it is the mean
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda said, generator=None: said.mode())


def _composed(steps: list[Callable[[Any], Any]], x: Any) -> Any:
    for step in steps:
        x = step(x)
    return x


def _to_tensor(pixels: Image.Image) -> Tensor:
    return torch.from_numpy(np.asarray(pixels).copy()).permute(2, 0, 1).float() / 255


def _model() -> Any:
    vocabulary = words("phi3")
    return diffusers.OmniGenTransformer2DModel(
        hidden_size=2 * HEAD, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64, num_layers=2,
        pad_token_id=vocabulary - 1, vocab_size=vocabulary, rope_scaling=ROPE, pos_embed_max_size=12, time_step_dim=32,
    )  # fmt: skip


_RENAMED = (
    ("patch_embedding.pos_embed", "pos_embed"),
    ("patch_embedding.output_image_proj.", "x_embedder.proj."),
    ("patch_embedding.input_image_proj.", "input_x_embedder.proj."),
    ("norm_out.linear.", "final_layer.adaLN_modulation.1."),
    ("proj_out.", "final_layer.linear."),
    (".linear_1.", ".mlp.0."),
    (".linear_2.", ".mlp.2."),
    (".self_attn.to_out.0.", ".self_attn.o_proj."),
)


def _publish(state: Mapping[str, Tensor]) -> File:
    file: File = {}
    for key, tensor in state.items():
        name = key
        for old, new in _RENAMED:
            name = name.replace(old, new)
        if key.startswith(("layers.", "embed_tokens.", "norm.")):
            name = f"llm.{name}"
        if ".to_q." in key:
            parts = (state[key.replace("to_q", f"to_{part}")] for part in "qkv")
            file[name.replace("to_q", "qkv_proj")] = torch.cat(list(parts))
        elif ".to_k." not in key and ".to_v." not in key:
            file[name] = tensor
    return file


def _pipeline(tiny: Whole | TinyModel) -> Any:
    own, vae = tiny.module(Role.DIFFUSION_MODEL), tiny.module(Role.VAE)
    theirs = diffusers.OmniGenTransformer2DModel.from_config(own.config).eval().requires_grad_(False)
    theirs.load_state_dict(own.state_dict())
    vae.register_to_config(scaling_factor=tiny.family.scaling_factor)
    scheduler = FlowMatchEulerDiscreteScheduler(**scheduler_facts(TRANSFORMERS["omnigen"]).settings)
    pipeline = diffusers.OmniGenPipeline(theirs, scheduler, vae, for_transformers("phi3"))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _latent(whole: Whole, texts: tuple[Encoded, ...]) -> Tensor:
    width, height = whole.sides
    found: Tensor = _pipeline(whole)(
        PROMPT, height=height, width=width, num_inference_steps=STEPS, guidance_scale=2.5, latents=noise_of(whole),
        output_type="latent",
    ).images  # fmt: skip
    return found


def _texts(modules: list[Any], prompt: str) -> dict[str, Tensor]:
    processor = processor_omnigen.OmniGenMultiModalProcessor(for_transformers("phi3"))
    ids = processor.process_multi_modal_prompt(prompt, None)["input_ids"]
    return {"context": modules[0].embed_tokens(torch.tensor([ids]))}


#: the tokenizer is the tokenizer of the words, which are in the diffusion model
_NO_FILE: Any = (lambda: None, lambda _: {})
#: a weight under its published name, and the form of the names in LoRA files
LORAS = {"omnigen": ("llm.layers.0.self_attn.o_proj", "base_model.model.{}")}
CASES = {
    "omnigen": Compared(
        TinyFamily("omnigen", _model, _publish, {"omnigen_words": _NO_FILE}, lambda: kl_vae(4)),
        diffusers.OmniGenPipeline,
        _latent,
        _texts,
        LORAS["omnigen"],
    )
}
TINY = CASES["omnigen"].tiny


class TestOmniGen(FamilyTests):
    case = CASES["omnigen"]


def _noise(tiny: TinyModel) -> Tensor:
    return ImageNoise(SEED).draw((1, *latent_shape(96, 64, 0, tiny.engine._opened(tiny.model).latent)))


def _expected(tiny: TinyModel, prompt: str, images: list[Image.Image], image_cfg: float) -> Tensor:
    found: Tensor = _pipeline(tiny)(
        prompt, input_images=images, height=64, width=96, num_inference_steps=2, guidance_scale=2.5,
        img_guidance_scale=image_cfg, latents=_noise(tiny), output_type="latent",
    ).images  # fmt: skip
    return found


def test_images_are_read_where_a_text_names_them_as_the_pipeline_does(tmp_path: Path) -> None:
    """In the order of their numbers, of different sizes, one of them twice."""
    tiny = TinyFamilyModel(tmp_path, TINY)
    images = [image(96, 64), image(32, 48)]
    for prompt, fields in (
        (NAMED, {}),
        (NAMED, {"image_cfg": 1.2}),
        (NAMED, {"image_cfg": 1.0}),
        ("<img><|image_2|></img> as large as <img><|image_1|></img>, and <img><|image_2|></img> again", {}),
    ):
        made = tiny.made(prompt=prompt, reference=images, **SIZES, **fields)
        assert_equal(made.latents[0], _expected(tiny, prompt, images, fields.get("image_cfg", 1.6)))
    (work,) = (work for work in made.works.values() if isinstance(work, SampleParams))
    assert work.guidance.without_image
    tiny.close()


def _one_text_at_a_time(tiny: TinyModel, texts: tuple[str, str], steps: int) -> Tensor:
    """What diffusers' class makes of a prompt and a negative prompt that are no batch, as in the original code."""
    pipeline, x = _pipeline(tiny), _noise(tiny)
    processor = pipeline.multimodal_processor
    for step in range(steps):
        found = []
        for text in texts:
            read = processor.process_multi_modal_prompt(text, None)
            ids, places, mask, *_ = processor.collator.process_mllm_input([read], [[64, 96]])
            with torch.no_grad():
                found.append(pipeline.transformer(x, torch.tensor([step / steps]), ids, [], {}, mask, places).sample)
        x = x + (found[1] + 2.5 * (found[0] - found[1])) / steps
    return x


def test_a_prompt_that_is_shorter_than_the_negative_prompt_leaves_its_positions_alone(tmp_path: Path) -> None:
    """In a batch, diffusers' class has the positions of the first text for all: those of the usual negative prompt,
    which is long, then begin with many zeros. When this is mended there, the pipeline makes what ours makes."""
    tiny = TinyFamilyModel(tmp_path, TINY)
    asked = {name: value for name, value in SIZES.items() if name != "negative"}
    ours = tiny.made(prompt="a cat", **asked).latents[0]
    assert_equal(ours, _one_text_at_a_time(tiny, ("a cat", omnigen._NEGATIVE), 2))
    pipeline = _pipeline(tiny)
    processor = pipeline.multimodal_processor
    pipeline.multimodal_processor = lambda *args, **more: processor(*args, negative_prompt=omnigen._NEGATIVE, **more)
    pipeline.multimodal_processor.max_image_size = processor.max_image_size
    theirs = pipeline(
        "a cat", height=64, width=96, num_inference_steps=2, guidance_scale=2.5, latents=_noise(tiny),
        output_type="latent",
    ).images  # fmt: skip
    assert not np.allclose(ours, theirs, atol=1e-3)
    tiny.close()


def test_a_text_without_names_has_them_in_front(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, TINY)
    images = [image(96, 64), image(32, 48)]
    named = "<img><|image_1|></img> <img><|image_2|></img> a red cat"
    ours, expected = (tiny.made(prompt=text, reference=images, **SIZES).latents[0] for text in ("a red cat", named))
    assert torch.equal(ours, expected)
    assert not torch.allclose(tiny.made(prompt="a red cat", **SIZES).latents[0], expected, atol=1e-3)
    tiny.close()


def test_a_number_of_thousands_of_digits_names_no_image() -> None:
    """Python refuses to read it."""
    text = f"<|image_{'1' * 5000}|>"
    assert text_with_images(text, 0) == text


def test_what_is_named_and_what_is_given_go_together(tmp_path: Path) -> None:
    tiny = TinyFamilyModel(tmp_path, TINY)
    some = [image(96, 64), image(32, 48)]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "<img><|image_1|></img>"}, "prompt: found '<|image_1|>', expected no name of an image"),
        (
            {"prompt": "<img><|image_2|></img>", "reference": some},
            "prompt: found '<|image_2|>', expected <img><|image_1",
        ),
        ({"prompt": NAMED, "reference": some[0]}, "prompt: found '<|image_1|>, <|image_2|>', expected <img><|image_1"),
        ({"negative": "<img><|image_1|></img>", "reference": some[0]}, "negative: found"),
        ({"image_cfg": 1.5}, "image_cfg requires reference"),
    ]
    for fields, why in refused:
        with pytest.raises(UserError) as raised:
            tiny.made(**{**SIZES, **fields})
        assert why in str(raised.value)
    tiny.close()


def test_references_keep_their_size_up_to_the_largest_and_requests_avoid_what_the_pipeline_avoids(
    tmp_path: Path,
) -> None:
    tiny = TinyFamilyModel(tmp_path, TINY)
    made = tiny.made(reference=[image(40, 50), image(16, 96), image(2, 96)], width=96, height=64, steps=1)
    sizes = [(work.width, work.height) for work in made.works.values() if isinstance(work, EncodeImageParams)]
    assert sizes == [(32, 48), (16, 96), (16, 96)]
    texts = [work.text for work in made.works.values() if isinstance(work, EncodeParams)]
    assert texts[1:] == ["<img><|image_1|></img> <img><|image_2|></img> <img><|image_3|></img>", omnigen._NEGATIVE]
    facts = TRANSFORMERS["omnigen"].sampling
    assert facts.reference_side == 1024
    tiny.close()


def test_texts_of_a_batch_that_name_images_elsewhere_run_alone() -> None:
    whole: Any = plan_diffusion_model({key: tuple(x.shape) for key, x in _model().state_dict().items()})
    module = whole.build({key: torch.randn(x.shape) * 0.1 for key, x in _model().state_dict().items()})
    x, text, level = torch.randn(2, 4, 4, 6), torch.randn(2, 9, 2 * HEAD), torch.tensor([0.4, 0.7])
    kwargs = {
        "context": text, "reference": torch.randn(2, 4, 2, 4), "image_places": torch.tensor([[[3, 1]], [[5, 1]]]),
    }  # fmt: skip
    with torch.no_grad():
        both = omnigen.forward(module, x, level, kwargs)
        alone = omnigen.forward(module, x[1:], level[1:], {name: value[1:] for name, value in kwargs.items()})
    torch.testing.assert_close(both[1:], alone)


def test_positions_are_those_of_diffusers_in_sequences_of_all_lengths() -> None:
    known = OmniGenSuScaledRotaryEmbedding(HEAD, rope_scaling=ROPE)
    ours = _OmniGenPositions(known)
    for length in (9, 4096, 4097):
        places = torch.arange(length)[None]
        torch.testing.assert_close(ours(places, places), known(places, places), rtol=0.0, atol=2e-4)
    with pytest.raises(ValueError, match="expected 16 each"):
        _OmniGenPositions(OmniGenSuScaledRotaryEmbedding(32, rope_scaling=ROPE))


def test_a_folder_is_the_same_model_for_both(tmp_path: Path) -> None:
    """From the words of a prompt on: with the tokenizer and the scheduler of the folder. The table of words is in the
    diffusion model, and its bytes are counted once."""
    tiny = TinyFamilyModel(tmp_path, TINY)
    made = tiny.made(prompt=PROMPT, **SIZES)
    described = describe(tmp_path / "tiny.safetensors")
    assert described.other_bytes == 0
    (tmp_path / "other").mkdir()
    saved = save_diffusers(open_checkpoint(tmp_path / "tiny.safetensors"), tmp_path / "other" / "tiny")
    assert (saved.missing, saved.left_out) == ((), ())
    pipeline = of_folder(saved.path)
    theirs = pipeline(
        PROMPT, height=64, width=96, num_inference_steps=2, guidance_scale=2.5, latents=_noise(tiny),
        output_type="latent",
    ).images  # fmt: skip
    assert_equal(made.latents[0], theirs)
    tiny.close()
    folder = TinyModel.of_folder(tmp_path / "other")
    assert torch.equal(folder.made(prompt=PROMPT, **SIZES).latents[0], made.latents[0])
    folder.close()


def test_separate_files_are_a_model(tmp_path: Path) -> None:
    """As published: the model under its own names, without a prefix, and its tokenizer next to it; an autoencoder."""
    whole = tmp_path / "whole"
    whole.mkdir()
    tiny = TinyFamilyModel(whole, TINY)
    expected = tiny.made(prompt=NAMED, reference=[image(96, 64), image(32, 48)], **SIZES).latents[0]
    tiny.close()
    parts: dict[str, File] = {"omnigen": {}, "vae": {}}
    for key, tensor in load_file(whole / "tiny.safetensors").items():
        is_vae = key.startswith("vae.")
        parts["vae" if is_vae else "omnigen"][key if is_vae else key.removeprefix("model.diffusion_model.")] = tensor
    apart = tmp_path / "apart"
    apart.mkdir()
    for name, tensors in parts.items():
        save_file(tensors, apart / f"{name}.safetensors")
    shutil.copy(whole / "tokenizer_omnigen_words/tokenizer.json", apart / "omnigen.tokenizer.json")
    said = {"format": 1, "diffusion_model": "omnigen.safetensors", "vae": "vae.safetensors"}
    (apart / "tiny.model.json").write_text(json.dumps(said))
    tiny = TinyModel.of_folder(apart)
    made = tiny.made(prompt=NAMED, reference=[image(96, 64), image(32, 48)], **SIZES)
    assert torch.equal(made.latents[0], expected)
    tiny.close()


def _within(made: Made) -> None:
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if isinstance(made.works[task.task_id], SampleParams | EncodeParams):
            assert cost.working_bytes <= task.activation_bytes <= 1.3 * cost.working_bytes


@pytest.mark.counted
def test_it_runs_within_what_was_counted_and_steps_do_not_wait_for_the_device(tmp_path: Path) -> None:
    """On the simulated device, where what a task takes is measured."""
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    tiny = TinyFamilyModel(tmp_path, TINY, device="sim")
    for fields in ({}, {"prompt": NAMED, "reference": [image(96, 64), image(32, 48)]}):
        made = tiny.made(**SIZES, **fields)
        _within(made)
    (task,) = (one for one in made.tasks if isinstance(made.works[one.task_id], SampleParams))
    recorder = WaitRecorder(is_recording=False)
    with recorder:
        inputs = results_read(task, made.results)
        tiny.engine.run(task, made.works[task.task_id], inputs, recorder.hooks_of_step(1))
    assert set(recorder.places) <= {SENT}, recorder.places
    tiny.close()


def test_published_sizes_are_recognised_and_impossible_ones_refused() -> None:
    with torch.device("meta"):
        state = diffusers.OmniGenTransformer2DModel(rope_scaling=ROPE, num_layers=1).state_dict()
    for file in (state, _publish(state)):
        shapes = {key: tuple(value.shape) for key, value in file.items()}
        plan = plan_diffusion_model(shapes)
        assert plan.recognised.name == "omnigen"
        assert (plan.config["num_attention_heads"], plan.config["pad_token_id"]) == (32, 32000)
        found = recognise_diffusion(shapes)
        assert found is not None
        assert found.latent == "sdxl"
        with pytest.raises(UnknownArchitecture, match="found a width of 100, expected a multiple of 96"):
            omnigen.config({**found.config, "hidden_size": 100}, plan.key_map.shapes)


def test_a_name_of_an_image_is_a_place_of_its_own(tmp_path: Path) -> None:
    """Words around it are tokenized separately, and it has no weight."""
    tiny = TinyFamilyModel(tmp_path, TINY)
    made = tiny.made(prompt="(a red:1.2) <img><|image_1|></img> cat", reference=image(32, 48), **SIZES)
    read = [text for text in made.results.values() if isinstance(text, Encoded)]
    places = [text.others["image_places"].tolist() for text in read]
    assert [[number for _, number in each] for each in places] == [[1], [1], []]
    with pytest.raises(UnusableField, match="reference_as"):
        tiny.made(reference=image(32, 48), reference_as="whole", **SIZES)
    tiny.close()


def test_a_negative_prompt_that_is_not_read_is_warned_of(tmp_path: Path) -> None:
    """Without guidance by the images nothing is predicted for it; one that the request does not set is not missed."""
    tiny = TinyFamilyModel(tmp_path, TINY)
    found = []
    for fields in ({"image_cfg": 1.0}, {"image_cfg": 1.2}, {"image_cfg": 1.0, "negative": None}):
        said = {name: value for name, value in {**SIZES, **fields}.items() if value is not None}
        request, _ = InputImages(lambda result: result).bring(
            GenerateRequest(model="tiny", prompt="a cat", reference=image(32, 48), **said)
        )
        found.append(build_graph(request, JobId("job"), tiny.catalog)[1].warnings)
    assert [len(each) for each in found] == [1, 0, 0]
    assert found[0][0].startswith("negative: ignored, model 'tiny' reads it with image_cfg above 1 only")
    tiny.close()
