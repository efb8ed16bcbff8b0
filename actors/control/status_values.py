"""`PoolStatus`: the state of a pool at one moment, as values for users and programs. Imports almost nothing, so that
`modelpool status` is fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.specs.spec import WorkerId


@dataclass(frozen=True, slots=True)
class ResidentPart:
    """A component with bytes on a GPU; `whole_bytes` is the size of the complete component."""

    component: str
    resident_bytes: int
    whole_bytes: int
    patched: bool


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The current run of a worker: its job and its progress. Steps are 0 before the first one is done."""

    job_id: str
    user: str
    stage: str
    attempt: int
    step: int
    steps: int
    seconds: float
    stopping: bool
    #: further tasks in the same batch
    mates: int = 0
    #: the GPUs that share it
    gpus: int = 1
    #: of the request of the job; "" if it has none
    model: str = ""
    prompt: str = ""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker.

    state           "starting", "idle", "busy", "given_up" or "drained"
    device          name of the GPU; "" while it starts
    incarnation     increases by one with each start
    resident        components with bytes on the GPU, least recently used first
    task            the stage that is running; None if idle
    trouble         the latest reason why it was lost or did not start; "" if there is none
    unavailable     why files cannot be used on its node: they are missing there, or differ
    leaves_in       seconds until its node ends, as announced; None if nothing was
    silent_seconds  for how long it has not answered; 0 if it does
    order           what the operator wants of it: "cordoned", "draining", "drained", "restarting"; "" for nothing
    order_seconds   since when it is cordoned or drained; None if it is neither
    order_left      seconds until its run must have ended for that; None if it need not
    node            Ray's id of its node; "" if unknown
    node_name       display name of the node; "" if unknown
    not_up          why it is not up: "pending: ...", "starting on ...", "starts again; before: ..." or "refused: ...";
                    "" if it is up
    parts           `resident` with bytes
    run             the current run; None if idle
    runs            completed runs over all incarnations; of these, `runs_resident` had every component resident
    """

    id: WorkerId
    state: str
    device: str
    incarnation: int
    capacity_bytes: int
    used_bytes: int
    resident: tuple[str, ...]
    task: str | None
    trouble: str = ""
    node: str = ""
    node_name: str = ""
    not_up: str = ""
    parts: tuple[ResidentPart, ...] = ()
    run: RunStatus | None = None
    runs: int = 0
    runs_resident: int = 0
    uploaded_bytes: int = 0
    streamed_bytes: int = 0
    unavailable: tuple[str, ...] = ()
    leaves_in: float | None = None
    silent_seconds: float = 0.0
    order: str = ""
    order_seconds: float | None = None
    order_left: float | None = None

    @property
    def order_words(self) -> str:
        """What the operator wants of it, as a clause; "" for nothing."""
        since = "" if self.order_seconds is None else f" by the operator for {_span(self.order_seconds)}"
        left = "" if self.order_left is None else f", its run ends within {_span(self.order_left)}"
        match self.order:
            case "cordoned":
                return f"cordoned{since}: takes no new tasks"
            case "draining":
                return f"its node is drained{since}{left}"
            case "drained":
                return f"its node is drained{since}; starts again when that is uncordoned"
            case "restarting":
                return f"restarted by the operator when its run has ended{left}"
            case _:
                return ""


def _span(seconds: float) -> str:
    """Return a time span in its largest whole unit that says enough."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


@dataclass(frozen=True, slots=True)
class PinnedModel:
    """A model with weights that stay on GPUs.

    replicas  workers that must have all of them
    holders   workers that have them and stay
    loading   workers that load them now
    obstacle  why there are fewer, and none loads them; "" otherwise
    """

    model: str
    replicas: int
    holders: tuple[str, ...] = ()
    loading: tuple[str, ...] = ()
    obstacle: str = ""

    @property
    def words(self) -> str:
        """The state in a sentence."""
        on = f" ({', '.join(self.holders)})" if self.holders else ""
        found = f"on {len(self.holders)} of {counted(self.replicas, 'worker')}{on}"
        if len(self.holders) > self.replicas:  # whatever holds it for other reasons, too
            found = f"on {counted(len(self.holders), 'worker')}{on}, {self.replicas} required"
        loading = (
            f"; {', '.join(self.loading)} {'loads' if len(self.loading) == 1 else 'load'} it" if self.loading else ""
        )
        return f"{found}{loading}{f'; {self.obstacle}' if self.obstacle else ''}"


