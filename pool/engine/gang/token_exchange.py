"""`TokenExchange`: attention over the tokens of all members of a gang, in which each computes some of the heads.

Members exchange tokens for heads and back (Ulysses: Jacobs et al. 2023, arXiv:2309.14509), so that every head is
computed by the same kernel from the same numbers as on one worker; only the order of tokens differs. Shares of any
length are possible.

Shape legend: B batch, H heads, L tokens, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.engine.gang.attention_check import AttentionCheck
from modelpool.pool.engine.gang.gang_group import GangGroup
from modelpool.pool.weights.ops.attention_calls import Attend, AttentionKernels


@dataclass(slots=True)
class TokenShares:
    """The tokens of each segment in the current call of the model.

    parts   members that divide them
    totals  tokens of a segment, by its name; each is found where it is split first
    """

    parts: int
    totals: dict[str, int]

    def share(self, segment: str) -> list[int]:
        """Return the tokens of a segment that each member has."""
        return shares_of(self.total(segment), self.parts)

    def total(self, segment: str) -> int:
        """Return the tokens of a segment. Raises ValueError if none were split yet."""
        if segment not in self.totals:
            raise ValueError(f"a plan reads tokens of {segment} that it has not split")
        return self.totals[segment]

    def together(self, segments: Sequence[str]) -> list[int]:
        """Return the tokens of these segments that each member has."""
        return [sum(each) for each in zip(*(self.share(segment) for segment in segments), strict=True)]


def shares_of(total: int, parts: int) -> list[int]:
    """Return how many of `total` each of `parts` members has; the first ones have one more."""
    least, more = divmod(total, parts)
    return [least + (part < more) for part in range(parts)]


class TokenExchange(AttentionKernels):
    """Makes the calls of attention inside of modules that a plan names, for all members; other calls go to the kernels
    that made them before."""

    def __init__(self, group: GangGroup, shares: TokenShares, outer: AttentionKernels | None) -> None:
        super().__init__()
        self._group, self._shares, self._outer = group, shares, outer
        self._part = group.layout.part_of(group.gang.rank)
        #: segments of queries and keys of the module that computes
        self.segments: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        #: whether that module leaves tokens out
        self.leaves_out = False
        #: exchanges in the current call of the model
        self.calls = 0
        #: of calls outside of these modules
        self.check = AttentionCheck(group)

    @property
    def is_needed(self) -> bool:
        """Every call is looked at."""
        return True

    @property
    def undivided(self) -> AttentionKernels | None:
        """The kernels that made the calls before."""
        return self._outer

    def call(
        self,
        attend: Attend,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Return the result for the tokens of this member, [B, H, L, D]."""
        if self.segments is None:
            self.check.note(key)
            return self._plain(attend, query, key, value, attn_mask, *args, **kwargs)
        self.calls += 1
        queries, keys = self.segments
        lengths = self._lengths(keys, key.shape[-2])
        if not queries:
            found = [self._joined(each, lengths) for each in (key, value)]
            mask = attn_mask if attn_mask is None or attn_mask.shape[-1] == 1 else self._keys_of(attn_mask, lengths)
            return self._plain(attend, query, *found, mask, *args, **kwargs)
        assert set(queries) == set(keys), "queries and keys of divided attention are the same tokens"
        _expect(query.shape[-2], lengths[self._part], "queries", queries)
        if key.shape[1] != query.shape[1]:  # fewer heads of keys: a member needs the keys of its queries' heads
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            kwargs = {name: given for name, given in kwargs.items() if name != "enable_gqa"}
        heads = shares_of(query.shape[1], len(lengths))
        mask = None if attn_mask is None else self._whole_mask(attn_mask, lengths, heads)
        scattered = self._heads_for_tokens((query, key, value), lengths, heads)
        made = self._tokens_for_heads(self._plain(attend, *scattered, mask, *args, **kwargs), lengths, heads)
        if self.leaves_out:  # such a module reads on the host which tokens it leaves out: the next one waits for this
            self._group.await_device()
        return made

    def _lengths(self, segments: Sequence[str], found: int) -> list[int]:
        """How many of these tokens each member has; this one has `found`."""
        if self.leaves_out:
            own = torch.tensor([found], device=self._group.device)
            lengths_1 = self._group.among_parts(own)
            self._group.await_device()  # the host would wait without end for a member that is gone
            return [int(each.item()) for each in lengths_1]
        lengths = self._shares.together(segments)
        _expect(found, lengths[self._part], "keys", segments)
        return lengths

    def _plain(
        self, attend: Attend, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The result for these tensors as one worker computes it."""
        if self._outer is None or not self._outer.is_needed:
            return attend(query, key, value, mask, *args, **kwargs)
        return self._outer.call(attend, query, key, value, mask, *args, **kwargs)

    def _heads_for_tokens(self, tensors: Sequence[Tensor], lengths: list[int], heads: list[int]) -> list[Tensor]:
        """Send each member its heads of this member's tokens; return the own heads of all tokens, of each tensor."""
        by_member = [each.split(heads, 1) for each in tensors]
        sent = [torch.cat([each[member].reshape(-1) for each in by_member]) for member in range(len(heads))]
        batch, own = tensors[0].shape[0], heads[self._part]
        widths = [each.shape[-1] for each in tensors]
        found = self._group.exchange(sent, [batch * own * length * sum(widths) for length in lengths])
        joined: list[list[Tensor]] = [[] for _ in tensors]
        for flat, length in zip(found, lengths, strict=True):
            pieces = flat.split([batch * own * length * width for width in widths])
            for place, (piece, width) in enumerate(zip(pieces, widths, strict=True)):
                joined[place].append(piece.view(batch, own, length, width))
        return [torch.cat(each, 2) for each in joined]

    def _tokens_for_heads(self, made: Tensor, lengths: list[int], heads: list[int]) -> Tensor:
        """Send each member the results for its tokens; return all heads of the own tokens."""
        batch, length, width = made.shape[0], lengths[self._part], made.shape[-1]
        found = self._group.exchange(list(made.split(lengths, 2)), [batch * each * length * width for each in heads])
        return torch.cat([flat.view(batch, each, length, width) for flat, each in zip(found, heads, strict=True)], 1)

    def _joined(self, tensor: Tensor, lengths: list[int], dim: int = -2) -> Tensor:
        """The tokens of all members."""
        return joined_shares(self._group, tensor, lengths, dim)

    def _keys_of(self, mask: Tensor, lengths: list[int]) -> Tensor:
        """A mask of keys for the keys of all members."""
        _expect(mask.shape[-1], lengths[self._part], "keys of a mask", ())
        return self._joined(mask, lengths, -1)

    def _whole_mask(self, mask: Tensor, lengths: list[int], heads: list[int]) -> Tensor:
        """The mask for the tokens of all members, and the heads of this one."""
        if mask.dim() == 4 and mask.shape[1] > 1:
            raise ValueError(f"a mask of {mask.shape[1]} heads cannot be divided")
        rows = mask.shape[-2] if mask.dim() > 1 else 1
        if rows == 1:
            return self._keys_of(mask, lengths)
        if mask.dtype is not torch.bool or rows != mask.shape[-1]:
            raise ValueError(f"a mask of {rows} queries and {mask.shape[-1]} keys of {mask.dtype} cannot be divided")
        # which tokens are real, as rows and as columns
        real = self._keys_of(mask.diagonal(dim1=-2, dim2=-1), lengths)
        return real.unsqueeze(-1) & real.unsqueeze(-2)


def joined_shares(group: GangGroup, tensor: Tensor, lengths: list[int], dim: int) -> Tensor:
    """Return the shares of all members of the group of texts, of `lengths` along `dim`, one behind the other."""
    most = max(lengths)
    missing = most - tensor.shape[dim]
    if missing:
        shape = list(tensor.shape)
        shape[dim] = missing
        tensor = torch.cat((tensor, tensor.new_zeros(shape)), dim)
    is_bool = tensor.dtype is torch.bool
    found = group.among_parts(tensor.to(torch.uint8) if is_bool else tensor)
    kept = [each.narrow(dim, 0, length) for each, length in zip(found, lengths, strict=True)]
    joined = torch.cat(kept, dim)
    return joined.to(torch.bool) if is_bool else joined


def _expect(found: int, expected: int, what: str, segments: Sequence[str]) -> None:
    if found != expected:
        named = f" of {' and '.join(segments)}" if segments else ""
        raise ValueError(f"a plan divides {expected} {what}{named} here, found {found}")
