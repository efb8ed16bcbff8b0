"""`ImageWriter`: writes finished images, videos and audio clips to one folder as they arrive, in its own thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.control.connection import Connection
from modelpool.actors.results.outcomes import sampled_by, unshared_seconds
from modelpool.actors.wire.messages import JobEnded
from modelpool.pool.core.stage_params import AudioSamples, ImagePixels, VideoFrames

if TYPE_CHECKING:
    from modelpool.actors.outputs.folder import OutputFolder


class ImageWriter:
    """Writes to one output folder of a driver."""

    def __init__(self, folder: Path, connection: Connection) -> None:
        """Create the folder and check that it is writable. Raises OutputFailed."""
        from modelpool.actors.outputs.folder import OutputFolder

        self._folder: OutputFolder = OutputFolder(folder)
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="modelpool images")

    def write(self, job: JobEnded, done: Callable[[Path | Exception], None]) -> None:
        """Fetch and write the output of `job` in the background; calls `done` with its path or the error."""

        def write() -> None:
            try:
                where: Path | Exception = self._write(job)
            except Exception as problem:
                where = problem
            done(where)

        self._thread.submit(write)

    def close(self) -> None:
        """Write pending outputs and stop. Idempotent."""
        self._thread.shutdown(wait=True)

    def _write(self, job: JobEnded) -> Path:
        from modelpool.actors.outputs.folder import FinishedOutput

        output = self._connection.fetch(job.result)
        assert isinstance(output, ImagePixels | VideoFrames | AudioSamples), (
            f"job {job.job_id} returned {type(output).__name__}"
        )
        assert job.recipe is not None, f"job {job.job_id} of a request has a recipe"
        return self._folder.write(
            FinishedOutput(
                recipe=job.recipe,
                output=output,
                index=job.index,
                job_id=job.job_id,
                worker=sampled_by(job.tasks),
                seconds=unshared_seconds(job.tasks),
                tasks=job.tasks,
            )
        )
