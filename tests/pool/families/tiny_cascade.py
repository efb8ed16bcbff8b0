"""Both stages of a tiny Stable Cascade, as the two files in the layout that they are published in, and as the folders
of diffusers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from safetensors.torch import save_file
from torch import Tensor

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.inference.controlnets.cascade_controlnets import CascadeControlNet
from modelpool.pool.models.components.vae.cascade_encoder import CascadeEncoder
from modelpool.pool.values.core.stage_params import Latent, ModelRef, Result, SampleParams
from modelpool.pool.values.specs.spec import JobId, Role, TaskId
from tests.pool.families.tiny_transformers import WIDTH, File, prefixed, seeded
from tests.pool.input_names import results_read
from tests.pool.models.components.diffusion.video_published import cascade
from tests.pool.models.components.text import cases as texts
from tests.pool.models.components.vae import published
from tests.pool.pipeline import QUIET

#: channels of what stage C makes, of what stage B makes, and of what CLIP sees images as
PRIOR, LATENT, SEEN = 16, 4, 14
_LAYER = ("SDCascadeResBlock", "SDCascadeTimestepBlock")
STAGE_C, STAGE_B = "stable_cascade_stage_c", "stable_cascade_stage_b"


def stage_c() -> Any:
    """As published but for sizes: two levels of one resolution, attention in each."""
    return diffusers.StableCascadeUNet(
        in_channels=PRIOR, out_channels=PRIOR, conditioning_dim=32, block_out_channels=(64, 128),
        num_attention_heads=(1, 2), down_num_layers_per_block=(1, 2), up_num_layers_per_block=(2, 1),
        clip_text_in_channels=WIDTH, clip_text_pooled_in_channels=WIDTH, clip_image_in_channels=SEEN,
        switch_level=(False,),
    )  # fmt: skip


def stage_b(reads: int = PRIOR) -> Any:
    """As published but for sizes: patches, two levels, attention in the last."""
    return diffusers.StableCascadeUNet(
        in_channels=LATENT, out_channels=LATENT, patch_size=2, conditioning_dim=32, block_out_channels=(32, 64),
        num_attention_heads=(-1, 1), down_num_layers_per_block=(1, 2), up_num_layers_per_block=(2, 1),
        down_blocks_repeat_mappers=(1, 1), up_blocks_repeat_mappers=(2, 2),
        block_types_per_layer=(_LAYER, (*_LAYER, "SDCascadeAttnBlock")), clip_text_pooled_in_channels=WIDTH,
        effnet_in_channels=reads, pixel_mapper_in_channels=3, timestep_conditioning_type=("sca",),
    )  # fmt: skip


def stage_a() -> Any:
    """The VAE, with weights: four pixels a cell, and most of what it makes is neither black nor white."""
    vae = seeded(lambda: PaellaVQModel(bottleneck_blocks=2, embed_dim=16, num_vq_embeddings=32, scale_factor=0.43), 3)
    vae.out_block[0].weight.mul_(0.02)
    vae.out_block[0].bias.copy_(torch.linspace(0.3, 0.7, len(vae.out_block[0].bias)))
    return vae


def text_encoder() -> Any:
    """CLIP-G, with a projection."""
    return texts.clip(3, act="gelu", projection=WIDTH)


def _text_file() -> File:
    """Under the names of the program that wrote the files: below the module's name, and the projection turned beside
    it."""
    found = dict(text_encoder().state_dict())
    projection: Tensor = found.pop("text_projection.weight")
    beside = {"text_projection": projection.T.contiguous(), "logit_scale": torch.tensor(4.6)}
    return prefixed("text_encoder.clip_g.", {**prefixed("transformer.", found), **beside})


def stage_c_file() -> File:
    """With what else lies in the published file: the encoder of images and the previewer in the place of a VAE, and a
    vision encoder, none of which is run."""
    beside = {
        "vae.encoder.backbone.1.0.block.0.1.num_batches_tracked": torch.tensor(7),
        "vae.previewer.blocks.0.weight": torch.ones(3, 2),
        "clip_l_vision.vision_model.embeddings.class_embedding": torch.ones(4),
    }
    model = prefixed("model.diffusion_model.", cascade(seeded(stage_c, 1).state_dict()))
    return _plain({**model, **_text_file(), **beside})


def vision_encoder() -> Any:
    """CLIP L for images, with a projection to the width that stage C reads."""
    config = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
        projection_dim=SEEN,
    )  # fmt: skip
    return seeded(lambda: transformers.CLIPVisionModelWithProjection(config), 5)


def seeing_stage_c_file() -> File:
    """With the whole vision encoder, as published."""
    plain = {key: value for key, value in stage_c_file().items() if not key.startswith("clip_l_vision.")}
    return _plain({**plain, **prefixed("clip_l_vision.", dict(vision_encoder().state_dict()))})


#: all stages of the published EfficientNet, with few channels
STAGES = [(4, 1, 1, True), (4, 2, 2, True), (6, 1, 2, True), (8, 2, 2, False), (8, 1, 3, False), (12, 2, 3, False)]


def with_norms(module: Any) -> Any:
    """The module with variances and factors of norms around 1."""
    generator = torch.Generator().manual_seed(9)
    for name, value in module.state_dict().items():
        if name.endswith("running_var") or (name.endswith(".1.weight") and value.dim() == 1):
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return module


def image_encoder() -> CascadeEncoder:
    """The encoder of images of stage C."""
    encoder: CascadeEncoder = with_norms(seeded(lambda: CascadeEncoder(3, 4, STAGES, 24, PRIOR), 8))
    return encoder


def control(channels: int) -> CascadeControlNet:
    """A ControlNet of stage C with as many blocks as the published one, which reads images of so many channels."""
    made: CascadeControlNet = with_norms(seeded(lambda: CascadeControlNet(channels, 4, STAGES, 24, 64), 11))
    for name, value in made.state_dict().items():  # as large as what they are added to
        if name.startswith("projections.") and name.endswith(".2.weight"):
            value.mul_(50)
    return made


def controlled_stage_c() -> Any:
    """As many blocks as published, of one width."""
    return diffusers.StableCascadeUNet(
        in_channels=PRIOR, out_channels=PRIOR, conditioning_dim=32, block_out_channels=(64, 64),
        num_attention_heads=(1, 1), down_num_layers_per_block=(8, 24), up_num_layers_per_block=(24, 8),
        clip_text_in_channels=WIDTH, clip_text_pooled_in_channels=WIDTH, clip_image_in_channels=SEEN,
        switch_level=(False,),
    )  # fmt: skip


def controlled_stage_c_file() -> File:
    """With the blocks before which ControlNets add; the numbers stay small behind so many."""
    state = seeded(controlled_stage_c, 1).state_dict()
    for name, value in state.items():
        if name.startswith(("down_blocks.", "up_blocks.")):
            value.mul_(0.2)
    model = prefixed("model.diffusion_model.", cascade(state))
    return _plain({**model, **_text_file()})


def encoding_stage_c_file() -> File:
    """With the encoder of images and the vision encoder, as published."""
    plain = {key: value for key, value in seeing_stage_c_file().items() if not key.startswith("vae.encoder.")}
    return _plain({**plain, **prefixed("vae.encoder.", dict(image_encoder().state_dict()))})


def stage_b_file(reads: int = PRIOR) -> File:
    """With a text encoder that equals stage C's, as in the published file."""
    model = prefixed("model.diffusion_model.", cascade(seeded(lambda: stage_b(reads), 2).state_dict()))
    vae = prefixed("vae.", published.cascade_a(stage_a().state_dict()))
    return _plain({**model, **vae, **_text_file()})


