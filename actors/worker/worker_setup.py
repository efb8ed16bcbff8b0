"""What a worker is created with, besides its name and its engine: its machine, checkpoints, and who it tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelpool.actors.worker.step_checkpoints.checkpoint_disk import CheckpointDisk
from modelpool.actors.worker.wire.messages import PreviewMade, StateSaved, StepDone
from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.values.core.results import RunState
from modelpool.pool.values.specs.spec import NO_NODE, JudgedFile, NodeId


@dataclass(frozen=True, slots=True)
class WorkerNode:
    """The machine of a worker: its workers share its memory and disks.

    cache  its folder for fetched files
    host   the address at which other nodes get these files; empty: they do not
    """

    node: NodeId = NO_NODE
    cache: CacheSettings | None = None
    host: str = ""


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """How a worker saves the states of its sampling runs.

    seconds  of work between two states of a run; None: it saves none
    disk     saves them on the node, too
    """

    seconds: float | None = None
    disk: CheckpointDisk | None = None


@dataclass(frozen=True, slots=True)
class WorkerCallbacks:
    """Who receives what a worker has to tell.

    on_steps    the steps of runs
    on_state    the state of a sampling run, on another thread
    on_preview  previews that are wanted, on another thread
    on_judged   verdicts about files, with the epoch of the controller, on any thread; it must not block. None: files
                are not hashed
    """

    on_steps: Callable[[Sequence[StepDone]], None]
    on_state: Callable[[StateSaved, RunState], None] = lambda saved, state: None
    on_preview: Callable[[PreviewMade], None] = lambda made: None
    on_judged: Callable[[tuple[JudgedFile, ...], int], None] | None = None


UNKNOWN_NODE, NO_CHECKPOINTS = WorkerNode(), Checkpointing()
