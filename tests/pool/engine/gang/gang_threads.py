"""Members of a gang as threads of one process, each with a copy of a model: one call of the model, without a store."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.engine.gang.gang_group import GangGroup
from modelpool.pool.engine.gang.gang_layout import GangLayout
from modelpool.pool.engine.gang.sequence_split import divided_tokens
from modelpool.pool.values.core.sequence_plan import SequencePlan
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import WorkerId

#: a member waits for the others for so long
WAIT_SECONDS = 60.0
#: calls a module as a family does
Call = Callable[[nn.Module], Any]


class _Table:
    """Where members lay down tensors for each other."""

    def __init__(self, members: int) -> None:
        self.laid: list[Any] = [None] * members
        self.barrier = threading.Barrier(members, timeout=WAIT_SECONDS)

    def swap(self, rank: int, own: Any) -> list[Any]:
        """What all members laid down, by rank."""
        self.laid[rank] = own
        self.barrier.wait()
        found = list(self.laid)
        self.barrier.wait()
        return found


class ThreadGroup(GangGroup):
    """The group of members that are threads: all of them divide the tokens of one text."""

    def __init__(self, table: _Table, rank: int) -> None:
        members = tuple(WorkerId(f"gpu-{place}") for place in range(len(table.laid)))
        super().__init__(Gang("threads", members, rank), GangLayout(1, len(members)), torch.device("cpu"))
        self._table = table

    def among_parts(self, own: Tensor) -> list[Tensor]:
        found = self._table.swap(self.gang.rank, own)
        assert len({tuple(each.shape) for each in found}) == 1, "as all_gather expects"
        return found

    def exchange(self, sent: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        found = [each[self.gang.rank].reshape(-1) for each in self._table.swap(self.gang.rank, list(sent))]
        assert [each.numel() for each in found] == list(numbers), "as all_to_all_single expects"
        return found


def in_threads(module: nn.Module, plan: SequencePlan, members: int, call: Call) -> list[Any]:
    """Return the results of `call` on each member, each with a copy of `module` with its tokens divided. Raises the
    first error that is not about another member."""
    table = _Table(members)
    results: list[Any] = [None] * members
    errors: list[BaseException | None] = [None] * members

    def member(rank: int, own: nn.Module) -> None:
        try:
            with torch.inference_mode(), divided_tokens(own, plan, ThreadGroup(table, rank)):
                results[rank] = call(own)
        except BaseException as failed:
            errors[rank] = failed
            table.barrier.abort()

    threads = [
        threading.Thread(target=member, args=(rank, copy.deepcopy(module)), daemon=True) for rank in range(members)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [each for each in errors if each is not None]
    for error in sorted(found, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return results
