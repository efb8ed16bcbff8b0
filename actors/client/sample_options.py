"""The options of `ModelPool.sample`: fields of a request."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping


class SampleOptions(TypedDict, total=False):
    """What `ModelPool.sample` accepts by name, with the meaning that it has in a request."""

    steps: int
    cfg: float
    sampler: str
    schedule: str | None
    width: int | None
    height: int | None
    seed: int | None
    frames: int | None
    frame_rate: float | None
    seconds: float | None


#: the value of each option that is not given; None: the model decides
SAMPLE_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {**dict.fromkeys(SampleOptions.__annotations__), "steps": 20, "cfg": 5.0, "sampler": "euler"}
)
