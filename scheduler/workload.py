"""Jobs to try the scheduler with: invented models, their components' sizes, and arrivals. Chance is handed in.

Shapes are of the usual sort (encode, sample, decode; LoRAs on the text encoder and on the diffusion model); sizes are
parameters. Knows nothing of the scheduler but the messages that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from pool.errors import GIB, MIB
from pool.spec import (
    UNPATCHED,
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    JobId,
    JobSpec,
    Role,
    Stage,
    TaskId,
    TaskSpec,
)
from scheduler.messages import Submitted


@dataclass(frozen=True, slots=True)
class InventedModel:
    """A text-to-image model as numbers: bytes of its components, and what its runs take."""

    name: str
    text_encoder_bytes: int = 1 * GIB
    diffusion_bytes: int = 5 * GIB
    vae_bytes: int = GIB // 6
    activation_bytes: int = 2 * GIB
    scratch_bytes: int = 128 * MIB
    encode_seconds: float = 0.1
    step_seconds: float = 0.1
    decode_seconds: float = 0.4

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        """Text encoder, diffusion model, VAE."""
        return (
            ComponentSpec(self._key(Role.TEXT_ENCODER), Role.TEXT_ENCODER, *[self.text_encoder_bytes] * 2),
            ComponentSpec(self._key(Role.DIFFUSION_MODEL), Role.DIFFUSION_MODEL, *[self.diffusion_bytes] * 2),
            ComponentSpec(self._key(Role.VAE), Role.VAE, *[self.vae_bytes] * 2),
        )

    def job(self, job_id: str, prompt: str, seed: int, lora: str = "", steps: int = 20, priority: int = 0) -> JobSpec:
        """One picture. Equal prompts with equal LoRAs share their encode; `lora` "" is the bare model."""
        patches = f"{self.name}+{lora}" if lora else UNPATCHED
        encode = TaskSpec(
            TaskId(f"encode {self.name} {lora} {prompt}"),
            Stage.ENCODE,
            (self._use(Role.TEXT_ENCODER, patches, self.text_encoder_bytes // 4),),
            self.activation_bytes // 16,
            self.encode_seconds,
        )
        sample = TaskSpec(
            TaskId(f"sample {self.name} {lora} {prompt} {seed} {steps}"),
            Stage.SAMPLE,
            (self._use(Role.DIFFUSION_MODEL, patches, self.diffusion_bytes // 4, steps),),
            self.activation_bytes,
            self.step_seconds * steps,
            (encode.task_id,),
        )
        decode = TaskSpec(
            TaskId(f"decode {self.name} {lora} {prompt} {seed} {steps}"),
            Stage.DECODE,
            (self._use(Role.VAE, UNPATCHED, 0),),
            self.activation_bytes // 2,
            self.decode_seconds,
            (sample.task_id,),
        )
        return JobSpec(JobId(job_id), (encode, sample, decode), decode.task_id, priority=priority)

    def _key(self, role: Role) -> ComponentKey:
        return ComponentKey(f"{self.name}/{role.value}")

    def _use(self, role: Role, patches: str, patched_bytes: int, passes: int = 1) -> ComponentUse:
        touched_bytes = 0 if patches == UNPATCHED else patched_bytes
        return ComponentUse(self._key(role), self.scratch_bytes, patches, touched_bytes, passes)


def all_at_once(count: int) -> Iterator[float]:
    """A batch: every job at time 0."""
    return iter([0.0] * count)


def poisson(count: int, per_second: float, rng: Random) -> Iterator[float]:
    """Independent arrivals at a steady rate."""
    return accumulate(rng.expovariate(per_second) for _ in range(count))


def bursts(count: int, size: int, gap_seconds: float) -> Iterator[float]:
    """Batches of `size` jobs, one every `gap_seconds`."""
    return (number // size * gap_seconds for number in range(count))


def zipf_weights(count: int, exponent: float = 1.0) -> list[float]:
    """Popularity of `count` things, the first the most popular: 1 / rank ** exponent."""
    return [1.0 / float(rank**exponent) for rank in range(1, count + 1)]


@dataclass(frozen=True, slots=True)
class Mix:
    """What jobs ask for: models, LoRAs and prompts by popularity."""

    models: Sequence[InventedModel]
    #: LoRAs of every model; "" is the bare model
    loras: Sequence[str] = ("",)
    model_exponent: float = 1.0
    lora_exponent: float = 1.0
    #: jobs that ask for one prompt in a row, with different seeds
    seeds_per_prompt: int = 1
    steps: Sequence[int] = (20,)

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        """The components of all models."""
        return tuple(spec for model in self.models for spec in model.components)

    def submissions(self, arrivals: Iterator[float], rng: Random) -> Iterator[Submitted]:
        """One job for each arrival."""
        model_weights = zipf_weights(len(self.models), self.model_exponent)
        lora_weights = zipf_weights(len(self.loras), self.lora_exponent)
        model, lora, steps = self.models[0], self.loras[0], self.steps[0]
        for number, at in enumerate(arrivals):
            if number % self.seeds_per_prompt == 0:
                model = rng.choices(self.models, model_weights)[0]
                lora = rng.choices(self.loras, lora_weights)[0]
                steps = rng.choice(self.steps)
            prompt = f"prompt {number // self.seeds_per_prompt}"
            yield Submitted(at, model.job(f"job-{number}", prompt, number, lora, steps))
