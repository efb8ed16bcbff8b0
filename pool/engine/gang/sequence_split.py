"""Applies the plan of a family (`pool.values.core.sequence_plan`) to a module for the steps of a run, and checks that
all of it acts: an entry that does not is an error, since the image would be wrong without one. So is attention that
should have an entry and has none."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.engine.gang.gang_group import GangGroup
from modelpool.pool.engine.gang.token_exchange import TokenExchange, TokenShares, joined_shares
from modelpool.pool.inference.guidance.controlled_transformer import RepeatedResiduals, SparseResiduals
from modelpool.pool.values.core.sequence_plan import Gather, SequencePlan, Split, SplitAttention, Undivided
from modelpool.pool.weights.ops.attention_calls import current_kernels, routed


class PlanUnfit(ValueError):
    """A plan that does not fit a module. The message names the entry."""


@contextmanager
def divided_tokens(module: nn.Module, plan: SequencePlan, group: GangGroup, may_skip: bool = False) -> Iterator[None]:
    """Divide the tokens of `module` among the members of a group while it is entered. Raises PlanUnfit if an entry
    names no module; a call of the module raises it if an entry did not act. `may_skip`: some calls run some of the
    layers only; what has acted in an earlier call may be idle then."""
    split = _DividedCall(plan, group, may_skip)
    with ExitStack() as undoing:
        for hook in split.hooks(module):
            undoing.callback(hook.remove)
        undoing.enter_context(routed(split.attention))
        yield


class _DividedCall:
    """The state of one call of a module, and the hooks that change it."""

    def __init__(self, plan: SequencePlan, group: GangGroup, may_skip: bool) -> None:
        self._plan, self._group, self._may_skip = plan, group, may_skip
        self._part = group.layout.part_of(group.gang.rank)
        self._shares = TokenShares(group.layout.parts, {})
        self.attention = TokenExchange(group, self._shares, current_kernels())
        #: entries that have acted in the current call
        self._acted: set[object] = set()
        #: in this or an earlier one
        self._known: set[object] = set()
        #: hooks that are in place until the first call has ended
        self._first: list[Any] = []

    def hooks(self, module: nn.Module) -> Iterator[Any]:
        """Yield the handles of all hooks, as each is in place."""
        yield module.register_forward_pre_hook(self._begin, prepend=True)
        for split in self._plan.splits:
            for found in modules_at(module, split.module):
                yield found.register_forward_pre_hook(self._splitting(found, split), with_kwargs=True)
        for gather in self._plan.gathers:
            for found in modules_at(module, gather.module):
                yield found.register_forward_hook(self._gathering(gather))
        for undivided in self._plan.undivided:
            for found in modules_at(module, undivided.module):
                yield found.register_forward_pre_hook(self._joining(found, undivided), with_kwargs=True)
                yield found.register_forward_hook(self._keeping(undivided))
        for divided in self._plan.attention:
            for found in modules_at(module, divided.module):
                yield found.register_forward_pre_hook(self._entering(divided))
                yield found.register_forward_hook(self._leaving(divided), always_call=True)
        for name, found in module.named_modules():  # for the name of attention that no entry is for
            self._first.append(found.register_forward_pre_hook(partial(self._at, name)))
            yield self._first[-1]
        yield module.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._shares.totals.clear()
        self._acted.clear()

    def _at(self, name: str, module: nn.Module, args: Any) -> None:
        self.attention.check.module = name

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Check that every entry has acted, and after the first call that attention has an entry where it needs one."""
        done = {(entry.module, entry.argument) for entry in self._acted if isinstance(entry, Split)}
        idle: list[object] = [split for split in self._plan.splits if (split.module, split.argument) not in done]
        others = (*self._plan.gathers, *self._plan.undivided, *self._plan.attention)
        idle += [entry for entry in others if entry not in self._acted]
        if self._may_skip:
            idle = [entry for entry in idle if entry not in self._known]
        self._known |= self._acted
        if idle:
            raise PlanUnfit(f"{type(module).__name__}: found no use of {idle[0]}, expected one in each call")
        if not self.attention.check.is_over:
            for hook in self._first:
                hook.remove()
            if forgotten := self.attention.check.end():
                found = f"attention that reads the tokens of one member alone, near {forgotten[0]}"
                raise PlanUnfit(f"{type(module).__name__}: found {found}, expected an entry of the plan for it")

    def _splitting(self, module: nn.Module, split: Split) -> Any:
        argument, _, place = split.argument.partition(".")

        def own(given: Any) -> Any:
            if not place or given is None:
                return self._own(given, split)
            each = list(given)
            each[int(place)] = self._own(each[int(place)], split)
            return tuple(each)

        return _changing(module, argument, split, own, lambda: self._acted.add(split))  # it has its default

    def _own(self, given: Any, split: Split) -> Any:
        """The share of this member in an input."""
        if isinstance(given, (RepeatedResiduals, SparseResiduals)):
            return given.changed(lambda sample: self._own(sample, split))
        if isinstance(given, (tuple, list)):  # models take residuals away from a list
            return type(given)([self._own(each, split) for each in given])
        if given is None or given.dim() == split.whole:
            self._acted.add(split)
            return given
        if split.dims not in (0, given.dim()):
            return given
        self._acted.add(split)
        found, totals = given.shape[split.dim], self._shares.totals
        if found == 1 and any(totals.get(segment, 1) != 1 for segment in split.segments):  # for all tokens
            return given
        if len(split.segments) == 1:
            total = totals.setdefault(split.segments[0], found)
        else:
            total = sum(self._shares.total(segment) for segment in split.segments)
        if found != total:
            raise PlanUnfit(f"found {found} tokens in {split}, expected {total}")
        kept, begin = [], 0
        for segment in split.segments:
            shares = self._shares.share(segment)
            kept.append(given.narrow(split.dim, begin + sum(shares[: self._part]), shares[self._part]))
            begin += sum(shares)
        return kept[0] if len(kept) == 1 else torch.cat(kept, split.dim)

    def _gathering(self, gather: Gather) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            self._acted.add(gather)
            lengths = self._shares.share(gather.segment)
            if isinstance(output, Tensor):
                return self._joined(output, lengths, gather)
            made = list(output)
            made[gather.place] = self._joined(made[gather.place], lengths, gather)
            return tuple(made)

        return hook

    def _joining(self, module: nn.Module, undivided: Undivided) -> Any:
        def joined(own: Tensor) -> Tensor:
            self._acted.add(undivided)
            return self._joined(own, self._shares.share(undivided.segment), undivided)

        return _changing(module, undivided.argument, undivided, joined, lambda: None)

    def _keeping(self, undivided: Undivided) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            lengths = self._shares.share(undivided.segment)
            if output.shape[undivided.dim] != sum(lengths):
                raise PlanUnfit(f"found {output.shape[undivided.dim]} tokens, expected {sum(lengths)} in {undivided}")
            return output.narrow(undivided.dim, sum(lengths[: self._part]), lengths[self._part])

        return hook

    def _joined(self, own: Tensor, lengths: list[int], gather: Gather | Undivided) -> Tensor:
        if own.shape[gather.dim] != lengths[self._part]:
            expected = f"{lengths[self._part]} in {gather}"
            raise PlanUnfit(f"found {own.shape[gather.dim]} tokens, expected {expected}")
        return joined_shares(self._group, own, lengths, gather.dim)

    def _entering(self, divided: SplitAttention) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self.attention.segments = divided.queries, divided.keys
            self.attention.leaves_out = divided.leaves_out
            self.attention.calls = 0

        return hook

    def _leaving(self, divided: SplitAttention) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.attention.segments = None
            if self.attention.calls:
                self._acted.add(divided)
            elif output is not None:
                raise PlanUnfit(f"{type(module).__name__}: found no attention inside, expected it for {divided}")

        return hook


