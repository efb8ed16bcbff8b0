"""What the pool serves and how a run went: names, sizes and outcomes.

Numbers and strings only, so that every value here pickles, prints, compares and simulates. Knows neither torch nor
where anything runs. `ComponentKey` and friends are strings at run time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from pool.residency import Residency

ComponentKey = NewType("ComponentKey", str)  #: one loadable set of weights, "shapes/vae@3f2a91c04b"
WorkerId = NewType("WorkerId", str)  #: the actor that owns one GPU, "gpu-0"; survives restarts
JobId = NewType("JobId", str)  #: what a driver asked for
TaskId = NewType("TaskId", str)  #: one stage of work; a digest of all that its result depends on

UNPATCHED = ""  #: the digest of the empty patch set


class Stage(Enum):
    """The three kinds of task that a picture is made of, in order."""

    ENCODE = "encode"
    SAMPLE = "sample"
    DECODE = "decode"


class Role(Enum):
    """What a component is for."""

    TEXT_ENCODER = "text_encoder"
    DIFFUSION_MODEL = "diffusion_model"
    VAE = "vae"


@dataclass(frozen=True, slots=True)
class ComponentSpec:
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
class ComponentUse:
    """A component with one patch set, as a task needs it.

    patched_bytes  resident bytes of the modules that the patch set touches (0 when unpatched)
    scratch_bytes  VRAM that must stay free beside weights and activations while modules load or stream: the working
                   set of the largest module, its storage copy and the float32 copy that patches need included
    passes         forward passes of one run (sampling steps); streamed bytes are paid once a pass
    """

    component: ComponentKey
    scratch_bytes: int
    patch_digest: str = UNPATCHED
    patched_bytes: int = 0
    passes: int = 1


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """One stage of work. Two tasks with equal ids are the same work and have the same result."""

    task_id: TaskId
    stage: Stage
    uses: tuple[ComponentUse, ...]
    activation_bytes: int
    #: prior estimate with all weights resident; the scheduler corrects it by what it measures
    run_seconds: float
    #: tasks (or given results) whose results this one reads
    needs: tuple[TaskId, ...] = ()


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a driver asked for, cut into tasks.

    tasks     every task that the wanted result depends on, each after the ones it needs
    wanted    the task whose result is the job's
    given     ids in `needs` whose results the driver supplied itself; no task makes them
    priority  higher first
    """

    job_id: JobId
    tasks: tuple[TaskSpec, ...]
    wanted: TaskId
    given: tuple[TaskId, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One live worker, as it introduced itself."""

    worker_id: WorkerId
    #: grows by one each time the worker is started again
    incarnation: int
    #: VRAM that weights, scratch and activations may take together
    capacity_bytes: int
    #: host to device, measured at start
    link_bytes_per_second: float
    device_name: str = ""


class RunErrorKind(Enum):
    """Why a task ended badly. The retry policy is a table over these (`scheduler.retry`)."""

    OUT_OF_VRAM = "out_of_vram"
    WORKER_LOST = "worker_lost"
    INPUT_LOST = "input_lost"
    BAD_INPUT = "bad_input"
    CANCELLED = "cancelled"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class RunError:
    """What happened on a GPU, as a value."""

    kind: RunErrorKind
    message: str
    traceback_text: str = ""


@dataclass(frozen=True, slots=True)
class RunCost:
    """What one run cost, measured by the worker.

    load_seconds, run_seconds   moving weights before the run; the run itself
    uploaded_bytes              weights moved host to device before the run
    streamed_bytes              weights moved host to device while it ran
    peak_bytes                  most VRAM in use at once, weights included
    resident                    every component was there, whole and with the right patches
    patch_switches              components that were there with another patch set
    """

    load_seconds: float = 0.0
    run_seconds: float = 0.0
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    peak_bytes: int = 0
    resident: bool = False
    patch_switches: int = 0


@dataclass(frozen=True, slots=True)
class TaskReport:
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
