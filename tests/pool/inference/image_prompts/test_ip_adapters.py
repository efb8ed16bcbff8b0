"""Images with IP-Adapters are those of diffusers' pipelines on the same weights and noise: every published kind, for
SD1 and SDXL, several images and adapters, blocks, and a part of the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.image_processor import IPAdapterMaskProcessor
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPImageProcessor

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.outputs.recipe_json import recipe_from_text
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.folder_scan import WeightsFile
from modelpool.pool.catalog.registry.registry import Registry
from modelpool.pool.inference.image_prompts.prompt_run import attention_grid
from modelpool.pool.inference.sampling.schedules import levels_of, sigma_table
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import BatchMember, Latent, SamplingSchedule, VisionEncodeParams
from modelpool.pool.values.specs.spec import JobId, Role, Stage
from tests.pool.families.test_controlnets import CFG, FIELDS, IMAGES, SEED, SIZE, STEPS
from tests.pool.families.tiny_model import QUIET, Made, TinyModel, euler
from tests.pool.inference.image_prompts.tiny_adapters import (
    FACE,
    SIDE,
    flat,
    ip_adapter,
    layers_for,
    siglip,
    vision_encoder,
    write_encoder,
)
from tests.pool.input_names import results_read
from tests.pool.models.loading import layouts

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
TOLERANCE = 1e-5
#: a size whose levels diffusers derives from the number of rows
WIDE = {"width": 128, "height": 64}


class Adapted:
    """A tiny model with IP-Adapters for it, and their vision encoder, in its folder."""

    def __init__(self, folder: Path, layout: Any, kinds: tuple[str, ...]) -> None:
        self.tiny = TinyModel(folder, layout)
        self.encoder = vision_encoder()
        write_encoder(folder / "clip_vision" / "image_encoder", self.encoder)
        (folder / "ipadapter").mkdir()
        layers = layers_for(self.tiny.module(Role.DIFFUSION_MODEL))
        self.tables = {kind: ip_adapter(kind, layers, seed) for seed, kind in enumerate(kinds)}
        for kind, tables in self.tables.items():
            save_file(flat(tables), folder / "ipadapter" / f"{kind}.safetensors")

    def latent(
        self,
        made: Made,
        names: tuple[str, ...],
        scales: list[Any],
        prepare: Callable[[Any], None] = lambda pipeline: None,
        **more: Any,
    ) -> Tensor:
        """What diffusers comes to with these adapters, after `prepare`."""
        tiny = self.tiny
        size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
        parts: dict[str, Any] = {"vae": tiny.module(Role.VAE), "unet": tiny.module(Role.DIFFUSION_MODEL)}
        parts |= {"scheduler": euler(), "text_encoder": None, "tokenizer": None, "image_encoder": self.encoder}
        parts["feature_extractor"] = CLIPImageProcessor(**size)
        if tiny.family.name == "sdxl":
            pipeline: Any = StableDiffusionXLPipeline(
                **parts, text_encoder_2=None, tokenizer_2=None, add_watermarker=False
            )
        else:
            pipeline = StableDiffusionPipeline(**parts, safety_checker=None, requires_safety_checker=False)
        pipeline.set_progress_bar_config(disable=True)
        processors = dict(pipeline.unet.attn_processors)
        tables = [self.tables[name] for name in names]
        try:
            pipeline.load_ip_adapter(
                tables if len(tables) > 1 else tables[0], subfolder="", weight_name=[""] * len(names),
                image_encoder_folder=None, low_cpu_mem_usage=False,
            )  # fmt: skip
            pipeline.set_ip_adapter_scale(scales if len(scales) > 1 else scales[0])
            prepare(pipeline)
            found: Tensor = pipeline(
                **made.texts, **{**SIZE, **more}, num_inference_steps=STEPS, guidance_scale=CFG, output_type="latent",
                generator=torch.Generator().manual_seed(SEED),
            ).images  # fmt: skip
        finally:
            pipeline.unet.encoder_hid_proj = None
            pipeline.unet.config.encoder_hid_dim_type = None
            pipeline.unet.set_attn_processor(processors)
        return found


@pytest.fixture(scope="module")
def sd1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    kinds = ("base", "full", "plus", "faceid", "faceid_plus")
    found = Adapted(tmp_path_factory.mktemp("sd1"), layouts.tiny_sd1(), kinds)
    yield found
    found.tiny.close()


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    found = Adapted(tmp_path_factory.mktemp("sdxl"), layouts.tiny_sdxl(), ("base", "plus"))
    yield found
    found.tiny.close()


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def used(name: str, **more: Any) -> dict[str, Any]:
    return {"model": name, "image": IMAGES["canny"], **more}


@pytest.mark.parametrize("kind", ["base", "full", "plus"])
def test_each_kind_is_that_of_diffusers(sd1: Adapted, kind: str) -> None:
    made = sd1.tiny.made(image_prompts=[used(kind, strength=0.7)], **SIZE, **FIELDS)
    expected = sd1.latent(made, (kind,), [0.7], ip_adapter_image=IMAGES["canny"])
    assert_close(made.latents[0], expected)
    assert not torch.allclose(made.latents[0], sd1.tiny.made(**SIZE, **FIELDS).latents[0], atol=1e-2)


def test_those_of_sdxl_are_those_of_diffusers(sdxl: Adapted) -> None:
    for kind in ("base", "plus"):
        made = sdxl.tiny.made(image_prompts=[used(kind, strength=0.7)], **SIZE, **FIELDS)
        assert_close(made.latents[0], sdxl.latent(made, (kind,), [0.7], ip_adapter_image=IMAGES["canny"]))


def test_several_images_and_adapters_at_once_are_those_of_diffusers(sd1: Adapted) -> None:
    """Each adapter is loaded once, and the encodings of an image are shared."""
    images = [IMAGES["canny"], IMAGES["depth"]]
    prompts = [used("base", image=images, strength=0.6), used("plus", strength=0.4)]
    made = sd1.tiny.made(image_prompts=prompts, **SIZE, **FIELDS)
    expected = sd1.latent(made, ("base", "plus"), [0.6, 0.4], ip_adapter_image=[images, images[0]])
    assert_close(made.latents[0], expected)
    (sample,) = [task for task in made.tasks if len(task.uses) > 1]
    assert [use.passes for use in sample.uses] == [STEPS, 1, 1]
    roles = [spec.role for spec in made.components]
    assert (roles.count(Role.IMAGE_PROMPT), roles.count(Role.VISION_ENCODER)) == (2, 1)


def halves() -> list[Image.Image]:
    """Masks of the left and of the lower half of an output of `WIDE`."""
    left, low = np.zeros((2, WIDE["height"], WIDE["width"]), np.uint8)
    left[:, : WIDE["width"] // 2], low[WIDE["height"] // 2 :] = 255, 255
    return [Image.fromarray(mask) for mask in (left, low)]


def test_masks_are_those_of_diffusers(sd1: Adapted) -> None:
    """One mask for an image; one for each of several images; and an adapter that acts everywhere next to them."""
    left, low = halves()
    processed = IPAdapterMaskProcessor().preprocess([left, low], **WIDE)
    images = [IMAGES["canny"], IMAGES["depth"]]
    for prompts, names, scales, seen, masks in (
        ([used("base", mask=left, strength=0.7)], ("base",), [0.7], images[0], [processed[:1][None, :, 0]]),
        (
            [used("base", image=images, mask=[left, low], strength=0.6), used("plus", mask=low, strength=0.4)],
            ("base", "plus"),
            [[0.6, 0.6], 0.4],
            [images, images[0]],
            [processed[None, :, 0], processed[1:][None, :, 0]],
        ),
        (
            [used("base", mask=low), used("plus", strength=0.4)],
            ("base", "plus"),
            [1.0, 0.4],
            [images[0], images[0]],
            [processed[1:][None, :, 0], torch.ones_like(processed[1:][None, :, 0])],
        ),
    ):
        made = sd1.tiny.made(image_prompts=prompts, **WIDE, **FIELDS)
        more = {"ip_adapter_image": seen, "cross_attention_kwargs": {"ip_adapter_masks": masks}, **WIDE}
        assert_close(made.latents[0], sd1.latent(made, names, scales, **more))


def test_a_white_mask_changes_nothing(sd1: Adapted) -> None:
    """Also for several images that it covers together, and where the levels of the model have odd sides."""
    several = used("base", image=[IMAGES["canny"], IMAGES["depth"]])
    plain = sd1.tiny.made(image_prompts=[several], **SIZE, **FIELDS).latents[0]
    white = {**several, "mask": Image.new("L", (32, 32), 255)}
    assert_close(sd1.tiny.made(image_prompts=[white], **SIZE, **FIELDS).latents[0], plain)
    assert [attention_grid(rows, (9, 12)) for rows in (108, 30, 9, 4)] == [(9, 12), (5, 6), (3, 3), (2, 2)]


def test_tasks_of_a_batch_have_their_own_masks(sd1: Adapted) -> None:
    """The negative prompt of each, too."""
    tiny, members = sd1.tiny, []
    made = [tiny.made(image_prompts=[used("base", mask=mask)], **WIDE, **FIELDS) for mask in halves()]
    for one in made:
        (task,) = [task for task in one.tasks if task.stage is Stage.SAMPLE]
        members.append(BatchMember(task, one.works[task.task_id], results_read(task, one.results), QUIET))
    assert len({member.task.together for member in members}) == 1
    outcomes = tiny.engine.run_batch(members)
    for outcome, one in zip(outcomes, made, strict=True):
        assert isinstance(outcome, tuple)
        latent = outcome[0]
        assert isinstance(latent, Latent)
        assert_close(torch.from_numpy(latent.samples_CHW.copy())[None], one.latents[0])
    assert not torch.allclose(made[0].latents[0], made[1].latents[0], atol=1e-2)


def test_masks_that_cannot_act_are_refused_by_name(sd1: Adapted) -> None:
    left, low = halves()
    tiled = {"tiled": {"tile": 64, "overlap": 8}}
    for prompt, more, expected in (
        (used("base", mask=left), {"options": tiled}, r"options\.tiled: found together with image_prompts\.mask"),
        (used("base", mask=[left, low]), {}, r"image_prompts\.mask: found '2 masks', expected one mask, or 1: one for"),
        (used("base", mask=Image.new("L", (8, 8))), {}, r"image_prompts\.mask: found 'a black mask'"),
    ):
        with pytest.raises(ValueError, match=expected):
            sd1.tiny.made(image_prompts=[prompt], **more, **WIDE, **FIELDS)


def test_blocks_are_those_of_instant_style(sd1: Adapted) -> None:
    blocks = {"up.1.1": 1.0, "down.0": 0.5}
    made = sd1.tiny.made(image_prompts=[used("base", blocks=blocks)], **SIZE, **FIELDS)
    scale = {"up": {"block_1": [0.0, 1.0]}, "down": {"block_0": [0.5]}}
    assert_close(made.latents[0], sd1.latent(made, ("base",), [scale], ip_adapter_image=IMAGES["canny"]))


def test_in_a_part_of_the_steps_it_is_that_of_diffusers(sd1: Adapted) -> None:
    def scales(pipeline: Any, step: int, level: Any, values: Any) -> Any:
        pipeline.set_ip_adapter_scale(0.8 if step + 1 < STEPS * 0.75 else 0.0)
        return {}

    made = sd1.tiny.made(image_prompts=[used("base", strength=0.8, end=0.75)], **SIZE, **FIELDS)
    more = {"ip_adapter_image": IMAGES["canny"], "callback_on_step_end": scales}
    assert_close(made.latents[0], sd1.latent(made, ("base",), [0.8], **more))


def test_shares_of_the_noise_are_the_levels_of_those_steps(sd1: Adapted) -> None:
    """A part of the noise acts in the steps with its levels: here other ones than the same part of the steps."""
    fields: dict[str, Any] = {**SIZE, **FIELDS, "schedule": "karras", "steps": STEPS}

    def latent(**more: Any) -> Tensor:
        return sd1.tiny.made(image_prompts=[used("base", strength=0.8, **more)], **fields).latents[0]

    table = sigma_table()
    schedule = SamplingSchedule(STEPS, "euler", "karras")
    levels = [table.time_input(float(sigma)) for sigma in levels_of(schedule, table)[:-1]]
    share = 0.8
    least = table.time_input(table.sigma_at_percent(share))
    acting = sum(level >= least for level in levels)
    assert 0 < acting < STEPS * share - 1e-6, "in steps, it is another part"
    found = latent(end=share, shares_of="noise")
    assert torch.equal(found, latent(end=acting / STEPS))
    assert not torch.equal(found, latent(end=share))
    assert torch.equal(latent(shares_of="noise"), latent()), "all levels are all steps"


def test_face_id_reads_the_embedding_of_a_face(sd1: Adapted, tmp_path: Path) -> None:
    """From an array, or from a file; there is no vision encoder among its tasks."""
    face = np.random.default_rng(3).standard_normal((1, FACE)).astype(np.float32)
    np.save(tmp_path / "face.npy", face)
    prompt = {"model": "faceid", "faces": tmp_path / "face.npy", "strength": 0.7}
    made = sd1.tiny.made(image_prompts=[prompt], **SIZE, **FIELDS)
    embeds = torch.from_numpy(face)[None]
    expected = sd1.latent(
        made, ("faceid",), [0.7], ip_adapter_image_embeds=[torch.cat([torch.zeros_like(embeds), embeds])]
    )
    assert_close(made.latents[0], expected)
    assert not made.of(VisionEncodeParams)
    same = sd1.tiny.made(image_prompts=[{**prompt, "faces": face[0].tolist()}], **SIZE, **FIELDS)
    assert [task.task_id for task in same.tasks] == [task.task_id for task in made.tasks]


def test_what_does_not_fit_is_refused_by_name(sd1: Adapted, sdxl: Adapted, tmp_path: Path) -> None:
    other = str(Path(sdxl.tiny.model.path).parent / "ipadapter" / "plus.safetensors")
    for prompt, expected in (
        (used(other), r"image_prompts: found \"IP-Adapter Plus 'plus' for UNets of text width .*'tiny' \(Stable"),
        ({"model": "base", "faces": [0.0] * FACE}, r"image_prompts.image: missing; adapter 'base' reads images"),
        (used("faceid"), r"image_prompts.image: not supported by adapter 'faceid', which reads faces only"),
        ({"model": "faceid", "faces": [0.0]}, rf"image_prompts.faces: found '1 number', expected {FACE} numbers"),
        (used("base", encoder="tiny"), r"'tiny' is a checkpoint, expected a vision encoder"),
        (used("base", blocks={"left": 1}), r"image_prompts.blocks: found 'left'"),
    ):
        with pytest.raises(ValueError, match=expected):
            sd1.tiny.made(image_prompts=[prompt], **SIZE, **FIELDS)
    lonely = TinyModel(tmp_path, layouts.tiny_sd1())
    source = str(Path(sd1.tiny.model.path).parent / "ipadapter" / "base.safetensors")
    with pytest.raises(UnusableField, match=r"image_prompts\.encoder: found 'none, and 0 that fit"):
        lonely.made(image_prompts=[used(source)], **SIZE, **FIELDS)
    lonely.close()


def test_only_vision_encoders_that_may_fit_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: a request without `encoder` hashed and opened every vision encoder, gigabytes each."""
    adapted = Adapted(tmp_path, layouts.tiny_sd1(), ("base",))
    write_encoder(tmp_path / "clip_vision" / "of_redux", siglip())
    (tmp_path / "clip_vision" / "damaged.safetensors").write_bytes(b"no header")
    hashed: list[str] = []
    hashes = Registry.hashes

    def noted(self: Registry, file: WeightsFile, *args: Any, **kwargs: Any) -> Any:
        hashed.append(file.path.parent.name)
        return hashes(self, file, *args, **kwargs)

    monkeypatch.setattr(Registry, "hashes", noted)
    try:
        found = adapted.tiny.catalog.image_prompts.find("base", 1)
    finally:
        adapted.tiny.close()
    assert found.encoder is not None
    assert (found.encoder.name, sorted(set(hashed))) == ("image_encoder/model", ["image_encoder", "ipadapter"])


