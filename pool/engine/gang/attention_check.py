"""`AttentionCheck`: finds attention that a plan does not name although it reads tokens that are divided.

Its result would be another image, without an error. Keys of all tokens are equal on all members that divide them, and
keys of shares are not: so members compare some values of the keys of each call, in the first call of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from modelpool.pool.engine.gang.gang_group import GangGroup

#: values of the keys of each call, from end to end, and calls that are compared together
SAMPLED, TOGETHER = 16, 512
#: by how much keys of all tokens may differ, of the largest value: members may have kernels of their own
TOLERANCE = 1e-2


class AttentionCheck:
    """The calls of attention that no entry of a plan is for, in the first call of a model. All members of a group of
    texts make the same ones."""

    def __init__(self, group: GangGroup) -> None:
        self._group = group
        #: of calls that were not compared yet: values of their keys, and the module that was entered last
        self._keys: list[Tensor] = []
        self._modules: list[str] = []
        #: those that read a share of the tokens
        self._wrong: list[str] = []
        self.module = ""
        #: whether the first call of the model has ended
        self.is_over = False

    def note(self, key: Tensor) -> None:
        """A call that no entry is for reads `key`."""
        if self.is_over:
            return
        values = key.detach().reshape(-1)
        # nothing here may wait for the device, which may wait for a member that has ended
        step = max(1, (values.numel() - 1) // (SAMPLED - 1))
        found = values.new_zeros(SAMPLED, dtype=torch.float32)
        sampled = values[::step][:SAMPLED].float()
        found[: len(sampled)] = sampled
        self._keys.append(torch.cat((found.new_full((1,), float(values.numel())), found)))
        self._modules.append(self.module)
        if len(self._keys) == TOGETHER:
            self._compare()

    def end(self) -> list[str]:
        """The first call of the model has ended: return the modules in which attention reads a share of the tokens,
        though no entry of the plan is for it. Raises GangBroken."""
        self.is_over = True
        if self._keys:
            self._compare()
        return self._wrong

    def _compare(self) -> None:
        own = torch.stack(self._keys)
        first, *others = self._group.among_parts(own)
        largest = first[:, 1:].abs().amax(1).clamp_min(1e-30)
        differs = torch.zeros(len(own), dtype=torch.bool, device=own.device)
        for other in others:
            differs |= first[:, 0] != other[:, 0]
            differs |= (first[:, 1:] - other[:, 1:]).abs().amax(1) > TOLERANCE * largest
        self._group.await_device()
        self._wrong += [module for module, is_wrong in zip(self._modules, differs.tolist(), strict=True) if is_wrong]
        self._keys, self._modules = [], []
