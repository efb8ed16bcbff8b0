"""Images of Flux with IP-Adapters: those of XLabs are those of diffusers' pipeline on the same weights, texts and
noise, and those of InstantX those of the same pipeline with attentions as its authors describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPImageProcessor, SiglipImageProcessor

from modelpool.pool.catalog.registry.file_purpose import FileKind, kind_of_keys
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.image_prompts.adapter import plan_adapter
from modelpool.pool.models.components.vision.build_vision_encoder import measured_vision
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.image_prompt_blocks import BLOCK, block_factor
from modelpool.pool.values.core.stage_params import BatchMember, Latent
from modelpool.pool.values.specs.spec import Role, Stage
from tests.pool.families.test_from_images import image
from tests.pool.families.test_transformer_controlnets import CFG, FIELDS, HEIGHT, SEED, STEPS, WIDTH
from tests.pool.families.tiny_model import QUIET, Made
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.tiny_transformers import WIDTH as TEXT_WIDTH
from tests.pool.families.told_pipelines import parts_of, texts_of
from tests.pool.inference.image_prompts.tiny_adapters import (
    PROJECTED,
    SIDE,
    State,
    flat,
    siglip,
    vision_encoder,
    write_encoder,
)
from tests.pool.input_names import results_read

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TOLERANCE = 1e-5
#: keys and values are counted in addition to a peak at which some are not read
MOST_OVER = 0.1
#: width of the tiny model, and its double and single blocks
INNER, DOUBLE, SINGLE = 64, 2, 2
SIGLIP_WIDTH = 32


def _linear(found: State, name: str, rows: int, columns: int, bias: bool = True) -> None:
    found[f"{name}.weight"] = torch.randn(rows, columns) / columns**0.5
    if bias:
        found[f"{name}.bias"] = torch.randn(rows) * 0.1


def xlabs(seed: int, tokens: int = 4) -> dict[str, State]:
    """The two tables of an adapter, as diffusers reads them from a file of XLabs."""
    torch.manual_seed(seed)
    projection: State = {"norm.weight": 1 + torch.randn(TEXT_WIDTH) * 0.1, "norm.bias": torch.randn(TEXT_WIDTH) * 0.1}
    _linear(projection, "proj", tokens * TEXT_WIDTH, PROJECTED)
    layers: State = {}
    for number in range(DOUBLE):
        for name in "kv":
            _linear(layers, f"{number}.to_{name}_ip", INNER, TEXT_WIDTH)
    return {"image_proj": projection, "ip_adapter": layers}


def as_xlabs(tables: dict[str, State]) -> State:
    """The names in a file of XLabs."""
    found = {f"ip_adapter_proj_model.{name}": tensor for name, tensor in tables["image_proj"].items()}
    for key, tensor in tables["ip_adapter"].items():
        number, layer, part = key.split(".")
        found[f"double_blocks.{number}.processor.ip_adapter_double_stream_{layer[3]}_proj.{part}"] = tensor
    return found


def instantx(seed: int, tokens: int = 8) -> dict[str, State]:
    """The two tables of a file of InstantX."""
    torch.manual_seed(seed)
    projection: State = {"norm.weight": 1 + torch.randn(TEXT_WIDTH) * 0.1, "norm.bias": torch.randn(TEXT_WIDTH) * 0.1}
    _linear(projection, "proj.0", 2 * SIGLIP_WIDTH, SIGLIP_WIDTH)
    _linear(projection, "proj.2", tokens * TEXT_WIDTH, 2 * SIGLIP_WIDTH)
    layers: State = {}
    for number in range(DOUBLE + SINGLE):
        for name in "kv":
            _linear(layers, f"{number}.to_{name}_ip", INNER, TEXT_WIDTH, bias=False)
    return {"image_proj": projection, "ip_adapter": layers}


class _InAttention(FluxAttnProcessor):  # type: ignore[misc] # diffusers is not typed
    """Adds the attention to an image to a block's, before its projection."""

    def __init__(self, key: Tensor, value: Tensor, scale: float) -> None:
        super().__init__()
        self._key, self._value, self._scale = key, value, scale

    def __call__(self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Any = None, *args: Any) -> Any:
        query, key, value = (
            rows.unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for rows in (attn.to_q(hidden_states), self._key, self._value)
        )
        key = key / (key.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        weights = (attn.norm_q(query) @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
        added = (weights @ value).transpose(1, 2).flatten(2) * self._scale
        out = super().__call__(attn, hidden_states, encoder_hidden_states, *args)
        if encoder_hidden_states is None:
            return out + added
        return out[0] + added @ attn.to_out[0].weight.T, out[1]


class Adapted:
    """A tiny Flux with IP-Adapters of both kinds, and their vision encoders."""

    def __init__(self, folder: Path) -> None:
        self.encoder, self.siglip = vision_encoder(), siglip()
        write_encoder(folder / "clip_vision" / "clip", self.encoder)
        write_encoder(folder / "clip_vision" / "siglip", self.siglip)
        self.tables = {"one": xlabs(1), "two": xlabs(2), "instant": instantx(3)}
        (folder / "ipadapter").mkdir()
        save_file(as_xlabs(self.tables["one"]), folder / "ipadapter" / "one.safetensors")
        save_file(flat(self.tables["two"]), folder / "ipadapter" / "two.safetensors")
        save_file(flat(self.tables["instant"]), folder / "ipadapter" / "instant.safetensors")
        self.tiny = TinyFamilyModel(folder, FAMILIES["flux_dev"])

    def latent(self, made: Made, prepare: Callable[[Any], Any], **more: Any) -> Tensor:
        """What diffusers comes to after `prepare`."""
        vae, model = parts_of(self.tiny)
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=1.15, base_shift=0.5)
        size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
        pipeline = diffusers.FluxPipeline(
            scheduler, vae, None, None, None, None, model, self.encoder, CLIPImageProcessor(**size)
        )
        pipeline.set_progress_bar_config(disable=True)
        processors = dict(model.attn_processors)
        try:
            prepare(pipeline)
            found = pipeline(
                **texts_of(made), width=WIDTH, height=HEIGHT, num_inference_steps=STEPS, guidance_scale=CFG,
                output_type="latent", generator=torch.Generator().manual_seed(SEED), **more,
            ).images  # fmt: skip
        finally:
            model.set_attn_processor(processors)
        unpacked: Tensor = pipeline._unpack_latents(found, HEIGHT, WIDTH, pipeline.vae_scale_factor)
        return unpacked

    def of_xlabs(self, made: Made, names: tuple[str, ...], scales: Any, **more: Any) -> Tensor:
        def prepare(pipeline: Any) -> None:
            tables = [self.tables[name] for name in names]
            pipeline.load_ip_adapter(
                tables if len(tables) > 1 else tables[0], weight_name=[""] * len(names), low_cpu_mem_usage=False,
                image_encoder_pretrained_model_name_or_path=None,
            )  # fmt: skip
            pipeline.set_ip_adapter_scale(scales)

        try:
            return self.latent(made, prepare, ip_adapter_image=[image()] * len(names), **more)
        finally:
            model: Any = self.tiny.module(Role.DIFFUSION_MODEL)
            model.encoder_hid_proj = None
            model.register_to_config(encoder_hid_dim_type=None)

    def of_instantx(self, made: Made, scale: float, images: int = 1) -> Tensor:
        processor = SiglipImageProcessor(size={"height": SIDE, "width": SIDE})
        table = self.tables["instant"]
        with torch.no_grad():
            seen = self.siglip(**processor(image(), return_tensors="pt")).pooler_output
            p, functional = table["image_proj"], torch.nn.functional
            x = functional.gelu(functional.linear(seen, p["proj.0.weight"], p["proj.0.bias"]))
            x = functional.linear(x, p["proj.2.weight"], p["proj.2.bias"]).reshape(1, -1, TEXT_WIDTH)
            tokens = functional.layer_norm(x, (TEXT_WIDTH,), p["norm.weight"], p["norm.bias"]).repeat(1, images, 1)

        def prepare(pipeline: Any) -> None:
            names = list(pipeline.transformer.attn_processors)
            layers = table["ip_adapter"]
            pipeline.transformer.set_attn_processor(
                {
                    name: _InAttention(*(tokens @ layers[f"{n}.to_{x}_ip.weight"].T for x in "kv"), scale)
                    for n, name in enumerate(names)
                }
            )

        return self.latent(made, prepare)


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    found = Adapted(tmp_path_factory.mktemp("flux"))
    yield found
    found.tiny.close()


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def used(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "image": image(), **more}


def test_those_of_xlabs_are_those_of_diffusers(flux: Adapted) -> None:
    """With the names of XLabs' files, and diffusers'; by block; in a part of the steps; and two at once."""
    plain = flux.tiny.made(**FIELDS).latents[0]
    for prompt, scales in (
        ({"strength": 0.7}, 0.7),
        ({"strength": 0.5, "blocks": {"double.1": 1.5}}, [0.0, 0.75]),
    ):
        made = flux.tiny.made(image_prompts=[used("one", **prompt)], **FIELDS)
        assert_close(made.latents[0], flux.of_xlabs(made, ("one",), scales))
        assert not torch.allclose(made.latents[0], plain, atol=1e-2)

    def off(pipeline: Any, step: int, level: Any, values: Any) -> Any:
        pipeline.set_ip_adapter_scale(0.7 if step + 1 < STEPS * 0.5 else 0.0)
        return {}

    made = flux.tiny.made(image_prompts=[used("one", strength=0.7, end=0.5)], **FIELDS)
    assert_close(made.latents[0], flux.of_xlabs(made, ("one",), 0.7, callback_on_step_end=off))
    made = flux.tiny.made(image_prompts=[used("one", strength=0.7), used("two", strength=0.3)], **FIELDS)
    assert_close(made.latents[0], flux.of_xlabs(made, ("one", "two"), [0.7, 0.3]))


def test_those_of_instantx_are_those_of_its_attentions(flux: Adapted) -> None:
    """For one image, and for two equal ones."""
    made = flux.tiny.made(image_prompts=[used("instant", strength=0.8)], **FIELDS)
    assert_close(made.latents[0], flux.of_instantx(made, 0.8))
    assert not torch.allclose(made.latents[0], flux.tiny.made(**FIELDS).latents[0], atol=1e-2)
    made = flux.tiny.made(image_prompts=[used("instant", image=[image()] * 2, strength=0.4)], **FIELDS)
    assert_close(made.latents[0], flux.of_instantx(made, 0.4, images=2))


def test_files_in_circulation_are_recognised() -> None:
    """In their names and sizes: flux-ip-adapter of XLabs, its second version, and FLUX.1-dev-IP-Adapter of InstantX."""
    for tokens in (4, 16):
        projection = {"proj.weight": (tokens * 4096, 768), "proj.bias": (tokens * 4096,)}
        projection |= {"norm.weight": (4096,), "norm.bias": (4096,)}
        shapes: dict[str, tuple[int, ...]] = {f"ip_adapter_proj_model.{key}": at for key, at in projection.items()}
        for number in range(19):
            for name in "kv":
                base = f"double_blocks.{number}.processor.ip_adapter_double_stream_{name}_proj"
                shapes |= {f"{base}.weight": (3072, 4096), f"{base}.bias": (3072,)}
        assert kind_of_keys(shapes, is_diffusion_model=False) is FileKind.IMAGE_PROMPT
        plan = plan_adapter(shapes)
        assert (plan.kind.title, plan.tokens, plan.state_width) == ("IP-Adapter of Flux by XLabs", tokens, 768)
        assert plan.empty().to_k[18].bias is not None
    shapes = {
        "image_proj.proj.0.weight": (2304, 1152), "image_proj.proj.0.bias": (2304,),
        "image_proj.proj.2.weight": (128 * 4096, 2304), "image_proj.proj.2.bias": (128 * 4096,),
        "image_proj.norm.weight": (4096,), "image_proj.norm.bias": (4096,),
        **{f"ip_adapter.{n}.to_{name}_ip.weight": (3072, 4096) for n in range(57) for name in "kv"},
    }  # fmt: skip
    assert kind_of_keys(shapes, is_diffusion_model=False) is FileKind.IMAGE_PROMPT
    plan = plan_adapter(shapes)
    assert (plan.kind.title, plan.tokens, plan.state_width) == ("IP-Adapter of Flux by InstantX", 128, 1152)
    assert plan.face_width == 0
    plan.empty()


def test_clip_l_of_openai_has_its_activation() -> None:
    """Which those of XLabs read, and no tensor tells."""
    names: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (1024, 3, 14, 14), "embeddings.position_embedding.weight": (257, 1024),
        "encoder.layers.0.mlp.fc1.weight": (4096, 1024), "visual_projection.weight": (768, 1024),
    }  # fmt: skip
    assert measured_vision(names)["hidden_act"] == "quick_gelu"
    names["embeddings.patch_embedding.weight"] = (1280, 3, 14, 14)
    assert measured_vision(names)["hidden_act"] == "gelu"


