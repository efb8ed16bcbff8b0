"""`ImageWriter`: writes finished images, videos and audio clips to one folder as they arrive, in a thread of its
own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.control.connection import Line
from modelpool.actors.results.outcomes import own_seconds, sampled_by
from modelpool.actors.wire.messages import JobEnded
from modelpool.pool.core.stage_params import AudioSamples, ImagePixels, VideoFrames

if TYPE_CHECKING:
    from modelpool.actors.outputs.folder import OutputFolder


class ImageWriter:
    """One folder of a driver."""

    def __init__(self, folder: Path, line: Line) -> None:
        """Make the folder and prove that it can be written. Raises OutputFailed."""
        from modelpool.actors.outputs.folder import OutputFolder

        self._folder: OutputFolder = OutputFolder(folder)
        self._line = line
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="modelpool images")

    def write(self, job: JobEnded, done: Callable[[Path | Exception], None]) -> None:
        """Fetch and write the image of `job`, soon; `done` is told where it is, or why it is nowhere."""

        def write() -> None:
            try:
                where: Path | Exception = self._write(job)
            except Exception as problem:
                where = problem
            done(where)

        self._thread.submit(write)

    def close(self) -> None:
        """Write what is on the way, and no more. Idempotent."""
        self._thread.shutdown(wait=True)

    def _write(self, job: JobEnded) -> Path:
        from modelpool.actors.outputs.folder import Finished

        made = self._line.fetch(job.result)
        assert isinstance(made, ImagePixels | VideoFrames | AudioSamples), (
            f"job {job.job_id} made {type(made).__name__}"
        )
        assert job.recipe is not None, f"job {job.job_id} is a request's and has a recipe"
        return self._folder.write(
            Finished(
                recipe=job.recipe,
                made=made,
                index=job.index,
                job_id=job.job_id,
                worker=sampled_by(job.tasks),
                seconds=own_seconds(job.tasks),
                tasks=job.tasks,
            )
        )
