"""Specifications of components, tasks, jobs and workers, and the outcome of a run: names, sizes, costs.

Numbers and strings only, so that every value can be pickled, printed, compared and simulated. Knows neither torch nor
where anything runs. `ComponentKey` and the other names are strings at run time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from modelpool.pool.values.specs.name_types import ComponentKey as ComponentKey
from modelpool.pool.values.specs.name_types import JobId as JobId
from modelpool.pool.values.specs.name_types import NodeId as NodeId
from modelpool.pool.values.specs.name_types import TaskId as TaskId
from modelpool.pool.values.specs.name_types import UserId as UserId
from modelpool.pool.values.specs.name_types import WorkerId as WorkerId
from modelpool.pool.values.specs.resident import Residency
from modelpool.pool.values.specs.wire_value import WireValue

UNPATCHED = ""  #: the digest of the empty patch set
NO_USER = UserId("")  #: an anonymous user
NO_NODE = NodeId("")  #: an unknown machine, or one without other workers
NO_WORKER = WorkerId("")  #: no worker, where a machine may be named instead
ANY_FILE = ""  #: the name of a file where it is not known which one it is
#: a component, and the name of the file that it is read from: equal components of several files share a key
ReadFile: TypeAlias = tuple[ComponentKey, str]
#: digits of a SHA-256 in the name of a file
FILE_NAME_DIGITS = 16


def file_name(sha256: str) -> str:
    """Return the name of a file among the files that have equal components: the first digits of its SHA-256."""
    return sha256[:FILE_NAME_DIGITS]


class Stage(Enum):
    """The kinds of task of an image: three in order, and changes without a model between any of them. Hashed by
    identity: it is a lookup key in every event, and Enum's own hash is a Python call."""

    __hash__ = object.__hash__

    ENCODE = "encode"
    SAMPLE = "sample"
    DECODE = "decode"
    OPERATE = "operate"


class Role(Enum):
    """The function of a component. A model has at most one of each; text encoders are numbered as in diffusers. The
    second diffusion model is the low-noise expert. Hashed by identity, as `Stage`."""

    __hash__ = object.__hash__

    TEXT_ENCODER = "text_encoder"
    TEXT_ENCODER_2 = "text_encoder_2"
    TEXT_ENCODER_3 = "text_encoder_3"
    TEXT_ENCODER_4 = "text_encoder_4"
    VISION_ENCODER = "vision_encoder"
    DIFFUSION_MODEL = "diffusion_model"
    DIFFUSION_MODEL_2 = "diffusion_model_2"
    VAE = "vae"
    CONTROLNET = "controlnet"
    UPSCALER = "upscaler"
    IMAGE_PROMPT = "image_prompt"
    GLIGEN = "gligen"
    LORA = "lora"

    @property
    def is_text_encoder(self) -> bool:
        """Whether it encodes the prompt, alone or with others."""
        return self in (Role.TEXT_ENCODER, Role.TEXT_ENCODER_2, Role.TEXT_ENCODER_3, Role.TEXT_ENCODER_4)

    @property
    def is_diffusion_model(self) -> bool:
        """Whether it denoises, alone or as one of two experts."""
        return self in (Role.DIFFUSION_MODEL, Role.DIFFUSION_MODEL_2)


@dataclass(frozen=True, slots=True)
class ComponentSpec(WireValue):
    """The sizes of one component.

    weight_bytes  VRAM when fully resident, in compute dtype
    upload_bytes  bytes on the bus to make it fully resident, in storage dtype
    fetch_key     of the files that a machine fetches before it reads any of them: the first digits of the SHA-256 of
                  the largest; "" for local files
    fetch_bytes   size of these files
    """

    key: ComponentKey
    role: Role
    weight_bytes: int
    upload_bytes: int
    fetch_key: str = ""
    fetch_bytes: int = 0

    def __post_init__(self) -> None:
        if self.weight_bytes <= 0 or self.upload_bytes <= 0:
            raise ValueError(f"{self.key}: weight_bytes and upload_bytes must be positive, found {self}")


