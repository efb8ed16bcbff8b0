"""Parameters of a sampling run with some fields changed, wherever they are."""

from __future__ import annotations

import dataclasses
from typing import Any

from modelpool.pool.values.core.stage_params import SampleParams

_GROUPS = ("shape", "schedule", "guidance")


def changed_work(work: SampleParams, **fields: Any) -> SampleParams:
    """Return `work` with these fields changed: its own, or its groups', by their names there."""
    for group in _GROUPS:
        part = getattr(work, group)
        own = {name: fields.pop(name) for name in list(fields) if name in part.__dataclass_fields__}
        work = dataclasses.replace(work, **{group: dataclasses.replace(part, **own)})
    return dataclasses.replace(work, **fields)