@dataclass(frozen=True, slots=True)
class NodeGroupStatus:
    """One group of nodes.

    nodes     that exist or are requested; of them, `starting` have no worker yet
    obstacle  why no node may be requested now; "" if one may
    """

    name: str
    nodes: int
    max_nodes: int
    starting: int
    price_per_hour: float
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """The groups of nodes of a pool, and what they cost in the unit of price_per_hour."""

    groups: tuple[NodeGroupStatus, ...]
    spent: float
    per_hour: float
    latest_decision: str = ""


@dataclass(frozen=True, slots=True)
class FailedJob:
    """A job that failed, with the time since then."""

    job_id: str
    message: str
    seconds: float


@dataclass(frozen=True, slots=True)
class SubmissionStatus:
    """The jobs that one driver, or one submission of the journal, has queued.

    id       the ids of its jobs are ID-NUMBER
    user     of its first job; "" for none
    model, prompt  of its first job; "" if that has none
    jobs     queued so far; of these, `succeeded`, `failed` and `cancelled` have ended
    seconds  since the first one was queued
    """

    id: str
    user: str
    model: str
    prompt: str
    jobs: int
    succeeded: int
    failed: int
    cancelled: int
    seconds: float

    @property
    def unfinished(self) -> int:
        """Jobs that have not ended."""
        return self.jobs - self.succeeded - self.failed - self.cancelled


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """The pool. Totals count from its start, including workers that are gone.

    waiting      stage -> tasks that have not started
    jobs         "live", "succeeded", "failed", "cancelled" -> jobs
    tasks_total  completed runs; of these, `tasks_resident` had every component resident
    restarts     number of worker restarts
    seconds      since the pool was opened
    waiting_by_user  user -> stage -> tasks that have not started
    waiting_by_model model -> stage -> such tasks in the core: without tasks of parked jobs
    seconds_by_user  user -> GPU-seconds used, including loads
    deadlines_met, deadlines_missed  jobs with a deadline that met or missed it, since the start
    record       the event log file, on the controller's node, with why it is not written and how many events it
                 lacks; "" if recording is off
    controller   display name of the controller's node; "" if unknown
    nodes        display name of each node that has or had workers, by Ray's id
    cordoned_nodes  display names of the nodes that an operator has cordoned or drained, with the state: "cordoned" or
                 "drained"
    waiting_for  what workers without a node wait for, as a sentence; "" if none does
    pins         models that stay on GPUs, in the order in which they were pinned
    left_seconds expected time until everything that waits has run, without loads; None while no worker is up
    failures     the latest jobs that failed, oldest first
    scaling      the groups of nodes; None without groups
    jobs_unverified  live jobs with a result that waits for the hashes of the files that it was made with
    controller_restarts  how often a controller of the pool was replaced, since `modelpool up` or a regular end
    history_trouble  why events and costs are not written to the pool's history; "" while they are, or without one
    submissions      of all drivers and of the journal: active ones first, each newest first; of many, only the newest
    jobs_troubles    why detached jobs wait though the pool could run them: their journal, or places of outputs
    """

    workers: tuple[WorkerStatus, ...]
    waiting: Mapping[str, int]
    jobs: Mapping[str, int]
    uploaded_bytes: int
    streamed_bytes: int
    patch_switches: int
    tasks_resident: int
    tasks_total: int
    restarts: int
    seconds: float = 0.0
    waiting_by_user: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    record: str = ""
    seconds_by_user: Mapping[str, float] = field(default_factory=dict)
    deadlines_met: int = 0
    deadlines_missed: int = 0
    controller: str = ""
    nodes: Mapping[str, str] = field(default_factory=dict)
    waiting_for: str = ""
    pins: tuple[PinnedModel, ...] = ()
    left_seconds: float | None = None
    failures: tuple[FailedJob, ...] = ()
    scaling: NodeCosts | None = None
    waiting_by_model: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    jobs_unverified: int = 0
    jobs_troubles: tuple[str, ...] = ()
    controller_restarts: int = 0
    history_trouble: str = ""
    submissions: tuple[SubmissionStatus, ...] = ()
    cordoned_nodes: Mapping[str, str] = field(default_factory=dict)