@dataclass(frozen=True, slots=True)
class ComponentUse(WireValue):
    """A component with one patch set, as used by a task.

    patched_bytes  resident bytes of the modules that the patch set changes (0 if unpatched)
    scratch_bytes  VRAM that must stay free in addition to weights and activations while modules load or stream: the
                   working set of the largest module, including its storage copy and the float32 copy that patches need
    passes         forward passes of one run (sampling steps); streamed bytes cross the bus once per pass
    adapters       the LoRAs of the patch set: they are read when the weights are patched
    """

    component: ComponentKey
    scratch_bytes: int
    patch_digest: str = UNPATCHED
    patched_bytes: int = 0
    passes: int = 1
    adapters: tuple[ComponentKey, ...] = ()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ComponentUse):
            return NotImplemented
        return (
            self.component == other.component
            and self.patch_digest == other.patch_digest
            and self.passes == other.passes
            and self.scratch_bytes == other.scratch_bytes
            and self.patched_bytes == other.patched_bytes
            and self.adapters == other.adapters
        )

    def __hash__(self) -> int:
        return hash((self.component, self.patch_digest))


@dataclass(frozen=True, slots=True)
class ExecutionMode(WireValue):
    """One way to run a task; a divided one runs in parts, one after the other, and needs less memory at once.

    activation_bytes  activations of the largest part, without weights and scratch
    batch             maximum batch of one model call; 0 is the full batch
    tile              edge of a tile in latent cells, for tiled VAE decoding and encoding, or in pixels for upscaling; 0
                      is untiled
    slowdown          expected run time as a multiple of full execution
    counted_bytes     `activation_bytes` before correction by measurements; 0 if it was not corrected
    """

    activation_bytes: int
    batch: int = 0
    tile: int = 0
    slowdown: float = 1.0
    counted_bytes: int = 0

    def times(self, count: int) -> ExecutionMode:
        """Return the mode of so many tasks in one run."""
        return replace(self, activation_bytes=count * self.activation_bytes, counted_bytes=count * self.counted_bytes)

    @property
    def estimated_bytes(self) -> int:
        """The estimate without corrections: runs are compared with it, and a refusal is based on it."""
        return self.counted_bytes or self.activation_bytes

    @property
    def words(self) -> str:
        """Description for users; empty for full execution."""
        if self.tile:
            return f"tiles of {self.tile}"
        return f"{self.batch} at a time" if self.batch else ""


@dataclass(frozen=True, slots=True)
class TaskSpec(WireValue):
    """One stage of work. Two tasks with equal ids are the same work and have the same result."""

    task_id: TaskId
    stage: Stage
    uses: tuple[ComponentUse, ...]
    #: of full execution
    activation_bytes: int
    #: initial estimate with all weights resident; the scheduler corrects it by measurements
    run_seconds: float
    #: tasks (or user inputs) with results that this one reads
    needs: tuple[TaskId, ...] = ()
    #: execution modes for low memory, the least divided first; each needs less than the one before
    divisions: tuple[ExecutionMode, ...] = ()
    #: `activation_bytes` before correction by measurements; 0 if it was not corrected
    counted_bytes: int = 0
    #: tasks of equal uses and sizes with equal names here may go through the module in one batch; "" never does
    together: str = ""
    #: names of `needs` for the stage that reads them (`pool.values.core.task_inputs`), in the same order
    input_names: tuple[str, ...] = ()
    #: `pool.values.core.stage_params.SampleParams.measured_apart`: activations of such runs are measured apart from
    # others
    options: tuple[str, ...] = ()
    #: such tasks run in forward passes of exactly so many; missing ones are padded. `activation_bytes` and
    #: `run_seconds` are of a whole pass, however many tasks share it. 1: of one task, and any number may share a run
    batch_size: int = 1
    #: such tasks with equal keys may run in one pass at different steps: each joins it at a step, and leaves when it is
    #: done (`pool.values.core.joining`); "" joins none
    pass_key: str = ""
    #: its result is kept for later jobs, within the limits of the scheduler, as encoded texts are
    is_kept: bool = False
    #: numbers of GPUs that may share its run, in rising order (`pool.values.specs.gang`); (1,) never shares one
    degrees: tuple[int, ...] = (1,)
    #: the name (`file_name`) of the file that each component of `reads` is read from; () if the files are not known
    file_names: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[ComponentKey, ...]:
        """The components and adapters that it uses, each once."""
        return tuple(dict.fromkeys([key for use in self.uses for key in (use.component, *use.adapters)]))

    @property
    def files(self) -> tuple[ReadFile, ...]:
        """The components of `reads`, each with its file."""
        reads = self.reads
        return tuple(zip(reads, self.file_names or len(reads) * (ANY_FILE,), strict=True))

    def multiple(self, members: int) -> int:
        """Return how many times its own memory a run of so many tasks like this one takes: once with a fixed batch
        size."""
        return 1 if self.batch_size > 1 else members

    @property
    def least_activation_bytes(self) -> int:
        """Activation bytes of its most divided execution mode."""
        if not self.divisions:
            return self.activation_bytes
        return min((d.activation_bytes for d in self.divisions), default=self.activation_bytes)

    @property
    def least_estimated_bytes(self) -> int:
        """Estimated bytes of its most divided execution mode, without corrections."""
        return min((d.estimated_bytes for d in self.divisions), default=self.counted_bytes or self.activation_bytes)


