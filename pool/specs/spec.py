"""What the pool serves and how a run went: names, sizes and outcomes.

Numbers and strings only, so that every value here pickles, prints, compares and simulates. Knows neither torch nor
where anything runs. `ComponentKey` and friends are strings at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from modelpool.pool.specs.names import ComponentKey as ComponentKey
from modelpool.pool.specs.names import JobId as JobId
from modelpool.pool.specs.names import NodeId as NodeId
from modelpool.pool.specs.names import TaskId as TaskId
from modelpool.pool.specs.names import UserId as UserId
from modelpool.pool.specs.names import WorkerId as WorkerId
from modelpool.pool.specs.resident import Residency
from modelpool.pool.specs.sent import Sent

UNPATCHED = ""  #: the digest of the empty patch set
NO_USER = UserId("")  #: whoever has no name
NO_NODE = NodeId("")  #: a machine of its own


class Stage(Enum):
    """The three kinds of task that an image is made of, in order. Hashed by identity: tasks are looked up by it with
    every event, and an Enum's own hash is a call of Python."""

    __hash__ = object.__hash__

    ENCODE = "encode"
    SAMPLE = "sample"
    DECODE = "decode"


class Role(Enum):
    """What a component is for. A model has at most one of each; the text encoders are numbered as diffusers does. The
    second of two diffusion models is that for low noise."""

    TEXT_ENCODER = "text_encoder"
    TEXT_ENCODER_2 = "text_encoder_2"
    TEXT_ENCODER_3 = "text_encoder_3"
    TEXT_ENCODER_4 = "text_encoder_4"
    VISION_ENCODER = "vision_encoder"
    DIFFUSION_MODEL = "diffusion_model"
    DIFFUSION_MODEL_2 = "diffusion_model_2"
    VAE = "vae"
    CONTROLNET = "controlnet"
    LORA = "lora"

    @property
    def is_text_encoder(self) -> bool:
        """It reads the prompt, alone or beside others."""
        return self in (Role.TEXT_ENCODER, Role.TEXT_ENCODER_2, Role.TEXT_ENCODER_3, Role.TEXT_ENCODER_4)

    @property
    def is_diffusion_model(self) -> bool:
        """It takes noise away, alone or as one of a pair."""
        return self in (Role.DIFFUSION_MODEL, Role.DIFFUSION_MODEL_2)


@dataclass(frozen=True, slots=True)
class ComponentSpec(Sent):
    """The sizes of one component, as the plan needs them.

    weight_bytes  VRAM when fully resident, in compute dtype
    upload_bytes  bytes over the bus to make it fully resident, in storage dtype
    """

    key: ComponentKey
    role: Role
    weight_bytes: int
    upload_bytes: int

    def __post_init__(self) -> None:
        if self.weight_bytes <= 0 or self.upload_bytes <= 0:
            raise ValueError(f"{self.key}: weight_bytes and upload_bytes must be positive, found {self}")


