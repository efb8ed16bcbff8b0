"""A checkpoint in a person's hands: where its weights are is said by hand, one component at a time. Without Ray.

    from pool import load_checkpoint

    with load_checkpoint("model.safetensors", device="cuda", vram="8GiB") as model:
        model.diffusion_model.to_gpu()
        pixels_HWC = model.generate("a red circle", seed=7)
        model.diffusion_model.partially_unload(2 << 30)

Nothing moves by itself: what is resident stays, what is not streams while it is used, and the picture is the same.
docs/explicit_control.md is the page about it. For a pool that decides by itself, see `modelpool.ModelPool`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeAlias

import torch

from pool.catalog import Catalog
from pool.devices.vram_policy import VramPolicy
from pool.engine import Engine, EngineSettings
from pool.errors import parse_bytes, unusable_field
from pool.explicit_component import ExplicitComponent
from pool.interrupt import Interrupt
from pool.sampling.names import MAX_STEPS, resolve_sampler
from pool.spec import Role, TaskSpec
from pool.work import (
    DecodeWork,
    Encoded,
    EncodeWork,
    Latent,
    ModelRef,
    Picture,
    PixelArray,
    Result,
    RunHooks,
    SampleWork,
    Stopped,
    Work,
    stage_of,
    task_id,
)

__all__ = ["ExplicitComponent", "Interrupt", "LoadedModel", "Stopped", "load_checkpoint"]

#: called after each step with (steps done, steps in all)
OnStep: TypeAlias = Callable[[int, int], None]


def load_checkpoint(
    path: str | os.PathLike[str],
    device: str = "auto",
    vram: int | str | None = None,
    index: int = 0,
    threads: int = 1,
) -> LoadedModel:
    """Open a checkpoint with nothing of it on the device.

    path     a .safetensors file with a text encoder, a diffusion model and a VAE
    device   "cuda", "sim", "cpu" or another kind of torch's; "auto" is cuda where there is one, else sim
    vram     most that weights and activations may take: bytes, or "8GiB"; None is what the device has
    index    which device of that kind
    threads  CPU threads of torch, for the whole process; they can change the last bits of a picture
    Raises UserError (CorruptFile, UnknownArchitecture, UnusableField) naming what was wrong. Close it, or use it as a
    context: weights stay on the device until then.
    """
    budget_bytes = _budget_bytes(vram)
    kind = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "sim")
    catalog = Catalog((), (), kind)
    model = catalog.find_model(os.fspath(path))
    catalog.components(model)  # a file that cannot be used takes no device
    engine = Engine.open(EngineSettings(kind, index, budget_bytes, threads, VramPolicy.NORMAL))
    try:
        return LoadedModel(engine, catalog, model)
    except BaseException:
        engine.close()
        raise


class LoadedModel:
    """One checkpoint on one device. Made by `load_checkpoint`; not thread safe, but for `cancel` and `interrupt`."""

    def __init__(self, engine: Engine, catalog: Catalog, model: ModelRef) -> None:
        self._engine = engine
        self._catalog = catalog
        self._model = model
        self.text_encoder, self.diffusion_model, self.vae = (
            ExplicitComponent(engine, model, role, catalog.find_lora)
            for role in (Role.TEXT_ENCODER, Role.DIFFUSION_MODEL, Role.VAE)
        )
        #: stops the run that is under way; from any thread
        self.interrupt = Interrupt()
        self._should_stop: Callable[[], bool] | None = None

    @property
    def components(self) -> tuple[ExplicitComponent, ...]:
        """Text encoder, diffusion model and VAE."""
        return self.text_encoder, self.diffusion_model, self.vae

    @property
    def device_name(self) -> str:
        """What the device is called."""
        return self._engine.device.name

    @property
    def native_size(self) -> tuple[int, int]:
        """Width and height that the model was trained for, in pixels."""
        return self._catalog.native_size(self._model)

    def free_bytes(self) -> int:
        """What could still be put on the device now, of `vram` and of what other programs leave, beside the weights
        that are there. What an allocator keeps unused counts as free."""
        return self._engine.vram.room_bytes

    def used_bytes(self) -> int:
        """Weights that are on the device now."""
        return self._engine.residency().used_bytes

    def to_gpu(self) -> int:
        """Bring all components to the device. Returns the bytes that arrived. Raises DoesNotFit at the first for which
        there is no room; those before it stay."""
        return sum(component.to_gpu() for component in self.components)

    def to_cpu(self) -> int:
        """Take all components off the device. Returns the bytes that left."""
        return sum(component.to_cpu() for component in self.components)

    def encode(self, text: str) -> Encoded:
        """`text` as the diffusion model reads it, on the host."""
        work = EncodeWork(self._model, (), text)
        result = self._run(work, (), self.text_encoder)
        assert isinstance(result, Encoded)
        return result

    def sample(
        self,
        prompt: Encoded,
        negative: Encoded | None = None,
        *,
        width: int | None = None,
        height: int | None = None,
        steps: int = 20,
        cfg: float = 5.0,
        sampler: str = "euler",
        seed: int | None = None,
        on_step: OnStep | None = None,
    ) -> Latent:
        """Denoise a latent from `seed` (None draws one), on the host. Sizes are pixels, the model's own when None.

        `negative` may be None with `cfg` 1 only. `sampler` may name a schedule too: "dpmpp_2m_karras".
        Raises UserError naming a field, DoesNotFit, RanOutOfMemory, and Stopped after `cancel`.
        """
        if negative is None and cfg != 1:
            raise unusable_field("negative", None, "an encoded text, since cfg is not 1")
        if not 1 <= steps <= MAX_STEPS:
            raise unusable_field("steps", steps, f"a whole number from 1 to {MAX_STEPS}")
        key, schedule = resolve_sampler(sampler)
        work = SampleWork(
            self._model,
            (),
            self._checked_size("width", width, self.native_size[0]),
            self._checked_size("height", height, self.native_size[1]),
            steps,
            cfg,
            key,
            schedule,
            secrets.randbits(64) if seed is None else _seed(seed),
        )
        inputs = (prompt,) if negative is None or cfg == 1 else (prompt, negative)
        result = self._run(work, inputs, self.diffusion_model, on_step, passes=steps)
        assert isinstance(result, Latent)
        return result

    def decode(self, latent: Latent) -> PixelArray:
        """`latent` as RGB pixels, uint8 [height, width, 3]: what `PIL.Image.fromarray` takes."""
        downscale = self._engine.latent_facts(self._model).downscale
        height, width = (cells * downscale for cells in latent.samples_CHW.shape[1:])
        result = self._run(DecodeWork(self._model, width, height), (latent,), self.vae)
        assert isinstance(result, Picture)
        return result.pixels_HWC

    def generate(
        self,
        prompt: str,
        negative: str = "",
        *,
        width: int | None = None,
        height: int | None = None,
        steps: int = 20,
        cfg: float = 5.0,
        sampler: str = "euler",
        seed: int | None = None,
        on_step: OnStep | None = None,
    ) -> PixelArray:
        """One picture: `encode`, `sample` and `decode` as one run, which `cancel` stops as a whole."""
        with self._one_run():
            encoded = self.encode(prompt)
            guided_from = None if cfg == 1 else self.encode(negative)
            latent = self.sample(
                encoded,
                guided_from,
                width=width,
                height=height,
                steps=steps,
                cfg=cfg,
                sampler=sampler,
                seed=seed,
                on_step=on_step,
            )
            return self.decode(latent)

    def cancel(self) -> bool:
        """Stop the run that is under way at its next layer or step: it raises Stopped. From any thread.

        Returns whether there was one; with none nothing happens, and the next run is not stopped.
        """
        return self.interrupt.request()

    def close(self) -> None:
        """Take every byte off the device. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _one_run(self) -> Iterator[Callable[[], bool]]:
        """What runs inside the block is one run to `cancel`, however many stages it has."""
        if self._should_stop is not None:
            yield self._should_stop
            return
        with self.interrupt.run() as should_stop, contextlib.ExitStack() as ending:
            self._should_stop = should_stop
            ending.callback(setattr, self, "_should_stop", None)
            yield should_stop

    def _run(
        self,
        work: Work,
        inputs: tuple[Result, ...],
        component: ExplicitComponent,
        on_step: OnStep | None = None,
        passes: int = 1,
    ) -> Result:
        lengths = tuple(text.context_LD.shape[0] for text in inputs if isinstance(text, Encoded))
        task = TaskSpec(
            task_id(work, ()),
            stage_of(work),
            (component.patcher.use(passes),),
            self._catalog.activation_bytes(self._model, work, lengths),
            run_seconds=0.0,
            divisions=self._catalog.divisions(self._model, work, lengths),
        )
        with self._one_run() as should_stop:
            hooks = RunHooks(on_step or (lambda done, steps: None), should_stop)
            return self._engine.run_as_is(task, work, inputs, component.patcher, hooks)

    def _checked_size(self, field: str, pixels: int | None, own: int) -> int:
        found = own if pixels is None else pixels
        step = self._engine.latent_facts(self._model).downscale
        if found < step or found % step:
            raise unusable_field(field, found, f"a multiple of {step}, the pixels of one latent cell")
        return found


def _budget_bytes(vram: int | str | None) -> int | None:
    if isinstance(vram, str):
        return parse_bytes(vram)
    if vram is not None and vram <= 0:
        raise unusable_field("vram", vram, "a positive number of bytes, a text such as '8GiB', or None")
    return vram


def _seed(seed: int) -> int:
    if not 0 <= seed < 2**64:
        raise unusable_field("seed", seed, "a whole number from 0 to 2**64 - 1")
    return seed
