"""A tiny file of a family that runs on transformers, on the CPU, run stage by stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.models.text.text_tokenizer import KINDS
from modelpool.pool.values.core.run_options import NO_OPTIONS, RunOptions
from modelpool.pool.values.core.sampling_facts import Guidance
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    DecodeParams,
    Encoded,
    EncodeImageParams,
    EncodeParams,
    GuidanceParams,
    ImageCondition,
    ImagePixels,
    Latent,
    LoraRef,
    ModelRef,
    OutputShape,
    Result,
    RunHooks,
    RunState,
    SampleParams,
    SamplingSchedule,
    StageParams,
    VideoFrames,
    WrittenTokens,
    encoders_run,
    stage_of,
    task_id,
)
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import Role, RunCost, TaskSpec
from tests.pool.families.tiny_transformers import TinyFamily
from tests.pool.input_names import inputs_of
from tests.pool.models.text.tiny_tokenizers import tiny
from tests.pool.pipeline import QUIET

PROMPT, NEGATIVE = "a small red cat on the moon", "a dog"
WIDTH, HEIGHT, STEPS, SEED, FRAME_RATE = 96, 64, 3, 11, 12.0
SECONDS = 0.125
#: a kind of tokenizer that needs no file
BYTES = "byt5"


class Whole:
    """A tiny file on the CPU, run stage by stage."""

    def __init__(
        self,
        folder: Path,
        tiny_family: TinyFamily,
        left_out: tuple[str, ...] = (),
        *,
        write: bool = True,
        sampler: str = "",
        settings: EngineSettings | None = None,
    ) -> None:
        """`write` is False where the file is there. `sampler` is another than the usual one, `settings` are those of
        another device than the CPU."""
        settings = settings or EngineSettings("cpu")
        self.seconds, self.sides, self._sampler = SECONDS, tiny_family.sides, sampler
        #: the workers that share its sampling
        self.gang: Gang | None = None
        #: `SampleParams.gpus`
        self.gpus = 0
        #: in which the diffusion model is called, as plans count them
        self.passes = 1
        #: activations of a sampling run; 0: as estimated
        self.sampling_bytes = 0
        #: of the last run
        self.cost = RunCost()
        self.path = folder / "tiny.safetensors"
        if write:
            save_file(tiny_family.file(left_out), self.path)
        for member in tiny_family.encoders:
            if member in KINDS and KINDS[member] != BYTES and member not in left_out:
                place = folder / f"tokenizer_{member}"
                place.mkdir(exist_ok=True)
                tiny(KINDS[member]).save(str(place / "tokenizer.json"))
        self.catalog = Catalog((folder,), (), settings.device)
        self.model: ModelRef = self.catalog.find_model("tiny")
        self.engine = Engine.open(settings)
        self.opened = self.engine._opened(self.model)
        self.family = self.opened.checkpoint.family

    def module(self, role: Role) -> Any:
        """The component as diffusers or transformers has it."""
        return self.opened.component(role).built.module

    def run(
        self, work: StageParams, *inputs: Result, hooks: RunHooks = QUIET, resume: RunState | None = None
    ) -> Result:
        roles = {
            EncodeParams: encoders_run(work, self.family.text_encoders, self.family.sampling)
            if isinstance(work, EncodeParams)
            else (),
            SampleParams: (Role.DIFFUSION_MODEL,),
            DecodeParams: (Role.VAE,),
            EncodeImageParams: (Role.VAE,),
        }[type(work)]
        loras = work.loras if isinstance(work, SampleParams) else ()
        uses = tuple(self.catalog.use(self.model, role, loras) for role in roles)
        needed = self.catalog.figures.activation_bytes(self.model, work)
        if isinstance(work, SampleParams):
            uses = tuple(replace(use, passes=self.passes) for use in uses)
            needed = self.sampling_bytes or needed
        task = TaskSpec(task_id(work, {}), stage_of(work), uses, needed, 0.1)
        gang = self.gang if isinstance(work, SampleParams) else None
        made, self.cost = self.engine.run(task, work, inputs_of(work, *inputs), hooks, resume=resume, gang=gang)
        return made

    def texts(self, prompt: str = PROMPT) -> tuple[Encoded, ...]:
        """The prompt, and the negative prompt where the model reads one."""
        defaults = self.family.sampling.defaults
        assert defaults is not None
        wanted = (prompt, NEGATIVE) if defaults.guidance not in (Guidance.DISTILLED, Guidance.NONE) else (prompt,)
        written = WrittenTokens(*self.sides, SEED) if self.family.sampling.writes_tokens else None
        works = [EncodeParams(self.model, (), text, writes=None if text is NEGATIVE else written) for text in wanted]
        found = [self.run(work) for work in works]
        return tuple(text for text in found if isinstance(text, Encoded))

    def latent(
        self,
        texts: tuple[Encoded, ...],
        loras: tuple[LoraRef, ...] = (),
        beginning: Latent | None = None,
        steps: int = STEPS,
        hooks: RunHooks = QUIET,
        options: RunOptions = NO_OPTIONS,
    ) -> Latent:
        work = self.sampling(len(texts), loras, beginning is not None, steps, options)
        latent = self.run(work, *texts, *([] if beginning is None else [beginning]), hooks=hooks)
        assert isinstance(latent, Latent)
        return latent

    def sampling(
        self,
        texts: int,
        loras: tuple[LoraRef, ...] = (),
        begins: bool = False,
        steps: int = STEPS,
        options: RunOptions = NO_OPTIONS,
    ) -> SampleParams:
        """What is sampled from so many texts, and from an image that a video begins with."""
        defaults = self.family.sampling.defaults
        assert defaults is not None
        cfg, guidance = (defaults.cfg, 0.0) if texts > 1 else (1.0, defaults.cfg)
        width, height, duration = self.extent
        return SampleParams(
            self.model,
            loras,
            OutputShape(width, height, **duration),
            SamplingSchedule(steps, self._sampler or defaults.sampler, defaults.schedule),
            GuidanceParams(cfg, guidance),
            SEED,
            (*((ImageCondition(),) if begins else ()),),
            options=options,
            gpus=self.gpus,
        )

    @property
    def frames(self) -> int:
        """Of the video that is made; 0 where an image is."""
        video = self.family.sampling.video
        return 0 if video is None else 1 + video.multiple

    @property
    def extent(self) -> tuple[int, int, dict[str, Any]]:
        """Width, height, and how long."""
        if self.family.sampling.audio is not None:
            return 0, 0, {"seconds": self.seconds}
        video = self.family.sampling.video
        unseen = {"leading": video.unseen} if video is not None and video.unseen else {}
        return *self.sides, {"frames": self.frames, "frame_rate": FRAME_RATE, **unseen} if self.frames else {}

    def pixels(self, latent: Latent) -> Any:
        """[H, W, C], of a video [T, H, W, C], of an audio clip its samples [S, C]."""
        width, height, duration = self.extent
        made = self.run(DecodeParams(self.model, OutputShape(width, height, **duration)), latent)
        if isinstance(made, AudioSamples):
            return made.samples_SC
        assert isinstance(made, VideoFrames if self.frames else ImagePixels)
        return made.frames_THWC if isinstance(made, VideoFrames) else made.pixels_HWC