@dataclass(frozen=True, slots=True)
class JobSpec(WireValue):
    """A job of a driver, as tasks.

    tasks     every task that the result depends on, each after its inputs
    wanted    the task with the job's result
    given     ids in `needs` of results that the driver supplied; no task computes them
    priority  higher first
    user      for fair-share scheduling; priorities come first, then each user's share
    deadline  on the core's clock; None for none
    batch     jobs of one submission share a name and may overtake each other freely; "" is a job of its own
    batch_reason  for users: why `TaskSpec.batch_size` of its tasks is what it is; "" if the request said so
    """

    job_id: JobId
    tasks: tuple[TaskSpec, ...]
    wanted: TaskId
    given: tuple[TaskId, ...] = ()
    priority: int = 0
    user: UserId = NO_USER
    deadline: float | None = None
    batch: str = ""
    batch_reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class FileOnDisk(WireValue):
    """A fetched file; its key is as in `ComponentSpec.fetch_key`."""

    key: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerSpec(WireValue):
    """One live worker, as registered."""

    worker_id: WorkerId
    #: grows by one each time the worker is started again
    incarnation: int
    #: VRAM that weights, scratch and activations may take together
    capacity_bytes: int
    #: host to device, measured at start
    link_bytes_per_second: float
    device_name: str = ""
    #: its machine; "" is a machine without other workers
    node: NodeId = NO_NODE
    #: page cache capacity of that machine; 0 is unknown and treated as unlimited
    host_bytes: int = 0
    #: of that machine's disks; 0 is unknown and treated as equal to the link
    storage_bytes_per_second: float = 0.0
    #: address of its file server, for other nodes; "" without one
    files_address: str = ""
    #: maximum size of fetched files on that machine's disk; 0 is unlimited
    cache_bytes: int = 0
    #: fetched files on that machine's disk when the worker started
    cached_files: tuple[FileOnDisk, ...] = ()
    #: whether it may begin a task while it still decodes for the one before
    overlaps_decode: bool = False
    #: whether it may hold weights for the other members of a gang (`pool.weights.plan.peer_shares`)
    holds_shares: bool = False
    #: between its GPU and others of its machine, as the operator states it; 0: gangs measure it
    gang_link_bytes_per_second: float = 0.0