def test_face_id_plus_reads_an_image_and_a_face(sd1: Adapted) -> None:
    face = np.random.default_rng(3).standard_normal((1, FACE)).astype(np.float32)
    prompt = used("faceid_plus", faces=face, strength=0.7)
    made = sd1.tiny.made(image_prompts=[prompt], **SIZE, **FIELDS)
    seen, blank = (torch.from_numpy(each.states_LD.copy())[None] for each in made.of(VisionEncodeParams))
    embeds = torch.from_numpy(face)[None]

    def with_states(pipeline: Any) -> None:
        pipeline.unet.encoder_hid_proj.image_projection_layers[0].clip_embeds = torch.stack([blank, seen])

    both = torch.cat([torch.zeros_like(embeds), embeds])
    expected = sd1.latent(made, ("faceid_plus",), [0.7], with_states, ip_adapter_image_embeds=[both])
    assert_close(made.latents[0], expected)


def test_its_recipe_leads_to_the_same_output(sd1: Adapted, tmp_path: Path) -> None:
    """With the hashes of the adapter, the encoder and the image; another strength or image is another output."""

    def recipe(**fields: Any) -> Recipe:
        return of_request(GenerateRequest(model="tiny", prompt="x", seed=1, image_prompts=[fields], **SIZE, **FIELDS))

    def of_request(request: GenerateRequest) -> Recipe:
        brought, _ = InputImages(lambda result: result).bring(request)  # type: ignore[arg-type, return-value]
        found, _ = build_graph(brought, JobId("job"), sd1.tiny.catalog)
        return found

    IMAGES["canny"].save(tmp_path / "seen.png")
    halves()[0].save(tmp_path / "left.png")
    prompt = {"model": "base", "image": str(tmp_path / "seen.png"), "strength": 0.7, "blocks": {"up.1": 1.0}}
    prompt["mask"] = str(tmp_path / "left.png")
    found = recipe(**prompt)
    read = recipe_from_text(found.to_json())
    assert read == found
    assert read.pictures is not None
    (used_prompt,) = read.pictures.image_prompts
    assert (used_prompt.name, used_prompt.encoder) == ("base", "image_encoder/model")
    again = {of_request(request).digest for request in requests_of(read, lambda file: str(tmp_path / file))}
    assert found.digest in again
    changes: tuple[dict[str, Any], ...]
    changes = ({"end": 0.5}, {"end": 0.5, "shares_of": "noise"}, {"strength": 0.6}, {"image": IMAGES["depth"]})
    changes = (*changes, {"mask": halves()[1]}, {"mask": None})
    others = {recipe(**{**prompt, **change}).digest for change in changes}
    assert len({found.digest, *others}) == 1 + len(changes)
    timed = recipe(**{**prompt, **changes[1]})
    again = {of_request(request).digest for request in requests_of(timed, lambda file: str(tmp_path / file))}
    assert again == {timed.digest}, "what shares are of is part of the recipe"
