"""A choice in words: everything that was weighed, and nothing that was not there."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.model.placement_record import PlacementOption, PlacementRule, TaskStart, Why

HERE = WorkerId("gpu-1")
MIB = 1 << 20


def why(extra_seconds: float = 0.0, **numbers: object) -> Why:
    chosen = PlacementOption(HERE, 0.0, extra_seconds, 2.0)
    return Why(PlacementRule.CHEAPEST, chosen, idle=2, busy=1, **numbers)  # type: ignore[arg-type]


def busy(name: str, wait_seconds: float, extra_seconds: float) -> PlacementOption:
    return PlacementOption(WorkerId(name), wait_seconds, extra_seconds, 2.0)


def test_where_all_is_there_nothing_else_is_said() -> None:
    assert why().brief == "all resident"
    assert why().words == "gpu-1, of 2 idle and 1 busy: all weights resident, run 2.00 s"


def test_what_has_to_move_is_said_and_what_need_not_is_not() -> None:
    assert why(0.5, upload_bytes=5 * MIB).brief == "upload 5.0 MiB"
    assert why(0.5, streamed_bytes=MIB, switches=2).brief == "stream 1.0 MiB, 2 patch switches"
    assert why(0.5, switches=1, slowdown=1.25).words == (
        "gpu-1, of 2 idle and 1 busy: 1 patch switch in 0.50 s, run 2.00 s, divided (1.25 times as long)"
    )
    assert why(0.5).brief == "0.50 s to set up"


def test_the_busy_worker_that_was_not_waited_for_is_named() -> None:
    """The soonest that had less to move; not an idle one, nor one with as much to move."""
    others = (
        busy("gpu-5", 9.0, 0.0),
        busy("gpu-0", 2.1, 0.0),
        busy("gpu-2", 0.1, 0.5),
        busy("gpu-3", 0.0, 0.2),
    )
    choice = why(0.5, upload_bytes=5 * MIB, others=others)
    assert choice.brief == "upload 5.0 MiB, would have waited 2.1 s for gpu-0"
    assert choice.words.endswith("; gpu-0, busy for 2.10 s, would take 4.10 s")
    assert "waited" not in why(others=others).brief


def test_a_start_says_where_and_why_once() -> None:
    assert TaskStart(HERE, 3, 2, why(note="its turn")).words == (
        "attempt 2 on gpu-1#3, of 2 idle and 1 busy: its turn; all weights resident, run 2.00 s"
    )