def write_files(folder: Path, stage_c: File | None = None) -> None:
    """Both files, under the names that they were published with."""
    save_file(stage_c or stage_c_file(), folder / f"{STAGE_C}.safetensors")
    save_file(stage_b_file(), folder / f"{STAGE_B}.safetensors")


def _plain(tensors: File) -> File:
    return {key: value.contiguous().clone() for key, value in tensors.items()}


class Ran:
    """A job of a cascade, cut and run task by task.

    results  of its tasks
    works    of its tasks, in order, each with its result
    """

    def __init__(self, catalog: Catalog, engine: Engine, request: Any) -> None:
        from modelpool.actors.graph.build_graph import build_graph

        brought, refs = InputImages(lambda result: result).bring(request)
        self.recipe, self.cut = build_graph(brought, JobId("job"), catalog)
        self.results: dict[TaskId, Result] = dict(refs)  # type: ignore[arg-type] # a reference is the result itself
        results = self.results
        for task in self.cut.job.tasks:
            inputs = results_read(task, results)
            results[task.task_id] = engine.run(task, self.cut.works[task.task_id], inputs, QUIET)[0]
        self.works = [(self.cut.works[task.task_id], results[task.task_id]) for task in self.cut.job.tasks]
        self.made = results[self.cut.job.wanted]

    def sampled(self) -> list[tuple[SampleParams, Latent]]:
        """What was sampled, in order."""
        return [(w, r) for w, r in self.works if isinstance(w, SampleParams) and isinstance(r, Latent)]


class Pair:
    """Both stages on one engine."""

    def __init__(self, folder: Path, settings: EngineSettings | None = None, loras: tuple[Path, ...] = ()) -> None:
        settings = settings or EngineSettings("cpu")
        self.catalog = Catalog((folder,), loras, settings.device)
        self.engine = Engine.open(settings)

    def run(self, **fields: Any) -> Ran:
        """A request, cut and run."""
        from modelpool.actors.request.requests import GenerateRequest

        return Ran(self.catalog, self.engine, GenerateRequest(**fields))

    def module(self, name: str, role: Role) -> Any:
        """A component as diffusers or transformers has it."""
        ref: ModelRef = self.catalog.find_model(name)
        return self.engine._opened(ref).component(role).built.module


def write_folders(folder: Path) -> None:
    """Both stages as diffusers saves them: `stable-cascade-prior` and `stable-cascade`."""
    scheduler = diffusers.DDPMWuerstchenScheduler()
    stages = {
        "stable-cascade-prior": ("StableCascadePriorPipeline", {"prior": seeded(stage_c, 1)}),
        "stable-cascade": ("StableCascadeDecoderPipeline", {"decoder": seeded(stage_b, 2), "vqgan": stage_a()}),
    }
    for name, (pipeline, models) in stages.items():
        parts = {**models, "scheduler": scheduler, "text_encoder": text_encoder()}
        index: dict[str, Any] = {"_class_name": pipeline, "image_encoder": [None, None]}
        for place, part in parts.items():
            part.save_pretrained(folder / name / place)
            library = {"text_encoder": "transformers", "vqgan": "wuerstchen"}.get(place, "diffusers")
            index[place] = [library, type(part).__name__]
        (folder / name / "model_index.json").write_text(json.dumps(index))
