"""`EndStates`: how the jobs of a submission ended, by index: a byte for each."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import get_args

from modelpool.actors.outputs.results.job_ledger import EndState

_STATES: tuple[EndState, ...] = get_args(EndState)
_NONE = 0


class EndStates(MutableMapping[int, EndState]):
    """A mapping for a `JobLedger` with the states alone. Indexes are from 0, nearly without gaps."""

    __slots__ = ("_codes", "_count")

    def __init__(self) -> None:
        #: by index: the place of the state, from 1, or `_NONE`
        self._codes = bytearray()
        self._count = 0

    def __getitem__(self, index: int) -> EndState:
        code = self._codes[index] if 0 <= index < len(self._codes) else _NONE
        if code == _NONE:
            raise KeyError(index)
        return _STATES[code - 1]

    def __setitem__(self, index: int, state: EndState) -> None:
        if index >= len(self._codes):
            self._codes.extend(bytes(index + 1 - len(self._codes)))
        self._count += self._codes[index] == _NONE
        self._codes[index] = 1 + _STATES.index(state)

    def __delitem__(self, index: int) -> None:
        if index not in self:
            raise KeyError(index)
        self._codes[index] = _NONE
        self._count -= 1

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (index for index, code in enumerate(self._codes) if code != _NONE)
