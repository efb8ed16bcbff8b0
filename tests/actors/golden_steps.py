"""Tiny models of every kind, and `Steps`: single steps on one engine, by which a workflow is computed by hand. The
graph compiler has no part in them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import Engine
from modelpool.pool.inference.operations.operate import operation_named
from modelpool.pool.values.core.stage_params import (
    NO_OPTIONS,
    AudioSamples,
    DecodeParams,
    Encoded,
    EncodeImageParams,
    EncodeParams,
    GuidanceParams,
    ImagePixels,
    ImagePromptRef,
    LoraRef,
    MaskCondition,
    ModelRef,
    OutputShape,
    Result,
    RunOptions,
    SampleCondition,
    SampleParams,
    SamplingSchedule,
    StageParams,
    StartCondition,
    StepPart,
    UpscaleParams,
    VideoFrames,
    VisionEncodeParams,
    role_of,
    roles_of,
    stage_of,
    task_id,
)
from modelpool.pool.values.specs.spec import ComponentUse, TaskSpec
from tests.actors.unchanged_outputs import write_transformer, write_video_unet
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.inference.image_prompts.tiny_adapters import flat, ip_adapter, vision_encoder, write_encoder
from tests.pool.inference.upscalers.tiny_upscalers import tiny_state
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import QUIET

SIDE, STEPS, SEED = 64, 4, 7
#: widths of the result and of the text of the cross-attentions of the tiny UNet
ATTENTIONS = [(48, 32), (96, 32), (96, 32), (96, 32), (48, 32), (48, 32), (96, 32)]
UNETS = {
    "one": layouts.tiny_sd1,
    "two": layouts.tiny_sd1,
    "xl": layouts.tiny_sdxl,
    "refiner": layouts.tiny_sdxl_refiner,
}
#: models of videos and of audio
VIDEO, AUDIO, SHOWN = "wan_t2v", "stable_audio_1", "svd"
FRAMES, FRAME_RATE, SECONDS = 5, 8.0, 0.125
#: samples in a second of the tiny audio
AUDIO_RATE = 44100


def write_models(folder: Path) -> None:
    """Write the models that the golden workflows use."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, layout) in enumerate(UNETS.items()):
        write_tiny_checkpoint(folder / f"{name}.safetensors", seed, layout=layout())
    write_transformer(folder, VIDEO)
    write_transformer(folder, AUDIO)
    write_video_unet(folder, SHOWN)
    for kind in ("loras", "controlnet", "ipadapter", "upscale_models"):
        (folder / kind).mkdir()
    for seed, name in enumerate(("light", "warm")):
        write_tiny_lora(folder / "loras" / f"{name}.safetensors", seed)
    for seed, name in enumerate(("canny", "depth"), 6):
        layout = ldm_controlnet(layouts.TINY_UNET)
        write_tiny_checkpoint(folder / "controlnet" / f"{name}.safetensors", seed, layout=layout)
    save_file(flat(ip_adapter("base", ATTENTIONS)), folder / "ipadapter" / "resemble.safetensors")
    write_encoder(folder / "clip_vision" / "image_encoder", vision_encoder())
    save_file(tiny_state("compact_2x"), folder / "upscale_models" / "sharp.safetensors")


