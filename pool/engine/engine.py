"""`Engine`: one GPU in one process. Opens models, leases memory, runs stages.

Knows one device; neither Ray nor the scheduler. The worker actor is a thin shell around it;
`pool.engine.explicit_control` is another, for users who move weights themselves. A run that runs out of memory is
retried with less, as `pool.weights.plan.oom_ladder` decides; each attempt starts from the beginning, and equal tasks
give equal results. Not thread-safe, except for the hooks of a run.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from modelpool.pool.catalog.estimates.activation_calibration import ActivationError
from modelpool.pool.catalog.estimates.activation_estimator import empty_conditioning, widths_of
from modelpool.pool.catalog.estimates.stage_peak_bytes import text_width
from modelpool.pool.catalog.estimates.typical_run import typical_call
from modelpool.pool.devices.capabilities import DeviceCapabilities, detect_capabilities
from modelpool.pool.devices.cuda_graphs import CudaGraphs
from modelpool.pool.devices.device_kinds import DeviceKind, OpenDevice
from modelpool.pool.devices.opening import measure_link, open_with_room, usable_bytes
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.devices.uploads import AHEAD_BYTES
from modelpool.pool.devices.vram_policy import VramPolicy, choose_policy, reserve_for, rules_for
from modelpool.pool.devices.workspaces import communicator_bytes, workspace_bytes
from modelpool.pool.engine.all_run_parts import RUN_PARTS
from modelpool.pool.engine.batching import batch_hooks, batch_task, padded, run_batch
from modelpool.pool.engine.engine_capacity import EngineCapacity, EngineFacts
from modelpool.pool.engine.image_stages import (
    begin_decode_images,
    decode_image_part,
    decode_images,
    encode_images,
    join_image,
)
from modelpool.pool.engine.load_decisions import products_kernel, stored_formats
from modelpool.pool.engine.open_pass import Joining, OpenPass, run_open_pass
from modelpool.pool.engine.own_node_run import run_own_node
from modelpool.pool.engine.preview_maker import PreviewMaker, first_frame_of, small_decode_bytes
from modelpool.pool.engine.sampling_stage import ReadyRun, ready_run, sample_batch
from modelpool.pool.engine.stages import TextEncoder, encode_batch
from modelpool.pool.engine.task_runner import TaskRun, TaskRunner
from modelpool.pool.families.control_video_models import follows_video
from modelpool.pool.inference.conditioning.image_embeds import embed_images, use_of
from modelpool.pool.inference.conditioning.micro_conditioning import pooled_width
from modelpool.pool.inference.conditioning.run_parts import PreparePart, RunResources, RunResults
from modelpool.pool.inference.controlnets.open_controlnet import OpenControlNet
from modelpool.pool.inference.controlnets.open_gligen import OpenGligen
from modelpool.pool.inference.guidance.text_loras import TextLoras
from modelpool.pool.inference.image_prompts.open_adapter import OpenImagePrompt
from modelpool.pool.inference.operations.operate import operate
from modelpool.pool.inference.operations.own_nodes import NO_NODES, VERSION, OpenedNode
from modelpool.pool.inference.pixels.latent_pixels import decoded
from modelpool.pool.inference.upscalers.latent_upsampler import upscale_latents
from modelpool.pool.inference.upscalers.open_upscaler import OpenUpscaler
from modelpool.pool.inference.upscalers.upscale import upscale_images
from modelpool.pool.models.loading.assembled_checkpoint import members_of
from modelpool.pool.models.loading.open_model import Component, OpenModel
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.models.text.embeddings import Embedding, read_embedding
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.fast_path import FastPath, FastPaths
from modelpool.pool.values.core.joining import why_not_joining
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.previews import PreviewWish
from modelpool.pool.values.core.sampling_facts import SamplingFacts
from modelpool.pool.values.core.stage_params import (
    BatchMember,
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    FloatArray,
    GligenRef,
    ImageEmbeds,
    LoraRef,
    ModelRef,
    OperationParams,
    Outcome,
    PixelArray,
    Result,
    RunHooks,
    RunState,
    SampleParams,
    StageParams,
    UpscaleParams,
    VisionEncodeParams,
    control_key,
    encoders_run,
    gligen_key,
    image_prompt_key,
    role_of,
    upscaler_key,
)
from modelpool.pool.values.core.stopping import stop_if_asked
from modelpool.pool.values.core.task_inputs import IMAGE, TaskInputs
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import ComponentKey, ExecutionMode, Role, RunCost, TaskSpec
from modelpool.pool.weights.ops.attention import attention_priority
from modelpool.pool.weights.ops.attention_calls import AttentionKernels
from modelpool.pool.weights.ops.attention_choices import KernelChoices
from modelpool.pool.weights.ops.layer_choice import Products
from modelpool.pool.weights.patcher.compiled_blocks import BlockCompiler
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.graphed_calls import GraphStore
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.patcher.out_of_memory import release_unused
from modelpool.pool.weights.patcher.scheduled_patches import PatchesAtStep
from modelpool.pool.weights.patcher.weight_form import MemoryFormat, WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.pool.weights.vram.attached_patchers import AttachedPatchers
from modelpool.pool.weights.vram.gang_share import GangShare
from modelpool.pool.weights.vram.vram_manager import Lease, PatcherUse, VramManager, with_dependents

if TYPE_CHECKING:
    from modelpool.pool.engine.gang.kept_group import KeptGroup

#: cached textual inversions; each is some tens of KiB
MAX_EMBEDDINGS = 64
#: models without bytes on the device that stay open; each is a mapping, its modules and their key maps
MODELS_KEPT = 32
Kind = TypeVar("Kind")
#: the components that one run uses: the text encoders, or one of the others
Patchers: TypeAlias = tuple[ModelPatcher, ...]

#: of a small device, at most this fraction is for copies ahead of use
AHEAD_SHARE = 32


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of one engine.

    device        name of a device kind, such as "cuda", "sim" or "cpu"; "auto" is the kind of the GPU that Ray assigned
    index         index of the device within its kind, as this process sees it
    budget_bytes  maximum of weights, scratch and activations together; None is the memory of the device
    threads       CPU threads of torch; equal everywhere, since it can change the last bits of a result
    vram_policy   how eagerly weights are kept on the device; None is the default of the device
    reserve_bytes free device memory left to other programs; None is the default reserve
    compiles      whether repeated blocks of diffusion models are compiled; never on the simulated device
    fast_paths    the same and `cuda_graphs`, by model, in place of both
    peer_bytes_per_second  of weights from one GPU to all others of a gang; None: gangs measure it
    products      how linear layers with quantized weights multiply
    measures_attention  whether the attention kernel for each class of shapes is measured; only on CUDA
    loras_at_run_time  whether LoRAs on linear layers are products next to these, in place of merged weights
    memory_format  the order of dimensions of convolution weights
    cuda_graphs   whether calls of resident diffusion models are captured as CUDA graphs; only on CUDA
    """

    device: str
    index: int = 0
    budget_bytes: int | None = None
    threads: int = 1
    vram_policy: VramPolicy | None = VramPolicy.NORMAL
    reserve_bytes: int | None = None
    compiles: bool = False
    products: Products = Products.EXACT
    measures_attention: bool = False
    loras_at_run_time: bool = False
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    cuda_graphs: bool = False
    fast_paths: FastPaths | None = None
    peer_bytes_per_second: float | None = None

    @property
    def paths(self) -> FastPaths:
        """How calls of diffusion models are made, by model."""
        return self.fast_paths or FastPaths(FastPath(self.compiles, self.cuda_graphs))


