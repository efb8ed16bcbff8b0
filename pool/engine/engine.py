"""`Engine`: everything that one GPU does, in one process. Opens models, leases memory, runs stages.

Knows one device and no other; neither Ray nor the scheduler. The worker actor is a thin shell around it;
`pool.engine.explicit_control` is another, for people who move weights themselves. A run that runs out of memory is
tried again with less, as `pool.plan.oom_ladder` decides; each try starts from the run's beginning, and the same work
gives the same result. Not thread safe, apart from the hooks of a run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch

from modelpool.pool.conditioning.image_embeds import see_images
from modelpool.pool.conditioning.micro_conditioning import pooled_width
from modelpool.pool.controlnets.patchers import ControlPatchers
from modelpool.pool.core.family_facts import LatentFacts
from modelpool.pool.core.lru_cache import Recent
from modelpool.pool.core.stage_params import (
    DecodeWork,
    EncodeImageWork,
    EncodeWork,
    LoraRef,
    Member,
    ModelRef,
    Outcome,
    Result,
    RunHooks,
    SampleWork,
    SeeImageWork,
    Seen,
    Work,
    role_of,
)
from modelpool.pool.core.stopping import stop_if_asked
from modelpool.pool.devices.capabilities import DeviceCapabilities, detect_capabilities
from modelpool.pool.devices.kinds import OpenDevice
from modelpool.pool.devices.opening import measure_link, open_with_room, usable_bytes
from modelpool.pool.devices.transfer_pipeline import UploadRoad
from modelpool.pool.devices.uploads import AHEAD_BYTES
from modelpool.pool.devices.vram_policy import VramPolicy, choose_policy, reserve_for, rules_for
from modelpool.pool.engine.batching import joint_hooks, joint_task, run_together
from modelpool.pool.engine.image_stages import decode_images, encode_images
from modelpool.pool.engine.stages import TextEncoder, encode_together, sample_together
from modelpool.pool.engine.task_runner import Run, TaskRunner
from modelpool.pool.estimates.activation_calibration import ActivationError
from modelpool.pool.estimates.stage_peak_bytes import text_width
from modelpool.pool.estimates.typical_run import usual_call
from modelpool.pool.loading.assembled_checkpoint import members_of
from modelpool.pool.loading.open_model import OpenModel
from modelpool.pool.ops.attention import attention_priority
from modelpool.pool.patcher.compute_context import ComputeTools
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.patcher.out_of_memory import give_back_unused
from modelpool.pool.plan.residency import Residency
from modelpool.pool.specs.spec import ComponentKey, Division, Role, RunCost, TaskSpec
from modelpool.pool.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.text.embeddings import Embedding, read_embedding
from modelpool.pool.vram.vram_manager import Lease, VramManager, Wanted, with_extras

#: embeddings whose vectors are kept; each is some tens of KiB
EMBEDDINGS_KEPT = 64
Kind = TypeVar("Kind")
#: the components that one run uses: the text encoders, or one of the others
Patchers: TypeAlias = tuple[ModelPatcher, ...]

#: of a small device, no more than this part is for copies that are made ahead
AHEAD_SHARE = 32


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one engine is opened with.

    device        the name of a kind, such as "cuda", "sim" or "cpu"; "auto" is the kind of the GPU that Ray gave
    index         which device of that kind this process sees
    budget_bytes  most that weights, scratch and activations may take together; None is what the device has
    threads       CPU threads of torch; the same everywhere, since it can change the last bits of a result
    vram_policy   how eagerly weights are kept on the device; None is what the device suggests
    reserve_bytes of what the device has free, so much is left to other programs; None is the device's usual reserve
    """

    device: str
    index: int = 0
    budget_bytes: int | None = None
    threads: int = 1
    vram_policy: VramPolicy | None = VramPolicy.NORMAL
    reserve_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """How an engine introduces itself."""

    capacity_bytes: int
    link_bytes_per_second: float
    device_name: str


