"""Fetches the output of a job, with the facts that its file and its line in the manifest have."""

from __future__ import annotations

from modelpool.actors.control.connection import Connection
from modelpool.actors.outputs.output_file import FinishedOutput
from modelpool.actors.results.outcomes import sampled_by, unshared_seconds
from modelpool.actors.wire.messages import JobEnded
from modelpool.pool.core.stage_params import AudioSamples, ImagePixels, VideoFrames


def fetch_output(connection: Connection, job: JobEnded) -> FinishedOutput:
    """Return the output of a job that succeeded. Raises ResultGone."""
    output = connection.fetch(job.result)
    assert isinstance(output, ImagePixels | VideoFrames | AudioSamples), (
        f"job {job.job_id} returned {type(output).__name__}"
    )
    assert job.recipe is not None, f"job {job.job_id} of a request has a recipe"
    return FinishedOutput(
        recipe=job.recipe,
        output=output,
        index=job.index,
        job_id=job.job_id,
        worker=sampled_by(job.tasks),
        seconds=unshared_seconds(job.tasks),
        tasks=job.tasks,
    )