#: every model has both
ALL_FAST_PATHS = FastPaths(FastPath(True, True))


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    """How an engine computes the calls of its models: kernels, fast paths and the form of weights.

    compiler    compiles repeated blocks of diffusion models; None: none are compiled
    graphs      captures calls of diffusion models; None: none are captured
    fast_paths  the models for which `compiler` and `graphs` are used
    attention   measured attention kernels; None: by the device
    The others are as in `EngineSettings`.
    """

    compiler: BlockCompiler | None = None
    graphs: GraphStore | None = None
    fast_paths: FastPaths = ALL_FAST_PATHS
    attention: KernelChoices | None = None
    products: Products = Products.EXACT
    loras_at_run_time: bool = False
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS


USUAL_COMPUTE = ComputeSettings()


class Engine:
    """Runs tasks on one GPU. Open with `Engine.open`, end with `close`."""

    def __init__(
        self,
        device: OpenDevice,
        facts: EngineFacts,
        pipeline: TransferPipeline,
        capabilities: DeviceCapabilities,
        policy: VramPolicy = VramPolicy.NORMAL,
        reserve_bytes: int = 0,
        compute: ComputeSettings = USUAL_COMPUTE,
    ) -> None:
        """`reserve_bytes` of the device stay free for other programs."""
        self._device = device
        self._settings = compute
        graphs = compute.graphs
        #: the nodes of users that it may run, by name
        self.own_nodes: Mapping[str, OpenedNode] = NO_NODES
        rules, kept_free_bytes = rules_for(policy), reserve_bytes + pipeline.ahead_bytes
        self.vram = VramManager(
            facts.capacity_bytes, rules, lambda: device.memory.free_bytes() - kept_free_bytes, graphs
        )
        #: any thread may ask it whether it may grow
        self.capacity = EngineCapacity(
            device, self.vram, facts, reserve_bytes, may_grow=not capabilities.shares_host_memory
        )
        self._pipeline = pipeline
        kernels = AttentionKernels(attention_priority(capabilities), compute.attention)
        self._tools = RunTools(
            device.memory.ledger, pipeline, device.linear, kernels, compute.compiler, graphs, device.layer
        )
        self._runner = TaskRunner(
            device,
            self.vram,
            pipeline,
            rules.may_stream,
            self._run_to_come,
            self._tools.works_around,
            lambda: 0 if graphs is None else graphs.calls,
        )
        self._capabilities = capabilities
        self._tokenizer = ClipTokenizer.load()
        self._embeddings: LruCache[tuple[str, str], Embedding] = LruCache(MAX_EMBEDDINGS)
        #: least recently used first
        self._models: dict[str, OpenModel] = {}
        self._patchers: dict[ComponentKey, ModelPatcher] = {}
        self._previews = PreviewMaker()
        #: of the current run in a gang: until all members had met
        self._meeting_seconds = 0.0
        self._kept_group: KeptGroup | None = None
        self._share, self._may_share = GangShare(), rules.may_stream and rules.weights_share >= 1
        #: of the current run in a gang, and the links to other GPUs
        self.gang_share = self._share
        shared = (device.torch_device, capabilities, self._tools, self._patchers, self.vram)
        self._controls = AttachedPatchers(*shared, Role.CONTROLNET, control_key, OpenControlNet)
        self._image_prompts = AttachedPatchers(*shared, Role.IMAGE_PROMPT, image_prompt_key, OpenImagePrompt)
        self._gligens = AttachedPatchers(*shared, Role.GLIGEN, gligen_key, OpenGligen)
        self._upscalers = AttachedPatchers(*shared, Role.UPSCALER, upscaler_key, OpenUpscaler)

    @classmethod
    def open(cls, settings: EngineSettings) -> Engine:
        """Open a device. Sets the thread count of torch for this process.

        Raises UserError if there is no such device, DoesNotFit if other programs have filled it.
        """
        torch.set_num_threads(settings.threads)
        device = open_with_room(settings.device, settings.index, settings.budget_bytes)
        with ExitStack() as undoing:
            undoing.callback(device.memory.close)
            opened = cls._open_on(device, settings, undoing)
            undoing.pop_all()
        return opened

    @classmethod
    def _open_on(cls, device: OpenDevice, settings: EngineSettings, undoing: ExitStack) -> Engine:
        """Return the engine of an open device; `undoing` gets what to undo if this fails."""
        card = detect_capabilities(device.kind, settings.index)
        on_windows = sys.platform == "win32"
        reserve_bytes = reserve_for(settings.reserve_bytes, device.kind, card.total_bytes, on_windows)
        path = settings.paths.any.on(device.kind.value)
        workspaces_bytes = workspace_bytes(device.kind, card.generation, card.total_bytes, os.environ, path.captures)
        room_bytes = usable_bytes(device, settings.index, settings.budget_bytes, reserve_bytes, workspaces_bytes)
        pipeline = TransferPipeline.open(device.torch_device, ahead_bytes=min(AHEAD_BYTES, room_bytes // AHEAD_SHARE))
        undoing.callback(pipeline.close)
        link = measure_link(device.torch_device, pipeline, room_bytes)
        capabilities = replace(card, total_bytes=room_bytes)
        policy = choose_policy(settings.vram_policy, device.kind, card.shares_host_memory).value
        overhead_bytes = pipeline.ahead_bytes + workspaces_bytes
        facts = EngineFacts(max(0, room_bytes - overhead_bytes), link, device.name, overhead_bytes)
        measures = settings.measures_attention and device.kind is DeviceKind.CUDA
        compute = ComputeSettings(
            BlockCompiler.open(device.name) if path.compiles else None,
            GraphStore(CudaGraphs(device.torch_device)) if path.captures else None,
            settings.paths,
            KernelChoices.open(device.name) if measures else None,
            settings.products,
            settings.loras_at_run_time,
            settings.memory_format,
        )
        opened = cls(device, facts, pipeline, capabilities, policy, reserve_bytes, compute)
        if settings.peer_bytes_per_second is not None:
            opened.gang_share.state(settings.peer_bytes_per_second)
        return opened

    def introduce(self) -> EngineFacts:
        """Return the capacity of this engine and the speeds of its links."""
        stated = self._share.stated
        return replace(
            self.capacity.facts,
            holds_shares=self._may_share and not self._capabilities.shares_host_memory,
            gang_link_bytes_per_second=0.0 if stated is None else stated.bytes_per_second,
        )

    def residency(self) -> Residency:
        """Return the weights on the device."""
        return self.vram.residency()

    def run(
        self,
        task: TaskSpec,
        work: StageParams,
        inputs: Mapping[str, Result],
        hooks: RunHooks,
        fresh: bool = False,
        needed_next: Sequence[ComponentKey] = (),
        resume: RunState | None = None,
        gang: Gang | None = None,
    ) -> tuple[Result, RunCost]:
        """Run `work` on its inputs by name (`pool.values.core.task_inputs`) and return its result and cost. `task` has
        the sizes that were planned with.

        `fresh` evicts everything first (a second try after running out of memory); `needed_next` are components
        expected to be needed afterwards, soonest first. It resumes from `resume`; if `hooks` make it pause, its result
        is such a state. If memory runs out, the run restarts with less (steps are reported again from the first); the
        steps taken are in the cost. Raises DoesNotFit if it does not fit the budget in any execution mode;
        RanOutOfMemory if it should fit and does not; OutOfHostMemory; Stopped; a UserError about a file. Residency is
        exact afterwards.

        With `gang`, the run is one that other workers share (`pool.engine.gang.gang_run`), tried once: raises
        GangBroken if one of them fails.
        """
        if isinstance(work, OperationParams):
            return _operated(work, inputs, hooks, self.own_nodes)
        if isinstance(work, DecodeParams) and work.joins:
            return _joined(work, inputs, hooks)
        if gang is None:
            results, cost = self._runner.run(self._prepared(task, work, inputs, hooks, fresh, needed_next, resume))
            return results[0], cost
        from modelpool.pool.engine.gang.gang_run import told_if_absent

        self._meeting_seconds, share = 0.0, self._share
        share.begin()
        with told_if_absent(gang):
            results, cost = self._runner.run(
                self._prepared(task, work, inputs, hooks, fresh, needed_next, resume, gang)
            )
        return results[0], replace(
            cost,
            meeting_seconds=self._meeting_seconds,
            streamed_bytes=max(0, cost.streamed_bytes - share.loaded_bytes - share.staged_bytes),
            share_bytes=share.loaded_bytes,
            exchanged_bytes=share.exchanged_bytes,
            gang_link_bytes_per_second=share.link_bytes_per_second if self._may_share else 0.0,
        )

    def begin(
        self,
        task: TaskSpec,
        work: StageParams,
        inputs: Mapping[str, Result],
        hooks: RunHooks,
        fresh: bool = False,
        needed_next: Sequence[ComponentKey] = (),
        resume: RunState | None = None,
    ) -> Callable[[], tuple[Result, RunCost]]:
        """As `run`, but the device may still decode when this returns, on a stream of its own, while the next runs
        begin: the returned function waits for the result, on any thread. The decode holds its weights and memory until
        `poll_pending` finds that somebody has the result, or another run needs them. See `TaskRunner.begin`."""
        if isinstance(work, DecodeParams) and work.joins:
            joined = _joined(work, inputs, hooks)
            return lambda: joined
        if isinstance(work, OperationParams):
            operated = _operated(work, inputs, hooks, self.own_nodes)
            return lambda: operated
        ending = self._runner.begin(self._prepared(task, work, inputs, hooks, fresh, needed_next, resume))

        def first() -> tuple[Result, RunCost]:
            results, cost = ending()
            return results[0], cost

        return first

    @property
    def is_pending(self) -> bool:
        """Whether a begun run holds weights and memory, as the device may still compute it."""
        return self._runner.is_pending

    def poll_pending(self) -> None:
        """Release what a begun run holds if somebody has its result. Takes microseconds."""
        self._runner.poll_pending()

    def release_pending(self) -> None:
        """Wait for a begun run that the device still computes, and release what it holds."""
        self._runner.release_pending()

    def _prepared(
        self,
        task: TaskSpec,
        work: StageParams,
        inputs: Mapping[str, Result],
        hooks: RunHooks,
        fresh: bool,
        needed_next: Sequence[ComponentKey],
        resume: RunState | None,
        gang: Gang | None = None,
    ) -> TaskRun[tuple[Result, ...]]:
        self.capacity.grow()
        if fresh:
            self._runner.release_pending()
            self.vram.unload_all()
            release_unused(self._device.memory)
        stop_if_asked(hooks.should_stop)
        stop_if_asked(hooks.should_pause)
        member = BatchMember(task, work, inputs, hooks, resume, gang)
        return self._run_of((member,), self._used_by(work), tuple(needed_next))

    def run_batch(
        self, members: Sequence[BatchMember], needed_next: Sequence[ComponentKey] = ()
    ) -> tuple[Outcome, ...]:
        """Run all members, as one batch if possible: returns the outcome of each, in order.

        Results equal the results of single runs except for the last bits: kernels may round differently for several
        images. The cost of each is its share. See `pool.engine.batching.run_batch` for failures; never raises an
        Exception, and residency is exact afterwards.
        """
        return run_batch(members, lambda some: self._run_at_once(some, tuple(needed_next)))

    def run_pass(self, joining: Joining, needed_next: Sequence[ComponentKey] = ()) -> None:
        """Run the members that `joining` has, all with one `pass_key`, in forward passes of their batch size, until
        none is left. Each may join at a step, and its outcome is told when it leaves.

        Results equal `run_batch`'s bit for bit. If memory runs out, all that are there begin again with less; if
        nothing is left to try, or the device is lost, that is the outcome of each. After another failure each is run
        alone. Never raises an Exception, and residency is exact afterwards.
        """
        run = partial(_run_open, self, tuple(needed_next))
        run_open_pass(joining, partial(_open_pass, self), run, lambda member: self.run_batch((member,))[0])

    def load_weights(
        self,
        model: ModelRef,
        roles: Sequence[Role],
        kept: Sequence[ComponentKey] = (),
        should_stop: Callable[[], bool] = lambda: False,
    ) -> int:
        """Load these components of a model outside of runs, until `should_stop`, evicting idle components but `kept`.

        What does not fit is left out, and loads nothing if the policy keeps no weights between runs. Returns the bytes
        on the bus. Raises RanOutOfMemory, OutOfHostMemory, or a UserError about a file. Residency is exact afterwards.
        """
        self.capacity.grow()
        patchers = dict.fromkeys(self.patcher(model, role) for role in roles)
        wanted = [use for patcher in patchers for use in with_dependents(patcher, 1)]
        _drop_group(self, None, None, sum(patcher.spec().weight_bytes for patcher in patchers))
        return self._runner.load(wanted, kept, should_stop)

    def run_as_is(
        self, task: TaskSpec, work: StageParams, inputs: Mapping[str, Result], patchers: Patchers, hooks: RunHooks
    ) -> Result:
        """Run `work` with `patchers`, whatever of them is resident; no weights are loaded or evicted.

        For users who move weights themselves. Divided if memory requires it. Raises DoesNotFit if resident weights
        leave too little, with what to unload; RanOutOfMemory, OutOfHostMemory and Stopped.
        """
        return self._runner.run_as_is(self._run_of((BatchMember(task, work, inputs, hooks),), patchers))[0]

    def activation_errors(self) -> tuple[ActivationError, ...]:
        """Return the errors of activation estimates, by component and stage."""
        return self._runner.calibration.report()

    def prepare_previews(self, model: ModelRef, wish: PreviewWish) -> None:
        """Prepare what previews of sampling `model` need, before a run: the first time, its VAE decodes some small
        latents, after a decode that is pending: what fails for lack of memory is not tried again. May raise anything
        that a run raises."""
        opened = self._opened(model)
        self._previews.note(model.sha256, opened.latent)
        # stage C of Stable Cascade has an encoder alone
        decodes = Role.VAE in opened.checkpoint.roles and not opened.checkpoint.family.sampling.is_prior_stage
        if decodes and self._previews.needs_map(model.sha256, wish):
            self._previews.fit(model.sha256, partial(self._decoded_frame, self.patcher(model, Role.VAE), opened.latent))

    def preview(self, model: ModelRef, latent_CHW: FloatArray, wish: PreviewWish) -> bytes | None:
        """Return a preview of a latent of `model`, as a WebP file; None if there is none. May be called from one other
        thread, and uses no memory of the device."""
        return self._previews.image(model.sha256, latent_CHW, wish)

    def _decoded_frame(self, vae: ModelPatcher, latent: LatentFacts, latent_CHW: FloatArray) -> PixelArray | None:
        """Decode a small latent; of a video, one frame."""
        with self.ready(vae, small_decode_bytes(vae, latent_CHW.shape[1:], latent)):
            hooks = RunHooks(lambda done, steps: None, lambda: False)
            return first_frame_of(decoded(torch.from_numpy(latent_CHW)[None], vae, latent, hooks))

    def latent_facts(self, model: ModelRef) -> LatentFacts:
        """Return the latent layout of `model`. Opens the file if it is new."""
        return self._opened(model).latent

    def text_widths(self, model: ModelRef) -> dict[str, int]:
        """Return the widths of a text that the diffusion model of `model` reads, as `Encoded.widths`."""
        opened = self._opened(model)
        text_inputs = empty_conditioning(opened)
        if text_inputs is not None:
            return widths_of(text_inputs(1))
        module = opened.component(Role.DIFFUSION_MODEL).built.module
        conditions = opened.checkpoint.family.sampling.size_conditions
        return {"context": text_width(module), "pooled": pooled_width(conditions, module)}

    def family_title(self, model: ModelRef) -> str:
        """Return the title of the family of `model`."""
        return self._opened(model).checkpoint.family.title

    @property
    def device(self) -> OpenDevice:
        """The device of this engine."""
        return self._device

    @contextmanager
    def ready(self, patcher: ModelPatcher, activation_bytes: int, passes: int = 1) -> Iterator[Lease]:
        """Lease a patcher and its dependents for the block, as `VramManager.lease`: for runs composed by hand. Waits
        for a decode that is pending."""
        self._runner.release_pending()
        with self.vram.lease(with_dependents(patcher, passes), activation_bytes) as lease:
            yield lease

    def patcher(self, model: ModelRef, role: Role, loras: Sequence[LoraRef] = ()) -> ModelPatcher:
        """Return a clone of one component of `model`, with the patches of `loras`. Opens the file if it is new."""
        opened = self._opened(model)
        component = opened.component(role)
        patches = opened.patch_set(role, loras)
        # a clone of a closed model that is still in use may have put the component back under management
        base = self._patchers.get(component.key) or self.vram.components.get(component.key)
        if base is None:
            opened.checkpoint.prefetch(role)  # a run asks for it
            base = ModelPatcher.of(
                component.key,
                role,
                component.built.module,
                self._device.torch_device,
                self._form_of(component),
                self._tools_for(component, model.name),
                typical_call(opened, role),
            )
            self.vram.components.add(base)
        self._patchers[component.key] = base
        clone = base.clone()
        clone.patches = patches
        return clone

    def _form_of(self, component: Component) -> WeightForm:
        """Return the form of a component's weights, with the options of this engine."""
        computed = component.form.compute_dtype
        return replace(
            component.form,
            patches_at_run_time=self._settings.loras_at_run_time,
            channels_last=self._settings.memory_format.puts_channels_last(component.role, computed, self._capabilities),
        )

    def _tools_for(self, component: Component, model: str) -> RunTools:
        """Return the tools of a component's runs, with the kernel that multiplies its quantized weights, and the
        tools of the model's fast path. Of models with equal weights, the first one decides."""
        kernel = products_kernel(stored_formats(component.weights), self._capabilities, self._settings.products)
        path, tools = self._settings.fast_paths.of(model), self._tools
        return replace(
            tools,
            linear=tools.linear if kernel is None else kernel,
            compiler=tools.compiler if path.compiles else None,
            graphs=tools.graphs if path.captures else None,
        )

    def close_unused_models(self) -> None:
        """Close all models that no run uses, with their mappings: evicts their weights. For files that have to go."""
        self._runner.release_pending()
        self.vram.unload_all()
        release_unused(self._device.memory)
        self._models.clear()
        for key in list(self._patchers):
            if self.vram.is_idle(key):
                del self._patchers[key]
                self.vram.remove(key)
        self._embeddings = LruCache(MAX_EMBEDDINGS)

    def close(self) -> None:
        """Evict everything and release what the device and the host held for it: the allocator's cache, which other
        engines of the process could not use otherwise, and pinned memory. Idempotent."""
        if self._kept_group is not None:
            self._kept_group.drop()
        self._runner.close()
        self.vram.close()
        self._pipeline.close()
        release_unused(self._device.memory)
        self._device.memory.close()

    def _run_at_once(
        self, members: Sequence[BatchMember], needed_next: tuple[ComponentKey, ...]
    ) -> tuple[tuple[Result, ...], RunCost]:
        if isinstance(members[0].work, OperationParams):
            works = _all_of([member.work for member in members], OperationParams)
            made = [
                _operated(work, each.inputs, each.hooks, self.own_nodes)
                for work, each in zip(works, members, strict=True)
            ]
            return tuple(result for result, _ in made), made[0][1]
        if isinstance(work := members[0].work, DecodeParams) and work.joins:
            image, cost = _joined(work, members[0].inputs, batch_hooks(members))
            return (image,), cost
        self.capacity.grow()
        patchers = self._used_by(members[0].work)
        return self._runner.run(self._run_of(members, patchers, needed_next))

    def _run_of(
        self, members: Sequence[BatchMember], patchers: Patchers, needed_next: tuple[ComponentKey, ...] = ()
    ) -> TaskRun[tuple[Result, ...]]:
        """Members of one kind as one run."""
        task, hooks = batch_task([member.task for member in members]), batch_hooks(members)
        caches = _caches_weights(members[0].work)
        # free memory of the device is for the cache then, so nothing is preloaded
        uploading = hooks if caches else replace(hooks, should_stop=lambda: self._stops(hooks))

        def compute(division: ExecutionMode | None) -> tuple[Result, ...]:
            return self._compute(padded(members), patchers, uploading, division)

        begin: Callable[[ExecutionMode | None], Callable[[], tuple[Result, ...]]] | None = None
        work = members[0].work
        if len(padded(members)) == 1 and isinstance(work, DecodeParams) and not work.is_tiled:
            begin = partial(self._begin_decode, members[0], work, patchers[0], uploading)
        together = len(padded(members))
        beside_bytes, weight_bytes = 0, sum(patcher.spec().weight_bytes for patcher in patchers)
        if (gang := members[0].gang) is not None:
            beside_bytes = _exchange_bytes(self._device.kind, gang, work)
            if weight_bytes + task.activation_bytes + beside_bytes > self.vram.capacity_bytes:  # it streams
                beside_bytes = _exchange_bytes(self._device.kind, gang, work, exchanges_weights=True)
        _drop_group(self, gang, work, weight_bytes + task.activation_bytes)
        return TaskRun(
            task,
            _wanted(patchers, task),
            compute,
            hooks.should_stop,
            needed_next,
            together,
            caches,
            begin,
            beside_bytes=beside_bytes,
            share_bytes=partial(_share_bytes, self, members[0].gang, patchers, task),
        )

    def _begin_decode(
        self,
        member: BatchMember,
        work: DecodeParams,
        vae: ModelPatcher,
        hooks: RunHooks,
        division: ExecutionMode | None,
    ) -> Callable[[], tuple[Result, ...]]:
        latent, inputs = self._opened(work.model).latent, TaskInputs.of_model(member.inputs)
        return begin_decode_images((work,), (inputs,), vae, latent, hooks, division, is_pending=True)

    def _learned(self, works: Sequence[EncodeParams]) -> tuple[Embedding, ...]:
        """The textual inversions that the texts of `works` name."""
        named = {each.name: each for work in works for each in work.embeddings}
        # the creator of the references has allowed these files; no code of a pickle runs
        return tuple(
            self._embeddings.get(
                (each.name, each.sha256), partial(read_embedding, each.path, each.name, allow_pickle=True)
            )
            for each in named.values()
        )

    def _stops(self, hooks: RunHooks) -> bool:
        """Whether a run should stop. If not, preload weights of the next task."""
        self._runner.poll_pending()
        if hooks.should_stop():
            return True
        self._runner.preloader.advance(hooks.preload_request())
        return False

    def _run_to_come(self, task: TaskSpec, work: StageParams) -> TaskRun[Any] | None:
        """The run of a task to preload; None if its model or a LoRA would have to be opened first."""
        if isinstance(work, OperationParams):
            return None
        if isinstance(work, UpscaleParams):
            if any(use.component not in self._patchers for use in task.uses):
                return None
            return TaskRun(task, _wanted(self._used_by(work), task), lambda division: (), lambda: False)
        if isinstance(work, DecodeParams) and work.joins:
            return None
        opened = self._models.get(work.model.sha256)
        loras = () if isinstance(work, DecodeParams | EncodeImageParams | VisionEncodeParams) else work.loras
        if opened is None or not opened.has_matched(loras) or any(u.component not in self._patchers for u in task.uses):
            return None
        return TaskRun(task, _wanted(self._used_by(work), task), lambda division: (), lambda: False)

    def _opened(self, model: ModelRef) -> OpenModel:
        opened = self._models.pop(model.sha256, None) or OpenModel(model, self._capabilities)
        self._models[model.sha256] = opened  # most recently used
        self._close_unused()
        return opened

    def _close_unused(self) -> None:
        """Close the least recently used models, except for the last `MODELS_KEPT`, with their mappings. A model stays
        open while any of its components has bytes on the device or is leased, and a component stays while another open
        model has it."""
        for sha256 in list(self._models)[:-MODELS_KEPT]:
            keys = self._models[sha256].component_keys
            if all(self.vram.is_idle(key) for key in keys if key in self.vram.components):
                del self._models[sha256]
                for key in keys - {key for opened in self._models.values() for key in opened.component_keys}:
                    if self._patchers.pop(key, None) is not None:
                        self.vram.remove(key)

    def _used_by(self, work: StageParams) -> Patchers:
        match work:
            case EncodeParams():
                family = self._opened(work.model).checkpoint.family
                roles = encoders_run(work, family.text_encoders, family.sampling)
                return tuple(self.patcher(work.model, role, work.loras) for role in roles)
            case SampleParams():
                own = self.patcher(work.model, role_of(work), work.loras)
                adapters = self._image_prompts.of(work.image_prompts)
                return (own, *self._controls.of(work.controls), *adapters, *self._gligens.of(work.all_of(GligenRef)))
            case VisionEncodeParams():
                return (self.patcher(work.model, Role.VISION_ENCODER),)
            case DecodeParams() if work.joins:
                return ()
            case EncodeImageParams() | DecodeParams():
                return (self.patcher(work.model, Role.VAE),)
            case UpscaleParams():
                upscaler = self._upscalers.of((work.model,))
                return upscaler if work.vae is None else (*upscaler, self.patcher(work.vae, Role.VAE))
            case OperationParams():
                return ()

    def _compute(
        self, members: Sequence[BatchMember], patchers: Patchers, hooks: RunHooks, division: ExecutionMode | None
    ) -> tuple[Result, ...]:
        works, inputs = [member.work for member in members], [TaskInputs.of_model(member.inputs) for member in members]
        if isinstance(works[0], UpscaleParams) and works[0].vae is not None:
            own, (upscaler, vae) = self._opened(works[0].vae).latent, patchers
            return upscale_latents(_all_of(works, UpscaleParams), inputs, upscaler, vae, own, hooks)
        if isinstance(works[0], UpscaleParams):
            return upscale_images(_all_of(works, UpscaleParams), inputs, patchers[0], hooks, division)
        assert not isinstance(works[0], OperationParams), "operations run without components"
        opened = self._opened(works[0].model)
        latent, family = opened.latent, opened.checkpoint.family
        match works[0]:
            case EncodeParams():
                # by the roles of this model: a patcher may have the role of another model with equal weights
                roles = zip(patchers, encoders_run(works[0], family.text_encoders, family.sampling), strict=True)
                encoders = [_text_encoder(opened, patcher, role, works[0].lyrics) for patcher, role in roles]
                texts, seen = _all_of(works, EncodeParams), inputs[0].read_all(IMAGE, ImageEmbeds)
                learned = self._learned(texts)
                return encode_batch(texts, encoders, self._tokenizer, hooks, family.text_set, learned, seen)
            case SampleParams():
                sampled = _all_of(works, SampleParams)
                facts, count = family.sampling, 1 + len(sampled[0].controls)
                adapters_end = count + len(sampled[0].image_prompts)
                controls, adapters, gligens = patchers[1:count], patchers[count:adapters_end], patchers[adapters_end:]
                self._previews.note(works[0].model.sha256, latent)
                resumed = [member.resume for member in members if member.resume is not None]
                at = _patches_in_run(opened, sampled[0])
                cache_bytes = self._runner.cache_bytes if _caches_weights(works[0]) else 0
                resources = RunResources(controls, adapters, resumed, at, cache_bytes, opened.silence(), gligens)
                sampling = partial(sample_batch, sampled, inputs, patchers[0], latent)
                if members[0].gang is None:
                    return sampling(hooks, division, facts, resources)
                return self._sampled_in_gang(members[0].gang, sampled[0], sampling, hooks, facts, resources)
            case VisionEncodeParams():
                vision_use = use_of(works[0], family.sampling)
                assert Role.VISION_ENCODER in family.prefixes, f"{family.name} sees no images"
                return embed_images(_all_of(works, VisionEncodeParams), inputs, patchers[0], vision_use, hooks)
            case EncodeImageParams():
                images, follows = _all_of(works, EncodeImageParams), follows_video(family.sampling)
                return encode_images(images, inputs, patchers[0], latent.of_encoder, hooks, division, follows)
            case DecodeParams() if works[0].part:
                return (decode_image_part(works[0], inputs[0], patchers[0], latent, hooks, division),)
            case DecodeParams():
                return decode_images(_all_of(works, DecodeParams), inputs, patchers[0], latent, hooks, division)

    def _sampled_in_gang(
        self,
        gang: Gang,
        work: SampleParams,
        sampling: Callable[..., RunResults],
        hooks: RunHooks,
        facts: SamplingFacts,
        resources: RunResources,
    ) -> RunResults:
        """Sample in a gang. Only such runs import its code, and torch's for process groups."""
        from modelpool.pool.engine.gang.gang_run import sample_in_gang
        from modelpool.pool.engine.gang.kept_group import KeptGroup

        def shared(own_hooks: RunHooks, part: PreparePart) -> RunResults:
            return sampling(own_hooks, None, facts, resources, (*RUN_PARTS, part))

        def met(seconds: float) -> None:
            self._meeting_seconds = seconds

        memory = self._device.memory
        if memory.free_bytes() - memory.cached_bytes() < _exchange_bytes(self._device.kind, gang, work):
            release_unused(memory)  # communicators are not from torch's allocator
        link = self.capacity.facts.link_bytes_per_second
        if self._kept_group is None:
            self._kept_group = KeptGroup()
        return sample_in_gang(gang, work.texts, shared, hooks, met, self._share, link, self._kept_group)


def _drop_group(engine: Engine, gang: Gang | None, work: StageParams | None, needed_bytes: int) -> None:
    """Leave the group of the last gang if another gang begins, or if a run alone may need its memory, of `needed_bytes`
    beside the resident bytes."""
    kept = engine._kept_group
    if kept is None:
        return
    if gang is not None:
        assert isinstance(work, SampleParams), "no other stage is shared"
        kept.drop_others(gang, work.texts)
        return
    group_bytes = communicator_bytes(engine.device.kind, kept.sizes)
    if group_bytes and engine.vram.residency().used_bytes + needed_bytes + group_bytes > engine.vram.capacity_bytes:
        kept.drop()


def _share_bytes(engine: Engine, gang: Gang | None, patchers: Patchers, task: TaskSpec, room_bytes: int) -> int:
    """Bytes of the device for weights that this worker holds for the other members of its gang, of those for all
    weights of a run."""
    if gang is None or not engine._may_share:
        return 0
    others_bytes = sum(patcher.spec().weight_bytes for patcher in patchers[1:])
    link = engine.capacity.facts.link_bytes_per_second
    return engine._share.plan(patchers[0], task.uses[0], gang.members, max(0, room_bytes - others_bytes), link)


def _exchange_bytes(kind: DeviceKind, gang: Gang, work: StageParams, exchanges_weights: bool = False) -> int:
    """Return the memory of a device that the exchange of tensors takes in a run that workers share."""
    from modelpool.pool.engine.gang.gang_layout import layout_of

    assert isinstance(work, SampleParams), "no other stage is shared"
    sizes: tuple[int, ...] = layout_of(gang.degree, work.texts).group_sizes
    if exchanges_weights and min(sizes) > 1:
        sizes = (*sizes, gang.degree)  # weights go to all members
    return communicator_bytes(kind, sizes)


def _operated(
    work: OperationParams, inputs: Mapping[str, Result], hooks: RunHooks, own: Mapping[str, OpenedNode]
) -> tuple[Result, RunCost]:
    """Return the result of an operation, or of a node of a user, and its cost: it uses no memory of the device."""
    stop_if_asked(hooks.should_stop)
    began = time.perf_counter()
    if work.name in own or any(name == VERSION for name, _ in work.settings):
        result = run_own_node(work, TaskInputs(inputs), own)
    else:
        result = operate(work, TaskInputs(inputs))
    hooks.on_step(1, 1)
    return result, RunCost(run_seconds=time.perf_counter() - began, resident=True)


def _open_pass(engine: Engine, joining: Joining, first: BatchMember) -> OpenPass:
    """Return the pass that begins with `first`."""
    assert isinstance(first.work, SampleParams), f"{first.work} has no steps to join at"
    opened = engine._opened(first.work.model)
    patchers, latent, facts = engine._used_by(first.work), opened.latent, opened.checkpoint.family.sampling
    engine._previews.note(first.work.model.sha256, latent)

    def prepare(member: BatchMember) -> ReadyRun:
        (work,) = _all_of([member.work], SampleParams)
        if reason := why_not_joining(work, facts):
            raise unusable_field("batch", work.batch_size, f"1: {reason}")
        resources = RunResources(resumed=() if member.resume is None else (member.resume,))
        inputs = (TaskInputs.of_model(member.inputs),)
        return ready_run((work,), inputs, patchers[0], latent, member.hooks, None, facts, resources)

    return OpenPass(joining, first.task, prepare, engine._pipeline.on_current_stream)


def _run_open(engine: Engine, needed_next: tuple[ComponentKey, ...], open_pass: OpenPass) -> RunCost:
    """Run a pass to its end; return its cost."""
    hooks, task, work = open_pass.hooks, open_pass.task, open_pass.members[0].work
    uploading = replace(hooks, should_stop=lambda: engine._stops(hooks))
    patchers = engine._used_by(work)
    weight_bytes = sum(patcher.spec().weight_bytes for patcher in patchers)
    _drop_group(engine, None, work, weight_bytes + task.activation_bytes)
    return engine._runner.run(
        TaskRun(
            task,
            _wanted(patchers, task),
            lambda division: open_pass.run(uploading),
            hooks.should_stop,
            needed_next,
            task.batch_size,
            on_loaded=open_pass.loaded,
        )
    )[1]


def _patches_in_run(opened: OpenModel, work: SampleParams) -> PatchesAtStep | None:
    """Return the patches of the diffusion model at each step, for the texts with each `TextLoras`; None if no LoRA
    changes in the run."""
    if not any(lora.changes_in_run for lora in work.loras):
        return None
    role, steps = role_of(work), work.schedule.steps

    def patches_at(step: int, hooks: object | None) -> PatchSet:
        places = hooks.places if isinstance(hooks, TextLoras) else range(len(work.loras))
        now = (work.loras[place].at_step(step, steps) for place in places)
        return opened.patch_set(role, (lora for lora in now if lora is not None))

    return patches_at


def _joined(work: DecodeParams, inputs: Mapping[str, Result], hooks: RunHooks) -> tuple[Result, RunCost]:
    """Join the parts of a decode: on the host, without weights, and so without a lease."""
    started = time.perf_counter()
    image = join_image(work, TaskInputs.of_model(inputs), hooks)
    return image, RunCost(run_seconds=time.perf_counter() - started, resident=True)


def _caches_weights(work: StageParams) -> bool:
    """Whether the weights change from text to text, so that each step needs the weights of the step before again."""
    return isinstance(work, SampleParams) and any(lora.only for lora in work.loras)


def _wanted(patchers: Patchers, task: TaskSpec) -> tuple[PatcherUse, ...]:
    """The patchers that a run of `task` leases, including dependents."""
    passes = task.uses[0].passes
    return tuple(one for patcher in dict.fromkeys(patchers) for one in with_dependents(patcher, passes))


def _text_encoder(opened: OpenModel, patcher: ModelPatcher, role: Role, is_lyrics: bool = False) -> TextEncoder:
    """One of the model's text encoders, with the reading of its family for a prompt or for lyrics."""
    family = opened.checkpoint.family
    if not family.text_set:
        name = dict(zip(family.text_encoders, members_of(family), strict=False)).get(role, "")
        return TextEncoder(patcher, family.texts[role], name=name)
    text = opened.reading(role, is_lyrics)
    return TextEncoder(patcher, text.reading, text.place, text.tokenizer, text.reading.encoder)


def _all_of(found: Sequence[object], kind: type[Kind]) -> tuple[Kind, ...]:
    """`found`, all of one kind; anything else is an internal error."""
    assert all(isinstance(one, kind) for one in found), f"expected {kind.__name__} only, found {found}"
    return tuple(one for one in found if isinstance(one, kind))