class Steps:
    """Single steps on one engine."""

    def __init__(self, engine: Engine, catalog: Catalog) -> None:
        self.engine, self.catalog = engine, catalog

    def text(
        self,
        prompt: str = "a cat",
        model: str = "one",
        is_negative: bool = False,
        loras: tuple[LoraRef, ...] = (),
        clip_skip: int = 0,
    ) -> Result:
        """The text, encoded."""
        ref = self.catalog.find_model(model)
        return self.run(EncodeParams(ref, loras, prompt, clip_skip, is_negative), loras)

    def sample(
        self,
        model: str = "one",
        side: int = SIDE,
        first: int = 0,
        part: StepPart | None = None,
        *,
        seed: int = SEED,
        shape: OutputShape | None = None,
        schedule: tuple[str, str] = ("euler", "normal"),
        cfg: float = 4.0,
        loras: tuple[LoraRef, ...] = (),
        conditions: tuple[SampleCondition, ...] = (),
        options: RunOptions = NO_OPTIONS,
        image_cfg: float = 0.0,
        reads_text: bool = True,
        **read: Result,
    ) -> Result:
        """A sampling run; `read` are its inputs, with the texts "a cat" and "" if there are no others."""
        starts = (StartCondition(),) if "start" in read else ()
        masks = (MaskCondition(),) if "mask" in read else ()
        work = SampleParams(
            self.catalog.find_model(model), loras, shape or OutputShape(side, side),
            SamplingSchedule(STEPS, *schedule, first), GuidanceParams(cfg, 0.0, image_cfg), seed,
            (*starts, *masks, *conditions), options, part=part,
        )  # fmt: skip
        texts: dict[str, Result] = {}
        if reads_text and "positive" not in read:
            texts["positive"] = self.text("a cat", model, loras=loras)
        if reads_text and "negative" not in read and work.reads_negative:
            texts["negative"] = self.text("", model, is_negative=True, loras=loras)
        return self.run(work, loras, **{**texts, **read})

    def decode(self, latent: Result, model: str = "one", side: int = SIDE, **more: Any) -> Any:
        """The pixels of a latent."""
        shape = more.pop("shape", OutputShape(side, side))
        return self.run(DecodeParams(self.catalog.find_model(model), shape, **more), latent=latent)

    def encode(self, image: Result, model: str = "one", side: int = SIDE, **more: Any) -> Result:
        """The latent of an image; with "mask" in `more`, its pixels are grey there."""
        hides = {"hides": True} if "mask" in more else {}
        read = {name: more.pop(name) for name in ("mask",) if name in more}
        work = EncodeImageParams(self.catalog.find_model(model), side, side, **hides, **more)
        return self.run(work, image=image, **read)

    def seen(self, image: Result, adapter: str = "resemble") -> tuple[ImagePromptRef, Result]:
        """An image prompt of one image, and its states."""
        found = self.catalog.image_prompts.find(adapter, 1)
        assert found.encoder is not None, "the adapter reads images"
        return found.ref, self.run(VisionEncodeParams(found.encoder, 1, use=found.use), **{"image.0": image})

    def upscale(self, image: Result, side: int = SIDE, scale: int = 2) -> Any:
        """The image, enlarged by the upscaler."""
        upscaler = self.catalog.upscalers.find("sharp")
        return self.run(UpscaleParams(upscaler, side, side, side * scale, side * scale), image=image)

    def change(self, name: str, settings: Mapping[str, Any] | None = None, **read: Result) -> Any:
        """What an operation makes of its inputs. Its formula is tested with the operation."""
        operation = operation_named(name)
        return operation(operation.params_of(settings or {}), read)

    def lora(self, name: str = "light", strength: float = 1.0) -> LoraRef:
        """A LoRA."""
        return self.catalog.find_lora(name, strength)

    def control(self, name: str = "canny", strength: float = 1.0, start: float = 0.0, end: float = 1.0) -> Any:
        """A ControlNet."""
        return self.catalog.controls.find(name, strength, start, end, None)

    def run(self, work: StageParams, loras: tuple[LoraRef, ...] = (), /, **read: Result) -> Result:
        """The result of one task on the engine."""
        if isinstance(work, UpscaleParams):
            activation_bytes = self.catalog.upscalers.execution_modes(work)[0].activation_bytes
        else:
            model: Any = work  # operations run without an engine
            texts = [len(each.context_LD) for each in read.values() if isinstance(each, Encoded)]
            activation_bytes = self.catalog.figures.activation_bytes(model.model, model, texts)
        task = TaskSpec(task_id(work, {}), stage_of(work), self._uses(work, loras), activation_bytes, 0.1)
        return self.engine.run(task, work, read, QUIET)[0]

    def _uses(self, work: StageParams, loras: tuple[LoraRef, ...]) -> tuple[ComponentUse, ...]:
        if isinstance(work, UpscaleParams):
            return (self.catalog.upscalers.needs(work)[1],)
        model: ModelRef = work.model  # type: ignore[union-attr] # operations run without an engine
        is_text, passes = isinstance(work, EncodeParams), work.steps_run if isinstance(work, SampleParams) else 1
        count = len(self.engine._opened(model).checkpoint.family.text_encoders) if is_text else 1
        roles = roles_of(work, count) if is_text else (role_of(work),)
        uses = [self.catalog.use(model, role, loras, passes) for role in roles]
        if isinstance(work, SampleParams):
            uses += [self.catalog.controls.use_with(model, each, passes)[1] for each in work.controls]
            uses += [self.catalog.image_prompts.use_with(model, each)[1] for each in work.image_prompts]
        return tuple(uses)


def pixels_of(result: Any) -> np.ndarray:
    """The pixels, the frames or the samples of a result, of a pool or of a step."""
    match result:
        case ImagePixels():
            return result.pixels_HWC
        case VideoFrames():
            return result.frames_THWC
        case AudioSamples():
            return result.samples_SC
    return next(np.asarray(getattr(result, name)) for name in ("pixels", "frames", "samples") if hasattr(result, name))