def _changing(
    module: nn.Module,
    argument: str,
    entry: Split | Undivided,
    change: Callable[[Any], Any],
    on_default: Callable[[], None],
) -> Any:
    """Return a hook that changes an input of `module`. Raises PlanUnfit if it has none of that name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    if argument not in names:
        raise PlanUnfit(f"{type(module).__name__}: found no input {argument!r}, expected {entry}")
    position = names.index(argument)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if argument in kwargs:
            return args, {**kwargs, argument: change(kwargs[argument])}
        if position < len(args):
            return (*args[:position], change(args[position]), *args[position + 1 :]), kwargs
        on_default()
        return args, kwargs

    return hook


def modules_at(module: nn.Module, name: str) -> Sequence[nn.Module]:
    """Return the modules with a name of a plan. Raises PlanUnfit if there are none."""
    if not name:
        return [module]
    if ".-1" in f".{name}":
        stem, _, rest = f".{name}".partition(".-1")
        last = len(list(module.get_submodule(stem[1:]).children())) - 1
        name = f"{stem[1:]}.{last}{rest}"
    pattern = re.compile(re.escape(name).replace(r"\*", r"\d+"))
    found = [each for path, each in module.named_modules() if pattern.fullmatch(path)]
    if not found:
        raise PlanUnfit(f"{type(module).__name__}: found no module {name!r}, expected one to divide tokens at")
    return found