def test_what_does_not_fit_is_refused_by_name(flux: Adapted, tmp_path: Path) -> None:
    tables = xlabs(5)
    tables["ip_adapter"] = {key: x for key, x in tables["ip_adapter"].items() if key.startswith("0.")}
    save_file(as_xlabs(tables), tmp_path / "short.safetensors")
    for prompt, expected in (
        (used("one", mask=image().convert("L")), r"image_prompts\.mask: not supported by adapter 'one': IP-Adapter of"),
        (used(str(tmp_path / "short.safetensors")), r"for Flux \(1 layers, text width 32\).*: 2 layers, text width 32"),
        (
            used("one", encoder="siglip/model"),
            r"image_prompts\.encoder: found .* expected a vision encoder with states",
        ),
    ):
        with pytest.raises(UnusableField, match=expected):
            flux.tiny.made(image_prompts=[prompt], **FIELDS)
    (tmp_path / "other").mkdir()
    other = TinyFamilyModel(tmp_path / "other", FAMILIES["chroma"])
    folder = Path(flux.tiny.model.path).parent
    prompt = used(str(folder / "ipadapter/one.safetensors"), encoder=str(folder / "clip_vision/clip/model.safetensors"))
    with pytest.raises(UnusableField, match=r"IP-Adapter of Flux by XLabs 'one'\S* for Flux.*like 'tiny' \(Chroma"):
        other.made(image_prompts=[prompt], **FIELDS)
    other.close()


