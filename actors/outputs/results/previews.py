"""`ImagePreview`: a preview of one job, as a driver reads it. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.values.core.previews import Preview
from modelpool.pool.values.specs.spec import JobId


@dataclass(frozen=True, slots=True)
class ImagePreview(Preview):
    """A preview of the output at `index` of a submission: `step` of `steps`, `content` (a WebP file) and `pil`."""

    index: int
    job_id: JobId