class Engine:
    """One GPU's worth of models. Open with `Engine.open`, end with `close`."""

    def __init__(
        self,
        device: OpenDevice,
        facts: EngineFacts,
        road: UploadRoad,
        capabilities: DeviceCapabilities,
        policy: VramPolicy = VramPolicy.NORMAL,
        reserve_bytes: int = 0,
    ) -> None:
        self._device = device
        self._facts = facts
        rules, kept_free_bytes = rules_for(policy), reserve_bytes + road.ahead_bytes
        self.vram = VramManager(facts.capacity_bytes, rules, lambda: device.memory.free_bytes() - kept_free_bytes)
        self._road = road
        self._runner = TaskRunner(device, self.vram, road, rules.may_stream, self._run_to_come)
        self._tools = ComputeTools(device.memory.ledger, road, attention=attention_priority(capabilities))
        self._capabilities = capabilities
        self._tokenizer = ClipTokenizer.load()
        self._embeddings: Recent[tuple[str, str], Embedding] = Recent(EMBEDDINGS_KEPT)
        self._models: dict[str, OpenModel] = {}
        self._patchers: dict[ComponentKey, ModelPatcher] = {}
        self._controls = ControlPatchers(device.torch_device, capabilities, self._tools, self._patchers, self.vram.add)

    @classmethod
    def open(cls, settings: EngineSettings) -> Engine:
        """Take a device. Sets torch's thread count for this process.

        Raises UserError when there is no such device, DoesNotFit when others have filled it.
        """
        torch.set_num_threads(settings.threads)
        device = open_with_room(settings.device, settings.index, settings.budget_bytes)
        card = detect_capabilities(device.kind, settings.index)
        on_windows = sys.platform == "win32"
        reserve_bytes = reserve_for(settings.reserve_bytes, device.kind, card.total_bytes, on_windows)
        room_bytes = usable_bytes(device, settings.index, settings.budget_bytes, reserve_bytes)
        road = UploadRoad.open(device.torch_device, ahead_bytes=min(AHEAD_BYTES, room_bytes // AHEAD_SHARE))
        try:
            link = measure_link(device.torch_device, road, room_bytes)
        except BaseException:
            road.close()
            raise
        capabilities = replace(card, total_bytes=room_bytes)
        policy = choose_policy(settings.vram_policy, device.kind, card.shares_host_memory).value
        # copies that are made ahead are outside of what plans know of
        facts = EngineFacts(room_bytes - road.ahead_bytes, link, device.name)
        return cls(device, facts, road, capabilities, policy, reserve_bytes)

    def introduce(self) -> EngineFacts:
        """What this engine can hold and how fast bytes get there."""
        return self._facts

    def residency(self) -> Residency:
        """Which weights are on the device."""
        return self.vram.residency()

    def run(
        self,
        task: TaskSpec,
        work: Work,
        inputs: tuple[Result, ...],
        hooks: RunHooks,
        fresh: bool = False,
        needed_next: Sequence[ComponentKey] = (),
    ) -> tuple[Result, RunCost]:
        """Do `work` and say what it cost. `task` carries the sizes that were planned with.

        `fresh` takes everything off the device first (a second try after running out of memory); `needed_next` are the
        components that are expected to be needed here afterwards, soonest first. When memory runs out the run starts
        again with less (steps are then told again from the first); what was done about it is in the cost.
        Raises DoesNotFit when it does not fit the budget, however it is divided; RanOutOfMemory when it should and
        does not; OutOfHostMemory; Stopped; a UserError about a file. Residency is exact afterwards.
        """
        if fresh:
            self.vram.unload_all()
            give_back_unused(self._device.memory)
        stop_if_asked(hooks.should_stop)
        results, cost = self._run_at_once((Member(task, work, inputs, hooks),), tuple(needed_next))
        return results[0], cost

    def run_together(self, members: Sequence[Member], needed_next: Sequence[ComponentKey] = ()) -> tuple[Outcome, ...]:
        """Do the works of all members, in one run where that goes: the outcome of each, in order.

        A result is that of the member run by itself, but in the last bits: kernels may round otherwise for several
        images. The cost of each is its share. See `pool.engine.batching.run_together` for what happens when it goes
        wrong;
        never raises an Exception, and residency is exact afterwards.
        """
        return run_together(members, lambda some: self._run_at_once(some, tuple(needed_next)))

    def run_as_is(
        self, task: TaskSpec, work: Work, inputs: tuple[Result, ...], patchers: Patchers, hooks: RunHooks
    ) -> Result:
        """Do `work` with `patchers`, whatever of them is resident; no weights are moved before, and none are let go.

        For people who move weights themselves. Divided where the room asks for it. Raises DoesNotFit when what is
        resident leaves too little, with what would have to leave; RanOutOfMemory, OutOfHostMemory and Stopped.
        """
        return self._runner.run_as_is(self._run_of((Member(task, work, inputs, hooks),), patchers))[0]

    def activation_errors(self) -> tuple[ActivationError, ...]:
        """How far estimates of activations were from what runs took, by component and stage."""
        return self._runner.book.report()

    def latent_facts(self, model: ModelRef) -> LatentFacts:
        """The latents of `model`. Opens the file when it is new."""
        return self._opened(model).latent

    def text_widths(self, model: ModelRef) -> tuple[int, int]:
        """The widths of a text and of its pooled form that the diffusion model of `model` reads; 0 for no such form."""
        opened = self._opened(model)
        module = opened.component(Role.DIFFUSION_MODEL).built.module
        conditions = opened.checkpoint.family.sampling.size_conditions
        return text_width(module), pooled_width(conditions, module)

    @property
    def device(self) -> OpenDevice:
        """The device that everything runs on."""
        return self._device

    @contextmanager
    def ready(self, patcher: ModelPatcher, activation_bytes: int, passes: int = 1) -> Iterator[Lease]:
        """A patcher and all that its runs need beside it, on the device for the length of the block, as
        `VramManager.lease`: for runs that are put together by hand."""
        with self.vram.lease(with_extras(patcher, passes), activation_bytes) as lease:
            yield lease

    def patcher(self, model: ModelRef, role: Role, loras: Sequence[LoraRef] = ()) -> ModelPatcher:
        """A clone over one component of `model`, with the patches of `loras`. Opens the file when it is new."""
        opened = self._opened(model)
        component = opened.component(role)
        patches = opened.patch_set(role, loras)
        base = self._patchers.get(component.key)
        if base is None:
            opened.checkpoint.read_ahead(role)  # a run asks for it
            base = ModelPatcher.of(
                component.key,
                role,
                component.built.module,
                self._device.torch_device,
                component.form,
                self._tools,
                usual_call(opened, role),
            )
            self._patchers[component.key] = base
            self.vram.add(base)
        clone = base.clone()
        clone.patches = patches
        return clone

    def close(self) -> None:
        """Take every byte off the device, and give back what streaming took of the host. Idempotent."""
        self.vram.close()
        self._road.close()

    def _run_at_once(
        self, members: Sequence[Member], needed_next: tuple[ComponentKey, ...]
    ) -> tuple[tuple[Result, ...], RunCost]:
        patchers = self._used_by(members[0].work)
        return self._runner.run(self._run_of(members, patchers, needed_next))

    def _run_of(
        self, members: Sequence[Member], patchers: Patchers, needed_next: tuple[ComponentKey, ...] = ()
    ) -> Run[tuple[Result, ...]]:
        """Members of one kind as one run."""
        task, hooks = joint_task([member.task for member in members]), joint_hooks(members)
        uploading = RunHooks(hooks.on_step, lambda: self._stops(hooks), hooks.coming)

        def compute(division: Division | None) -> tuple[Result, ...]:
            return self._compute(members, patchers, uploading, division)

        return Run(task, _wanted(patchers, task), compute, hooks.should_stop, needed_next, len(members))

    def _learned(self, works: Sequence[EncodeWork]) -> tuple[Embedding, ...]:
        """The embeddings that the texts of `works` name."""
        named = {each.name: each for work in works for each in work.embeddings}
        # whoever made the references has allowed what they lead to; nothing in a pickle is run
        return tuple(
            self._embeddings.get(
                (each.name, each.sha256), partial(read_embedding, each.path, each.name, allow_pickle=True)
            )
            for each in named.values()
        )

    def _stops(self, hooks: RunHooks) -> bool:
        """Whether a run is to stop. When it is not, weights of the task that is to come are brought."""
        if hooks.should_stop():
            return True
        self._runner.ahead.advance(hooks.coming())
        return False

    def _run_to_come(self, task: TaskSpec, work: Work) -> Run[Any] | None:
        """The run of a task that is to come; None where its model would have to be opened first, or a LoRA."""
        opened = self._models.get(work.model.sha256)
        loras = () if isinstance(work, DecodeWork | EncodeImageWork | SeeImageWork) else work.loras
        if opened is None or not opened.has_matched(loras) or any(u.component not in self._patchers for u in task.uses):
            return None
        return Run(task, _wanted(self._used_by(work), task), lambda division: (), lambda: False)

    def _opened(self, model: ModelRef) -> OpenModel:
        if model.sha256 not in self._models:
            self._models[model.sha256] = OpenModel(model, self._capabilities)
        return self._models[model.sha256]

    def _used_by(self, work: Work) -> Patchers:
        match work:
            case EncodeWork():
                roles = self._opened(work.model).checkpoint.family.text_encoders
                return tuple(self.patcher(work.model, role, work.loras) for role in roles)
            case SampleWork():
                return (self.patcher(work.model, role_of(work), work.loras), *self._controls.of(work.controls))
            case SeeImageWork():
                return (self.patcher(work.model, Role.VISION_ENCODER),)
            case EncodeImageWork() | DecodeWork():
                return (self.patcher(work.model, Role.VAE),)

    def _compute(
        self, members: Sequence[Member], patchers: Patchers, hooks: RunHooks, division: Division | None
    ) -> tuple[Result, ...]:
        works, inputs = [member.work for member in members], [member.inputs for member in members]
        opened = self._opened(works[0].model)
        latent, family = opened.latent, opened.checkpoint.family
        match works[0]:
            case EncodeWork():
                # by the model's own roles: a patcher may have that of another model with equal weights
                roles = zip(patchers, family.text_encoders, strict=True)
                encoders = [_text_encoder(opened, patcher, role) for patcher, role in roles]
                texts, seen = _all_of(works, EncodeWork), [one for one in inputs[0] if isinstance(one, Seen)]
                learned = self._learned(texts)
                return encode_together(texts, encoders, self._tokenizer, hooks, family.text_set, learned, seen)
            case SampleWork():
                sampled = _all_of(works, SampleWork)
                facts, controls = family.sampling, patchers[1:]
                return sample_together(sampled, inputs, patchers[0], latent, hooks, division, facts, controls)
            case SeeImageWork():
                sight = family.sampling.sight
                assert Role.VISION_ENCODER in family.prefixes, f"{family.name} sees no images"
                return see_images(_all_of(works, SeeImageWork), inputs, patchers[0], sight, hooks)
            case EncodeImageWork():
                return encode_images(_all_of(works, EncodeImageWork), inputs, patchers[0], latent, hooks, division)
            case DecodeWork():
                return decode_images(_all_of(works, DecodeWork), inputs, patchers[0], latent, hooks, division)


def _wanted(patchers: Patchers, task: TaskSpec) -> tuple[Wanted, ...]:
    """What a run of `task` leases."""
    passes = task.uses[0].passes
    return tuple(one for patcher in dict.fromkeys(patchers) for one in with_extras(patcher, passes))


def _text_encoder(opened: OpenModel, patcher: ModelPatcher, role: Role) -> TextEncoder:
    """One of the model's text encoders, as its family reads it."""
    family = opened.checkpoint.family
    if not family.text_set:
        name = dict(zip(family.text_encoders, members_of(family), strict=False)).get(role, "")
        return TextEncoder(patcher, family.texts[role], name=name)
    text = opened.reading(role)
    return TextEncoder(patcher, text.reading, text.place, text.tokenizer, text.reading.encoder)


def _all_of(found: Sequence[object], kind: type[Kind]) -> tuple[Kind, ...]:
    """`found`, all of which are of one kind; anything else is our mistake."""
    assert all(isinstance(one, kind) for one in found), f"expected {kind.__name__} only, found {found}"
    return tuple(one for one in found if isinstance(one, kind))
