"""Invented models: the components of a text-to-image model as numbers, and the jobs that use it.

Jobs have the usual structure: encode, sample, decode; LoRAs that patch the diffusion model and optionally the text
encoder; ControlNets that run with the diffusion model at every step. Knows nothing of the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from modelpool.pool.values.core.errors import GIB, MIB
from modelpool.pool.values.specs.spec import (
    ComponentKey,
    ComponentSpec,
    ComponentUse,
    JobId,
    JobSpec,
    Role,
    Stage,
    TaskId,
    TaskSpec,
    UserId,
)


@dataclass(frozen=True, slots=True)
class InventedModel:
    """A text-to-image model as numbers: bytes of its components, and times of its runs.

    patched_share          fraction of the bytes of a component in modules that LoRAs patch
    loras_reach_text       whether LoRAs patch the text encoder too; if not, jobs with any LoRAs share an encode
    controlnet_step_share  fraction of a step's seconds that each ControlNet adds
    degrees                numbers of GPUs that may share a sampling run
    """

    name: str
    text_encoder_bytes: int = 1 * GIB
    diffusion_bytes: int = 5 * GIB
    vae_bytes: int = GIB // 6
    activation_bytes: int = 2 * GIB
    scratch_bytes: int = 128 * MIB
    encode_seconds: float = 0.1
    step_seconds: float = 0.1
    decode_seconds: float = 0.4
    lora_bytes: int = 256 * MIB
    controlnet_bytes: int = 2 * GIB
    patched_share: float = 0.25
    loras_reach_text: bool = True
    controlnet_step_share: float = 0.4
    degrees: tuple[int, ...] = (1,)

    @property
    def components(self) -> tuple[ComponentSpec, ...]:
        """Text encoder, diffusion model, VAE."""
        return (
            self._spec(Role.TEXT_ENCODER, self.text_encoder_bytes),
            self._spec(Role.DIFFUSION_MODEL, self.diffusion_bytes),
            self._spec(Role.VAE, self.vae_bytes),
        )

    def adapters(self, loras: Iterable[str] = (), controlnets: Iterable[str] = ()) -> tuple[ComponentSpec, ...]:
        """The components of these LoRAs and ControlNets, which belong to this model; "" means none."""
        return (
            *(self._spec(Role.LORA, self.lora_bytes, name) for name in loras if name),
            *(self._spec(Role.CONTROLNET, self.controlnet_bytes, name) for name in controlnets if name),
        )

    def job(
        self,
        job_id: str,
        prompt: str,
        seed: int,
        *,
        loras: Sequence[str] = (),
        controlnets: Sequence[str] = (),
        steps: int = 20,
        priority: int = 0,
        user: str = "",
        deadline: float | None = None,
        batch: str = "",
    ) -> JobSpec:
        """One image. Jobs with equal prompts share their encode, if LoRAs reach the text encoder only with equal LoRAs.

        A patch set consists of its LoRAs in this order, each at most once; names must not contain "+" or blanks, which
        separate names in task and patch set ids.
        """
        patch_set = "+".join(loras)
        text_patches = patch_set if self.loras_reach_text else ""
        encode = TaskSpec(
            TaskId(f"encode {self.name} {text_patches} {prompt}"),
            Stage.ENCODE,
            (self._use(Role.TEXT_ENCODER, self.text_encoder_bytes, loras if self.loras_reach_text else ()),),
            self.activation_bytes // 16,
            self.encode_seconds,
            together="encode",
        )
        work = f"{self.name} {patch_set} {'+'.join(controlnets)} {prompt} {seed} {steps}"
        sample = TaskSpec(
            TaskId(f"sample {work}"),
            Stage.SAMPLE,
            (
                self._use(Role.DIFFUSION_MODEL, self.diffusion_bytes, loras, steps),
                *(ComponentUse(self.key(Role.CONTROLNET, n), self.scratch_bytes, passes=steps) for n in controlnets),
            ),
            self.activation_bytes,
            self.step_seconds * steps * (1.0 + self.controlnet_step_share * len(controlnets)),
            (encode.task_id,),
            together=f"sample {steps}",
            degrees=self.degrees,
        )
        decode = TaskSpec(
            TaskId(f"decode {work}"),
            Stage.DECODE,
            (self._use(Role.VAE, self.vae_bytes),),
            self.activation_bytes // 2,
            self.decode_seconds,
            (sample.task_id,),
            together="decode",
        )
        return JobSpec(
            JobId(job_id),
            (encode, sample, decode),
            decode.task_id,
            priority=priority,
            user=UserId(user),
            deadline=deadline,
            batch=batch,
        )

    def key(self, role: Role, name: str = "") -> ComponentKey:
        """The component of this model in that role; LoRAs and ControlNets have a name in addition."""
        return ComponentKey(f"{self.name}/{role.value}" + (f"/{name}" if name else ""))

    def _spec(self, role: Role, size_bytes: int, name: str = "") -> ComponentSpec:
        return ComponentSpec(self.key(role, name), role, size_bytes, size_bytes)

    def _use(self, role: Role, size_bytes: int, loras: Sequence[str] = (), passes: int = 1) -> ComponentUse:
        if not loras:
            return ComponentUse(self.key(role), self.scratch_bytes, passes=passes)
        return ComponentUse(
            self.key(role),
            self.scratch_bytes,
            f"{self.name}+{'+'.join(loras)}",
            int(size_bytes * self.patched_share),
            passes,
            tuple(self.key(Role.LORA, name) for name in loras),
        )