class RunErrorKind(Enum):
    """The reason why a task failed. The retry policy is a table over these (`scheduler.core.recovery`)."""

    OUT_OF_VRAM = "out_of_vram"
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    WORKER_LOST = "worker_lost"
    INPUT_LOST = "input_lost"
    FILE_UNAVAILABLE = "file_unavailable"
    BAD_INPUT = "bad_input"
    CANCELLED = "cancelled"
    #: of a run that workers share: another one was lost, or stopped, or did not answer in time
    GANG_BROKEN = "gang_broken"
    OUTPUT = "output"
    INTERNAL = "internal"


#: ends of a sampling run that may have its state
WITH_STATE = frozenset({RunErrorKind.CANCELLED, RunErrorKind.GANG_BROKEN})


class OomStep(Enum):
    """Actions after a run ran out of memory, in this order. The first five are taken by the worker, the others by the
    scheduler."""

    DROP_AHEAD = "drop what was brought ahead"
    EMPTY_CACHE = "empty the allocator's cache"
    DROP_CACHES = "drop caches"
    STREAM_MORE = "stream more"
    DIVIDE = "divide the run"
    OTHER_WORKER = "another worker"
    RECYCLE = "recycle the process"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class RunError(WireValue):
    """A failure on a GPU, as a value."""

    kind: RunErrorKind
    message: str
    traceback_text: str = ""
    #: what was done about running out of memory, in order, before it ended so; of earlier attempts too
    oom_steps: tuple[OomStep, ...] = ()
    #: FILE_UNAVAILABLE: the components with missing files on that machine, or with other files there
    components: tuple[ComponentKey, ...] = ()
    #: GANG_BROKEN: the ranks of the members that this one suspects, lowest first; () if it knows none
    suspected_ranks: tuple[int, ...] = ()
    #: the name (`file_name`) of the file of each of `components`; () if the file is not known
    file_names: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[ReadFile, ...]:
        """The files of `components`."""
        names = self.file_names or len(self.components) * (ANY_FILE,)
        return tuple(zip(self.components, names, strict=True))


class FileVerdict(Enum):
    """What a worker has found out about a state of a file."""

    RIGHT = "right"  #: it has the expected SHA-256
    DIFFERS = "differs"  #: it has another one
    UNREADABLE = "unreadable"  #: it could not be read; that is tried again
    CHANGED = "changed"  #: it was changed before its hash was known, which nobody can find out any more


@dataclass(frozen=True, slots=True)
class JudgedFile(WireValue):
    """A state of a file on the machine of a worker: the file as runs of that worker found it, until it is changed.

    state       number of the state among all of that worker
    components  that are read from it
    found       its SHA-256, or why there is none
    """

    state: int
    verdict: FileVerdict
    components: tuple[ComponentKey, ...]
    path: str = ""
    expected: str = ""
    found: str = ""

    @property
    def files(self) -> tuple[ReadFile, ...]:
        """The file, for each component that is read from it."""
        return tuple((key, file_name(self.expected)) for key in self.components)

    @property
    def reason(self) -> str:
        """Why the file cannot be used there."""
        if self.verdict is FileVerdict.CHANGED:
            return f"{self.path}: was changed before its SHA-256 was known"
        if self.verdict is FileVerdict.UNREADABLE:
            return f"{self.path}: could not be read to compute its SHA-256, which is tried again: {self.found}"
        return f"{self.path}: is another file than expected: found SHA-256 {self.found}, expected {self.expected}"