def test_blocks_of_flux_have_names() -> None:
    assert all(BLOCK.fullmatch(name) for name in ("double.3", "single.37", "up.0.1", "mid"))
    assert not any(BLOCK.fullmatch(name) for name in ("double", "single.1.2", "double_3"))
    factors = (("double.3", 0.5), ("mid", 2.0))
    assert [block_factor(factors, name) for name in ("double.3", "double.4", "single.3")] == [0.5, 0.0, 0.0]
    assert block_factor((), "single.3") == 1.0


def test_they_stream_and_hold_what_was_estimated(flux: Adapted) -> None:
    """Both kinds, for several images of a batch too, on a device where nothing is resident and on one where all is."""
    fields = {**FIELDS, "image_prompts": [used("one"), used("instant", strength=0.5)]}
    tiny, budget_bytes = flux.tiny, 1 << 28
    whole, engine = tiny.made(**fields), tiny.engine
    sim.install()
    for policy in (VramPolicy.NORMAL, VramPolicy.NONE):
        sim.configure(0, budget_bytes)
        sim.recover(0)
        tiny.engine = Engine.open(EngineSettings("sim", budget_bytes=budget_bytes, vram_policy=policy))
        try:
            made = tiny.made(**fields)
        finally:
            tiny.close()
            tiny.engine = engine
        assert np.abs(made.pixels.astype(int) - whole.pixels).max() <= 1  # rounded
        if policy is VramPolicy.NORMAL:
            (sample,) = [place for place, task in enumerate(made.tasks) if task.stage is Stage.SAMPLE]
            task, working_bytes = made.tasks[sample], made.costs[sample].working_bytes
            assert working_bytes <= task.activation_bytes <= (1 + MOST_OVER) * working_bytes
        else:
            assert any(cost.streamed_bytes for cost in made.costs)


def test_tasks_of_a_batch_read_their_own_images(flux: Adapted) -> None:
    other = image().transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    members, made = [], [flux.tiny.made(image_prompts=[used("one", image=each)], **FIELDS) for each in (image(), other)]
    for one in made:
        (task,) = [task for task in one.tasks if task.stage is Stage.SAMPLE]
        members.append(BatchMember(task, one.works[task.task_id], results_read(task, one.results), QUIET))
    assert len({member.task.together for member in members}) == 1
    for outcome, one in zip(flux.tiny.engine.run_batch(members), made, strict=True):
        assert isinstance(outcome, tuple)
        latent = outcome[0]
        assert isinstance(latent, Latent)
        assert_close(torch.from_numpy(latent.samples_CHW.copy())[None], one.latents[0])
    assert not torch.allclose(made[0].latents[0], made[1].latents[0], atol=1e-3)
