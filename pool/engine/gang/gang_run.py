"""Runs the sampling of one task in a gang: meets, checks that all members compute the same, divides, agrees after each
step, and leaves, whatever happens.

The latent is complete on every member after each step. So each keeps the state of the last one, and a gang that breaks
ends with it on every member that is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from torch import nn

from modelpool.pool.engine.gang.branch_spread import spread_over_branches
from modelpool.pool.engine.gang.gang_group import GangGroup
from modelpool.pool.engine.gang.gang_layout import layout_of
from modelpool.pool.engine.gang.kept_group import KeptGroup
from modelpool.pool.engine.gang.member_digest import expect_equal, request_digest, weight_digests
from modelpool.pool.engine.gang.peer_weights import PeerWeights, peer_weights
from modelpool.pool.engine.gang.sequence_split import divided_tokens
from modelpool.pool.families.gang_support import gang_obstacle
from modelpool.pool.inference.conditioning.run_parts import DenoisingRun, PreparePart, RunPart, RunResults
from modelpool.pool.inference.extensions.block_runs import ACROSS
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.gang_errors import GangBroken
from modelpool.pool.values.core.stage_params import RunHooks, RunState, Stopped
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.weights.options.run_context import call_facts
from modelpool.pool.weights.patcher.out_of_memory import exhausted_memory, release_frames
from modelpool.pool.weights.vram.gang_share import GangShare

#: runs the sampling with these hooks, and with one more part behind all others
Sampling: TypeAlias = Callable[[RunHooks, PreparePart], RunResults]


def sample_in_gang(
    gang: Gang,
    texts: int,
    sampling: Sampling,
    hooks: RunHooks,
    on_met: Callable[[float], None],
    share: GangShare | None = None,
    host_bytes_per_second: float = 1.0,
    kept: KeptGroup | None = None,
) -> RunResults:
    """Return the results of a sampling run that this worker shares, equal on every member. `texts` are those for which
    the model is evaluated in each step. `on_met` gets the seconds from when this member was ready until all had met.
    `share` is what it may hold for the others, which it could read from its host at this speed; None: nothing. The
    group of a run that ends well stays in `kept`, from which the next run of the same members takes it.

    A request to stop or to pause ends the run of all members after the same step. Raises Stopped; GangBroken with the
    state after the last complete step; GangsDiffer.
    """
    run = _SharedRun(gang, texts, hooks, on_met, share, host_bytes_per_second, kept)
    try:
        results = sampling(run.hooks, run.part)
        run.keep()
        return results
    except GangBroken as broken:
        state = broken.state if broken.state is not None else run.state
        raise GangBroken(str(broken), broken.suspects, state) from broken
    except Stopped:
        run.leave("it was stopped")
        raise
    except BaseException as failed:
        reason = f"{type(failed).__name__}: {failed}"[:300]
        run.leave(reason)
        if isinstance(failed, Exception) and exhausted_memory(failed) is not None:
            release_frames(failed)
            raise GangBroken(f"this member ran out of memory: {reason}", (gang.rank,), run.state) from failed
        raise
    finally:
        run.leave()


@contextmanager
def told_if_absent(gang: Gang) -> Iterator[None]:
    """Tell the other members that this one comes, and if the block fails, so that they wait for this one while it
    loads, and no longer. A gang that has failed meets no more."""
    GangGroup.announce(gang)
    try:
        yield
    except GangBroken:
        raise
    except BaseException as failed:
        GangGroup.decline(gang, f"{type(failed).__name__}: {failed}"[:300])
        raise


def _calls_alike(run: DenoisingRun) -> bool:
    """Whether all members use the same weights in the same order, whichever text they predict for: nothing acts inside
    of the model, as a cache that skips its blocks, and no patches change."""
    is_plain = run.model.state.leaves_module_as_is(run.options)
    return is_plain and run.apply_hooks is None and run.resources.patches_at is None


class _SharedRun:
    """The state of one member in a run of its gang."""

    def __init__(
        self,
        gang: Gang,
        texts: int,
        hooks: RunHooks,
        on_met: Callable[[float], None],
        share: GangShare | None = None,
        host_bytes_per_second: float = 1.0,
        kept: KeptGroup | None = None,
    ) -> None:
        self._kept = kept
        self._gang, self._hooks, self._on_met = gang, hooks, on_met
        self._share, self._host_bytes_per_second = share, host_bytes_per_second
        self._peers: PeerWeights | None = None
        self._layout = layout_of(gang.degree, texts)
        self._group: GangGroup | None = None
        self._stops = self._pauses = False
        self._longest_seconds, self._begun = 0.0, 0.0
        #: calls of the model in a step with all options, for each call without them
        self._most_calls = 1.0
        #: after the last complete step
        self.state: RunState | None = None

    @property
    def hooks(self) -> RunHooks:
        """The hooks of the run: what was asked of any member happens on all of them, after a step. Only the leader
        reports."""
        own = self._hooks
        return replace(
            own,
            on_step=self._after_step,
            should_stop=self._should_stop,
            should_pause=lambda: self._pauses,
            checkpoint=self._keep,
            preview=own.preview if self._gang.leads else None,
        )

    def part(self, run: DenoisingRun) -> RunPart:
        """Let the run be shared: the texts are predicted for one by one, by groups of members. Raises UnusableField for
        one that cannot be."""
        if obstacle := gang_obstacle(run.facts, run.work, self._gang.degree):
            raise unusable_field("gpus", self._gang.degree, f"fewer: {obstacle}")
        run.max_batch = 1
        extra = run.work.options.extra_predictions
        self._most_calls = 1.0 + extra * self._layout.branches / max(1, run.work.texts)

        @contextmanager
        def shared(module: nn.Module) -> Iterator[None]:
            ready = time.monotonic()
            group = GangGroup(self._gang, self._layout, run.model.device)
            self._group = group
            kept = None if self._kept is None else self._kept.take()
            if not group.meet(self._hooks.should_stop, kept=kept):
                raise Stopped("stopped before its gang has met")
            self._expect_equal(run, module, group)
            with ExitStack() as entered:
                if self._share is not None and _calls_alike(run):
                    self._peers = entered.enter_context(
                        peer_weights(group, run.model, module, self._share, self._host_bytes_per_second)
                    )
                self._on_met(time.monotonic() - ready)
                entered.enter_context(run.model.thawed())  # compiled blocks call torch's attention
                if self._layout.branches > 1:
                    run.spread = partial(spread_over_branches, group, in_step=self._peers is not None)
                if self._layout.parts > 1:
                    plan = run.facts.sequence
                    assert plan is not None, "`gang_obstacle` asks for one"
                    entered.enter_context(divided_tokens(module, plan, group, run.work.options.skips_layers))
                    entered.enter_context(call_facts(**{ACROSS: group.sum_of_parts}))
                self._begun = time.monotonic()
                yield

        return RunPart(around=shared)

    def keep(self) -> None:
        """Keep the group of a run that has ended well, on all members after the same step."""
        if self._group is not None and self._kept is not None:
            formed = self._group.give()
            if formed is not None:
                self._kept.keep(formed)

    def leave(self, reason: str = "") -> None:
        """Leave the group, if there is one that is not kept. Idempotent."""
        if self._group is not None:
            if self._share is not None:
                self._share.staged_bytes = self._group.staged_bytes
            self._group.leave(reason)
            if not reason:
                self._group = None

    def _expect_equal(self, run: DenoisingRun, module: nn.Module, group: GangGroup) -> None:
        request = request_digest(run.works, run.inputs, run.resources.resumed)
        weights = weight_digests(run.model, module)
        others = {"ControlNet": run.resources.controls, "image prompt": run.resources.adapters}
        for name, patchers in others.items():
            for number, patcher in enumerate(patchers, start=1):
                found = weight_digests(patcher, patcher.module)
                weights |= {f"{name} {number} {each}".rstrip(): digest for each, digest in found.items()}
        told: list[tuple[str, dict[str, str]]] = group.tell((request, weights))
        expect_equal(self._gang, [request for request, _ in told], [weights for _, weights in told])

    def _should_stop(self) -> bool:
        self._hooks.should_stop()  # it loads ahead, too
        return self._stops

    def _after_step(self, done: int, steps: int) -> None:
        """Agree on what was asked of any member, and on the time of a step."""
        assert self._group is not None, "steps are inside of the group"
        self._group.await_device()
        if self._peers is not None:
            self._peers.expect_same_order()
        now = time.monotonic()
        asked = float(self._hooks.should_stop()), float(self._hooks.should_pause()), now - self._begun
        stops, pauses, seconds = self._group.agree(asked).amax(0).tolist()
        self._stops, self._pauses = bool(stops), bool(pauses)
        self._longest_seconds = max(self._longest_seconds, seconds)
        self._group.allow(self._most_calls * self._longest_seconds)  # options may begin in a later step
        if self._gang.leads:
            self._hooks.on_step(done, steps)
        self._begun = time.monotonic()

    def _keep(self, states: Callable[[], Sequence[RunState]]) -> None:
        """Keep the state, and have the leader save it."""
        found = states()
        self.state = found[0]
        if self._gang.leads:
            self._hooks.checkpoint(lambda: found)