@dataclass(frozen=True, slots=True)
class ComponentUse(Sent):
    """A component with one patch set, as a task needs it.

    patched_bytes  resident bytes of the modules that the patch set touches (0 when unpatched)
    scratch_bytes  VRAM that must stay free beside weights and activations while modules load or stream: the working
                   set of the largest module, its storage copy and the float32 copy that patches need included
    passes         forward passes of one run (sampling steps); streamed bytes are paid once a pass
    adapters       the LoRAs that the patch set is made of: they are read where the weights get these patches
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
class Division(Sent):
    """One way to do a task in parts, one after the other, that need less memory at once.

    activation_bytes  what the hungriest part needs beside weights and scratch
    batch             at most so many members of the run's batch at once; 0 is all of them
    tile              edge of a tile in latent cells, for decoding and encoding by tiles; 0 is without tiles
    slowdown          expected seconds as a multiple of those of the undivided run
    counted_bytes     `activation_bytes` before what runs took corrected it; 0 where nothing did
    """

    activation_bytes: int
    batch: int = 0
    tile: int = 0
    slowdown: float = 1.0
    counted_bytes: int = 0

    @property
    def estimated_bytes(self) -> int:
        """What was counted for it, without corrections: what runs are compared with, and what may be refused by."""
        return self.counted_bytes or self.activation_bytes

    @property
    def words(self) -> str:
        """What is divided, for people; empty for the whole run."""
        if self.tile:
            return f"tiles of {self.tile}"
        return f"{self.batch} at a time" if self.batch else ""


@dataclass(frozen=True, slots=True)
class TaskSpec(Sent):
    """One stage of work. Two tasks with equal ids are the same work and have the same result."""

    task_id: TaskId
    stage: Stage
    uses: tuple[ComponentUse, ...]
    #: of the undivided run
    activation_bytes: int
    #: prior estimate with all weights resident; the scheduler corrects it by what it measures
    run_seconds: float
    #: tasks (or given results) whose results this one reads
    needs: tuple[TaskId, ...] = ()
    #: ways to do it in parts where memory is short, the least divided first; each needs less than the one before
    divisions: tuple[Division, ...] = ()
    #: `activation_bytes` before what runs took corrected it; 0 where nothing did
    counted_bytes: int = 0
    #: tasks of equal uses and sizes whose names here are equal may go through the module in one batch; "" never does
    together: str = ""

    @property
    def least_activation_bytes(self) -> int:
        """What its most divided run needs."""
        if not self.divisions:
            return self.activation_bytes
        return min((d.activation_bytes for d in self.divisions), default=self.activation_bytes)

    @property
    def least_estimated_bytes(self) -> int:
        """What was counted for its most divided run, without corrections."""
        return min((d.estimated_bytes for d in self.divisions), default=self.counted_bytes or self.activation_bytes)


@dataclass(frozen=True, slots=True)
class JobSpec(Sent):
    """What a driver asked for, cut into tasks.

    tasks     every task that the wanted result depends on, each after the ones it needs
    wanted    the task whose result is the job's
    given     ids in `needs` whose results the driver supplied itself; no task makes them
    priority  higher first
    user      who pays for it; priorities come first, then each user's share
    deadline  when it should be done, on the core's clock; None for whenever
    batch     jobs that were asked for together have one name and may overtake each other freely; "" is by itself
    """

    job_id: JobId
    tasks: tuple[TaskSpec, ...]
    wanted: TaskId
    given: tuple[TaskId, ...] = ()
    priority: int = 0
    user: UserId = NO_USER
    deadline: float | None = None
    batch: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSpec(Sent):
    """One live worker, as it introduced itself."""

    worker_id: WorkerId
    #: grows by one each time the worker is started again
    incarnation: int
    #: VRAM that weights, scratch and activations may take together
    capacity_bytes: int
    #: host to device, measured at start
    link_bytes_per_second: float
    device_name: str = ""
    #: the machine that it is on; "" is a machine of its own
    node: NodeId = NO_NODE
    #: what that machine's memory can keep of files beside all processes; 0 is not known, and taken for enough
    host_bytes: int = 0
    #: from that machine's disks; 0 is not known, and taken for as fast as the link
    storage_bytes_per_second: float = 0.0


class RunErrorKind(Enum):
    """Why a task ended badly. The retry policy is a table over these (`scheduler.core.retry`)."""

    OUT_OF_VRAM = "out_of_vram"
    OUT_OF_HOST_MEMORY = "out_of_host_memory"
    WORKER_LOST = "worker_lost"
    INPUT_LOST = "input_lost"
    BAD_INPUT = "bad_input"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


class Rung(Enum):
    """What is done about a run that ran out of memory, in this order. The first four are the worker's, the others the
    scheduler's."""

    DROP_AHEAD = "drop what was brought ahead"
    DROP_CACHES = "drop caches"
    STREAM_MORE = "stream more"
    DIVIDE = "divide the run"
    OTHER_WORKER = "another worker"
    RECYCLE = "recycle the process"
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class RunError(Sent):
    """What happened on a GPU, as a value."""

    kind: RunErrorKind
    message: str
    traceback_text: str = ""
    #: what was done about running out of memory, in order, before it ended so; of earlier attempts too
    rungs: tuple[Rung, ...] = ()


@dataclass(frozen=True, slots=True)
class RunCost(Sent):
    """What one run cost, measured by the worker.

    load_seconds, run_seconds   moving weights before the run; the run itself
    uploaded_bytes              weights moved host to device before the run
    streamed_bytes              weights moved host to device while it ran
    peak_bytes                  most VRAM in use at once, weights included
    resident                    every component was there, whole and with the right patches
    patch_switches              components that were there with another patch set
    planned_bytes               the most VRAM that the plan allowed for, weights included
    working_bytes               most VRAM in use beside the weights that were resident when the run began and, where
                                weights streamed, beside all that copies ahead of use may take
    division                    how the run was divided; None when it was not
    rungs                       what was done about running out of memory, in order, before it ended as it did
    storage_bytes               bytes that this process read from disks during the run
    ahead_bytes                 weights of other tasks moved host to device while it ran
    batched                     tasks that were run together with this one, itself included; all other figures are its
                                share of theirs
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
    division: Division | None = None
    rungs: tuple[Rung, ...] = ()
    storage_bytes: int = 0
    ahead_bytes: int = 0
    batched: int = 1


@dataclass(frozen=True, slots=True)
class TaskReport(Sent):
    """How one attempt at a task ended. Exactly one for each command that started it."""

    task_id: TaskId
    attempt: int
    worker_id: WorkerId
    incarnation: int
    #: what is on the GPU now: the truth, which replaces what the scheduler assumed
    residency: Residency
    cost: RunCost = RunCost()
    error: RunError | None = None
    #: size of the result, for the scheduler's result cache
    result_bytes: int = 0
