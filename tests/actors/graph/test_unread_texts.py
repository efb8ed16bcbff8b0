"""Warnings about texts that a request sets and no model reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from modelpool.actors.graph.features.vision_graph import unread_text_warnings
from modelpool.pool.values.core.sampling_facts import SamplingFacts


def _warnings(reads: tuple[str, ...], cfg: float, reads_negative: bool = True) -> list[str]:
    run: Any = SimpleNamespace(model=SimpleNamespace(name="m"), facts=SamplingFacts(reads=frozenset(reads)), cfg=cfg)
    return list(unread_text_warnings(run, "a cat", "a dog", reads_negative))


def test_a_negative_prompt_that_a_second_model_replaces_is_told() -> None:
    ignored = ["negative: ignored, model 'm' reads no negative prompt with these settings"]
    assert _warnings(("context", "unconditional"), 7.0) == ignored
    assert _warnings(("context",), 7.0) == []
    assert _warnings(("context",), 7.0, reads_negative=False) == ignored
    # without guidance, a negative prompt is a usual default that nobody misses
    assert _warnings(("context", "unconditional"), 1.0) == []
