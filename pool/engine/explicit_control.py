"""Explicit control of one checkpoint: the user moves its weights, one component at a time. Without Ray.

    from modelpool.pool import load_checkpoint

    with load_checkpoint("model.safetensors", device="cuda", vram="8GiB") as model:
        model.diffusion_model.to_gpu()
        pixels_HWC = model.generate("a red circle", seed=7)
        model.diffusion_model.partially_unload(2 << 30)

Nothing moves automatically: resident weights stay, the others stream during runs, and the image is the same. Guide:
docs/guides/explicit_control.md. For automatic placement, see `modelpool.ModelPool`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch

from modelpool.pool.catalog.catalog import WEIGHTS_SUFFIX, Catalog
from modelpool.pool.devices.kind_names import host_kind
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.engine.explicit_component import ExplicitComponent
from modelpool.pool.engine.explicit_work import (
    SampleNumbers,
    check_decodes,
    check_encodes,
    check_samples,
    sample_work,
    written_tokens,
)
from modelpool.pool.files.formats.model_description import is_description
from modelpool.pool.files.formats.model_folder import is_model_folder
from modelpool.pool.files.formats.shard_index import is_index
from modelpool.pool.values.core.argument_checks import checked_text, size_in_bytes, whole_number
from modelpool.pool.values.core.errors import ModelClosed, UserError, unusable_field
from modelpool.pool.values.core.interrupt import Interrupt
from modelpool.pool.values.core.output_kinds import output_shape_of
from modelpool.pool.values.core.sampling_facts import ModelDefaults
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    Encoded,
    EncodeParams,
    ImagePixels,
    Latent,
    LoraRef,
    ModelRef,
    ModelStageParams,
    PixelArray,
    Result,
    RunHooks,
    SampleParams,
    Stopped,
    VideoFrames,
    encoders_run,
    stage_of,
    task_id,
)
from modelpool.pool.values.core.task_inputs import LATENT, NEGATIVE, POSITIVE
from modelpool.pool.values.core.written_tokens import WrittenTokens
from modelpool.pool.values.specs.spec import Role, TaskSpec

__all__ = ["ExplicitComponent", "Interrupt", "LoadedModel", "Stopped", "load_checkpoint"]

#: more threads would only slow each other down
MAX_THREADS = 1024

#: called after each step with (steps done, total steps)
OnStep: TypeAlias = Callable[[int, int], None]


def load_checkpoint(
    path: str | os.PathLike[str],
    device: str = "auto",
    vram: int | str | None = None,
    index: int = 0,
    threads: int = 1,
) -> LoadedModel:
    """Open a checkpoint without loading anything to the device.

    path     a .safetensors file with a text encoder, a diffusion model and a VAE
    device   "cuda", "sim", "cpu" or another torch device kind; "auto" is cuda if available, else sim or cpu
    vram     maximum of weights and activations: bytes, or "8GiB"; None is the memory of the device
    index    index of the device within its kind
    threads  CPU threads of torch, for the process; they can change the last bits of an image

    Raises UserError (CorruptFile, UnknownArchitecture, UnusableField, UnknownName, DoesNotFit) naming the cause. Close
    it, or use it as a context manager: weights stay on the device until then.
    """
    given = _weights_file("path", path)
    budget_bytes = None if vram is None else size_in_bytes("vram", vram, least=1)
    index = whole_number("index", index, "a whole number, 0 or more")
    threads = whole_number("threads", threads, f"a whole number from 1 to {MAX_THREADS}", 1, MAX_THREADS)
    checked_text("device", device, "the name of a kind of device, such as 'cuda', or 'auto'")
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else host_kind().value)
    catalog = Catalog((), (), kind)
    model = catalog.find_model(given)
    roles = catalog.components(model)  # an unusable file opens no device
    is_whole = Role.VAE in roles and not catalog.model_defaults(model).sampling.is_prior_stage
    if not is_whole or not any(role.is_text_encoder for role in roles):
        found = " and ".join(role.value for role in roles)
        raise unusable_field("path", str(given), f"a model with a text encoder and a VAE of its own; it has a {found}")
    engine = Engine.open(EngineSettings(kind, index, budget_bytes, threads, VramPolicy.NORMAL))
    try:
        return LoadedModel(engine, catalog, model)
    except BaseException:
        engine.close()
        raise


class LoadedModel:
    """One checkpoint on one device. Created by `load_checkpoint`; not thread-safe, except for `cancel` and `interrupt`.

    After closing, everything except `close` and `cancel` raises ModelClosed.
    """

    def __init__(self, engine: Engine, catalog: Catalog, model: ModelRef) -> None:
        self._owned_engine = engine
        self._is_closed = False
        self._catalog = catalog
        self._model = model
        #: text encoders in the order of their outputs, then the diffusion model and the VAE
        self.components: tuple[ExplicitComponent, ...] = tuple(
            ExplicitComponent(lambda: self._engine, model, role, self._find_lora) for role in catalog.components(model)
        )
        by_role = {component.role: component for component in self.components}
        #: text encoders: two in SDXL
        self.text_encoders = tuple(component for component in self.components if component.role.is_text_encoder)
        #: the first of them
        self.text_encoder = self.text_encoders[0]
        self.diffusion_model, self.vae = by_role[Role.DIFFUSION_MODEL], by_role[Role.VAE]
        #: stops the current run; from any thread
        self.interrupt = Interrupt()
        self._should_stop: Callable[[], bool] | None = None

    @property
    def device_name(self) -> str:
        """Name of the device."""
        return self._engine.device.name

    @property
    def native_size(self) -> tuple[int, int]:
        """Training width and height of the model, in pixels."""
        own = self._defaults
        return own.width, own.height

    def free_bytes(self) -> int:
        """Return the device memory available for more weights, within `vram` and what other programs leave. Memory
        cached by the allocator counts as free."""
        return self._engine.vram.room_bytes

    def used_bytes(self) -> int:
        """Return the bytes of weights on the device."""
        return self._engine.residency().used_bytes

    def to_gpu(self) -> int:
        """Load all components to the device. Returns the bytes that arrived. Raises DoesNotFit at the first that does
        not fit; those before it stay."""
        return sum(component.to_gpu() for component in self.components)

    def to_cpu(self) -> int:
        """Unload all components from the device. Returns the bytes that left."""
        return sum(component.to_cpu() for component in self.components)

    def encode(self, text: str, is_negative: bool = False) -> Encoded:
        """Encode `text` for the diffusion model; the result is on the host.

        `is_negative`: it is a negative prompt, for which some families have another template. Raises UserError naming
        the family if its text encoders read more than a text.
        """
        return self._encoded(checked_text("text", text, "a text"), is_negative)

    def sample(
        self,
        prompt: Encoded,
        negative: Encoded | None = None,
        *,
        width: int | None = None,
        height: int | None = None,
        frames: int | None = None,
        steps: int | None = None,
        cfg: float | None = None,
        sampler: str = "",
        seed: int | None = None,
        on_step: OnStep | None = None,
    ) -> Latent:
        """Denoise a latent from `seed` (None draws one); the result is on the host.

        Sizes are pixels; `frames` is for videos. None, or an empty name, is the model's own number or sampler.
        `negative` may be None only with `cfg` 1, and for models that read none. `sampler` may include a schedule:
        "dpmpp_2m_karras". Raises UserError naming a field, or the family if it reads or makes something else;
        DoesNotFit, RanOutOfMemory, and Stopped after `cancel`.
        """
        numbers = SampleNumbers(width, height, frames, steps, cfg, sampler, seed)
        return self._sampled(prompt, negative, self._sample_work("sample", numbers), on_step)

    def decode(self, latent: Latent) -> PixelArray:
        """Decode `latent` to RGB pixels, uint8 [height, width, 3], as `PIL.Image.fromarray` takes; of a video [frames,
        height, width, 3]."""
        facts = self._defaults.sampling
        check_decodes(self._model, self._family_title, facts)
        channels = self._engine.latent_facts(self._model).channels
        shape = latent.samples_CHW.shape if isinstance(latent, Latent) else None
        axes = ("height", "width") if facts.video is None else ("frames", "height", "width")
        if shape is None or len(shape) != 1 + len(axes) or shape[0] != channels or 0 in shape:
            found = _short(latent) if shape is None else shape
            raise unusable_field("latent", found, f"what `sample` makes: [{channels}, {', '.join(axes)}]")
        work = DecodeParams(self._model, output_shape_of(shape[1:], self._model.name, self._defaults))
        result = self._run(work, {LATENT: latent}, (self.vae,))
        if isinstance(result, VideoFrames):
            return result.frames_THWC
        assert isinstance(result, ImagePixels)
        return result.pixels_HWC

    def generate(
        self,
        prompt: str,
        negative: str = "",
        *,
        width: int | None = None,
        height: int | None = None,
        frames: int | None = None,
        steps: int | None = None,
        cfg: float | None = None,
        sampler: str = "",
        seed: int | None = None,
        on_step: OnStep | None = None,
    ) -> PixelArray:
        """Generate one image, or one video: `encode`, `sample` and `decode` as one run, which `cancel` stops as a
        whole. An empty `negative` is the model's own negative prompt, which most do not have.

        Arguments are checked before anything runs.
        """
        work = self._sample_work("generate", SampleNumbers(width, height, frames, steps, cfg, sampler, seed))
        checked_text("prompt", prompt, "a text")
        checked_text("negative", negative, "a text, '' for none")
        facts = self._defaults.sampling
        own_negative = "" if facts.defaults is None else facts.defaults.negative
        with self._one_run():
            encoded = self._encoded(prompt, writes=written_tokens(work, facts))
            guided_from = self._encoded(negative or own_negative, True) if self._reads_negative(work) else None
            return self.decode(self._sampled(encoded, guided_from, work, on_step))

    def cancel(self) -> bool:
        """Stop the current run at its next layer or step: it raises Stopped. Callable from any thread.

        Returns whether there was one; otherwise nothing happens, and the next run is not affected.
        """
        return self.interrupt.request()

    def close(self) -> None:
        """Unload everything from the device. Idempotent. Raises UserError during a run."""
        if self._should_stop is not None:
            raise UserError(f"{self._model.name}: a run is using it; cancel() it, and close when it has ended")
        self._is_closed = True
        self._owned_engine.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _one_run(self) -> Iterator[Callable[[], bool]]:
        """The stages inside the block are one run for `cancel`."""
        if self._should_stop is not None:
            yield self._should_stop
            return
        with self.interrupt.run() as should_stop, contextlib.ExitStack() as ending:
            self._should_stop = should_stop
            ending.callback(setattr, self, "_should_stop", None)
            yield should_stop

    def _run(
        self,
        work: ModelStageParams,
        inputs: Mapping[str, Result],
        components: tuple[ExplicitComponent, ...],
        on_step: OnStep | None = None,
        passes: int = 1,
    ) -> Result:
        lengths = tuple(text.context_LD.shape[0] for text in inputs.values() if isinstance(text, Encoded))
        task = TaskSpec(
            task_id(work, {}),
            stage_of(work),
            tuple(component.patcher.use(passes) for component in components),
            self._catalog.figures.activation_bytes(self._model, work, lengths),
            run_seconds=0.0,
            divisions=self._catalog.figures.divisions(self._model, work, lengths),
        )
        with self._one_run() as should_stop:
            hooks = RunHooks(on_step or (lambda done, steps: None), should_stop)
            patchers = tuple(component.patcher for component in components)
            return self._engine.run_as_is(task, work, inputs, patchers, hooks)

    def _encoded(self, text: str, is_negative: bool = False, writes: WrittenTokens | None = None) -> Encoded:
        facts = self._defaults.sampling
        check_encodes(self._model, self._family_title, facts, writes=writes is not None or is_negative)
        is_negative = is_negative and facts.words_negative
        work = EncodeParams(self._model, (), text, is_negative=is_negative, writes=writes)
        run = encoders_run(work, [encoder.role for encoder in self.text_encoders], facts)
        result = self._run(work, {}, self.text_encoders[: len(run)])
        assert isinstance(result, Encoded)
        return result

    def _sampled(self, prompt: Encoded, negative: Encoded | None, work: SampleParams, on_step: OnStep | None) -> Latent:
        inputs: dict[str, Result] = {POSITIVE: self._text("prompt", prompt)}
        if self._reads_negative(work):
            inputs[NEGATIVE] = self._text("negative", negative, ", which cfg or the sampler reads")
        result = self._run(work, inputs, (self.diffusion_model,), on_step, passes=work.schedule.steps)
        assert isinstance(result, Latent)
        return result

    def _text(self, field: str, found: Any, why: str = "") -> Encoded:
        """A text encoded by this model, or by one with the same text encoding."""
        if not isinstance(found, Encoded):
            raise unusable_field(field, _short(found), f"a text that `encode` made{why}")
        widths, expected = found.widths, self._engine.text_widths(self._model)
        if widths != expected:
            wanted = f"{_words(expected)}, as `encode` of this model makes it"
            raise unusable_field(field, _words(widths), wanted)
        return found

    def _reads_negative(self, work: SampleParams) -> bool:
        """Whether a run of `work` reads a negative prompt."""
        return work.reads_negative and not self._defaults.sampling.learned_negative

    def _sample_work(self, call: str, numbers: SampleNumbers) -> SampleParams:
        """Sampling parameters of `call`, all numbers checked."""
        facts = self._defaults.sampling
        check_samples(call, self._model, self._family_title, facts)
        step = facts.side_multiple or self._engine.latent_facts(self._model).downscale
        return sample_work(self._model, self._defaults, numbers, step)

    @property
    def _defaults(self) -> ModelDefaults:
        self._check_open()
        return self._catalog.model_defaults(self._model)

    @property
    def _family_title(self) -> str:
        return self._engine.family_title(self._model)

    @property
    def _engine(self) -> Engine:
        self._check_open()
        return self._owned_engine

    def _check_open(self) -> None:
        if self._is_closed:
            raise ModelClosed(f"{self._model.name}: the model is closed; open it again with load_checkpoint")

    def _find_lora(self, path: str | os.PathLike[str], strength: float) -> LoraRef:
        return self._catalog.find_lora(_weights_file("path", path), strength)


def _weights_file(field: str, path: Any) -> str:
    """`path` as text; the file must exist."""
    expected = f"the path of a {WEIGHTS_SUFFIX} file that is there, of the index of several, or of a model in parts"
    if not isinstance(path, (str, os.PathLike)):
        raise unusable_field(field, path, expected)
    given = os.fsdecode(path)
    is_called_so = Path(given).suffix == WEIGHTS_SUFFIX or is_index(given) or is_description(given)
    if not (is_called_so and Path(given).is_file()) and not is_model_folder(given):
        raise unusable_field(field, given, expected)
    return given


def _short(found: Any) -> Any:
    """`found`, or its type if its text would be long."""
    return found if found is None or isinstance(found, (str, int, float)) else type(found)


def _words(widths: Mapping[str, int]) -> str:
    """The `Encoded.widths` of a text in words."""
    others = "".join(f" and {width} of {name}" for name, width in widths.items() if name not in ("context", "pooled"))
    return f"a text {widths['context']} wide with {widths['pooled']} of a pooled text{others}"