@dataclass(frozen=True, slots=True)
class RunCost(WireValue):
    """Cost of one run, measured by the worker.

    load_seconds, run_seconds   moving weights before the run; the run itself
    uploaded_bytes              weights moved host to device before the run
    streamed_bytes              weights moved host to device during the run
    peak_bytes                  peak VRAM, including weights
    resident                    every component was fully resident with the right patches
    patch_switches              components that were resident with another patch set
    planned_bytes               maximum VRAM that the plan allowed for, including weights
    working_bytes               peak VRAM without the weights that were resident at the start and, with streamed
                                weights, without the maximum of copies ahead of use
    division                    execution mode; None for full execution
    oom_steps                   actions after running out of memory, in order
    storage_bytes               bytes that this process read from disks during the run
    ahead_bytes                 weights of other tasks moved host to device during the run (preloaded)
    batched                     tasks of the batch, including this one; all other figures are its share
    fetched_bytes               fetched from the source of the weights before the run
    peer_bytes                  fetched from other nodes before the run
    fetch_seconds               until the files of the run were on the node's disk, not part of load_seconds
    steps_before, steps         of a sampling run that resumed: the steps that earlier runs had done, and all of them
    meeting_seconds             of a run that workers share: the part of run_seconds until all of them had loaded their
                                weights and found each other
    share_bytes                 of such a run: weights that this worker held for all members, moved host to device once,
                                not part of streamed_bytes
    exchanged_bytes             weights that it received from the GPUs of other members
    gang_link_bytes_per_second  speed of the link among the GPUs of the members, for modules of its size; 0: unknown
    """

    load_seconds: float = 0.0
    run_seconds: float = 0.0
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    peak_bytes: int = 0
    resident: bool = False
    patch_switches: int = 0
    planned_bytes: int = 0
    working_bytes: int = 0
    division: ExecutionMode | None = None
    oom_steps: tuple[OomStep, ...] = ()
    storage_bytes: int = 0
    ahead_bytes: int = 0
    batched: int = 1
    fetched_bytes: int = 0
    peer_bytes: int = 0
    fetch_seconds: float = 0.0
    steps_before: int = 0
    steps: int = 0
    meeting_seconds: float = 0.0
    share_bytes: int = 0
    exchanged_bytes: int = 0
    gang_link_bytes_per_second: float = 0.0

    @property
    def whole(self) -> RunCost:
        """The cost of the whole batch, from this share."""
        return replace(
            self,
            load_seconds=self.batched * self.load_seconds,
            run_seconds=self.batched * self.run_seconds,
            uploaded_bytes=self.batched * self.uploaded_bytes,
            streamed_bytes=self.batched * self.streamed_bytes,
            storage_bytes=self.batched * self.storage_bytes,
            ahead_bytes=self.batched * self.ahead_bytes,
            fetched_bytes=self.batched * self.fetched_bytes,
            peer_bytes=self.batched * self.peer_bytes,
            fetch_seconds=self.batched * self.fetch_seconds,
            batched=1,
        )

    @property
    def shows_activations(self) -> bool:
        """Whether estimates of activations can learn from it: the memory of a single task in a batch is unknown, and
        some devices measure none."""
        return self.batched == 1 and self.working_bytes > 0

    @property
    def remaining(self) -> float:
        """Fraction of all steps that the run had to do."""
        return (self.steps - self.steps_before) / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class PastRun(WireValue):
    """A run that an earlier controller had sent, as its worker remembers it; `task` without what only a run needs."""

    task: TaskSpec
    cost: RunCost


@dataclass(frozen=True, slots=True)
class TaskReport(WireValue):
    """Outcome of one attempt of a task. Exactly one for each command that started it.

    A sampling run that was stopped with its state ended with CANCELLED after `step` of `steps` (0 otherwise): its
    result is the state, from which another run resumes. So does a run that other workers shared, with GANG_BROKEN, on
    each member that has done a step.
    """

    task_id: TaskId
    attempt: int
    worker_id: WorkerId
    incarnation: int
    #: actual residency, which replaces the scheduler's prediction
    residency: Residency
    cost: RunCost = RunCost()
    error: RunError | None = None
    #: size of the result, for the scheduler's result cache; or of the state
    result_bytes: int = 0
    step: int = 0
    steps: int = 0
    #: whether its worker has saved checkpoints of a run with a result: they stay until the controller removes them
    has_checkpoints: bool = False
    #: states of files that it has read without knowing their hash at its end: `JudgedFile.state`
    unverified: tuple[int, ...] = ()

    @property
    def has_state(self) -> bool:
        """Whether its result is the state of a run that was stopped."""
        return self.step > 0 and self.error is not None and self.error.kind in WITH_STATE
