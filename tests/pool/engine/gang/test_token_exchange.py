"""The parts of a gang that need no second process: shares, layouts, plans that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.engine.gang.branch_spread import spread_over_branches
from modelpool.pool.engine.gang.gang_group import GangGroup
from modelpool.pool.engine.gang.gang_layout import GangLayout, layout_of
from modelpool.pool.engine.gang.member_digest import expect_equal
from modelpool.pool.engine.gang.sequence_split import PlanUnfit, divided_tokens
from modelpool.pool.engine.gang.token_exchange import TokenShares, shares_of
from modelpool.pool.values.core.gang_errors import GangsDiffer
from modelpool.pool.values.core.sequence_plan import Gather, SequencePlan, Split, SplitAttention
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import WorkerId
from tests.architecture.source_tree import product_modules
from tests.each_case import each_case


def gang(degree: int, rank: int = 0) -> Gang:
    return Gang("g", tuple(WorkerId(f"gpu-{place}") for place in range(degree)), rank)


class Alone(GangGroup):
    """A group of one, which exchanges nothing."""

    def __init__(self, layout: GangLayout) -> None:
        super().__init__(gang(1), layout, torch.device("cpu"))


class Block(nn.Module):
    """Attends to what it gets, and to nothing if it `skips`."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Identity()

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.attn(hidden_states)
        return out


class Model(nn.Module):
    """One block and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.out = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.blocks[0](x))
        return out


SPLIT, GATHER = Split("blocks.0", "hidden_states", 1, ("image",)), Gather("out", 1, "image")
UNFIT = {
    "no such module": (SequencePlan((Split("layers.*", "x", 1, ("image",)),), (), ()), "layers"),
    "no such input": (SequencePlan((Split("blocks.*", "rope", 1, ("image",)),), (), ()), "rope"),
    "not of these dimensions": (
        SequencePlan((Split("blocks.0", "hidden_states", 1, ("image",), dims=4),), (), ()),
        "use",
    ),
    "no attention inside": (
        SequencePlan((SPLIT,), (GATHER,), (SplitAttention("blocks.*.attn", ("image",), ("image",)),)),
        "no attention",
    ),
}


@each_case("name", UNFIT)
def test_a_plan_that_does_not_act_as_a_whole_is_an_error(name: str) -> None:
    plan, word = UNFIT[name]
    model = Model()
    with pytest.raises(PlanUnfit, match=word), divided_tokens(model, plan, Alone(GangLayout(1, 1))):
        model(torch.zeros(1, 4, 2))
    assert not model._forward_hooks
    assert not model.blocks[0]._forward_pre_hooks, "whatever raises, nothing is left behind"


def test_shares_and_layouts_have_every_token_and_every_text_once() -> None:
    for total in range(12):
        for parts in (1, 2, 3, 4, 8):
            found = shares_of(total, parts)
            assert sum(found) == total
            assert max(found) - min(found) <= 1
    assert TokenShares(2, {"text": 3, "image": 4}).together(("text", "image")) == [4, 3]
    assert [layout_of(degree, 2) for degree in (1, 2, 3, 4, 8)] == [
        GangLayout(*each) for each in ((1, 1), (2, 1), (1, 3), (2, 2), (2, 4))
    ]
    assert layout_of(4, 1) == GangLayout(1, 4)
    for degree, texts in ((2, 2), (4, 2), (8, 3), (4, 1)):
        layout = layout_of(degree, texts)
        for ranks in (layout.branch_ranks(), layout.part_ranks()):
            assert sorted(rank for each in ranks for rank in each) == list(range(degree))


def test_three_texts_on_two_groups_take_two_rounds() -> None:
    """The second group has no text in the second round, and none of a single text (a perturbed prediction), for which
    it failed."""

    class Two(GangGroup):
        def among_branches(self, own: Tensor) -> list[Tensor]:
            self.sent = [*getattr(self, "sent", []), float(own[0])]
            return [own, own + 10]

    for rank, sent in ((0, [0.0, 2.0]), (1, [1.0, 0.0])):
        group = Two(gang(2, rank), GangLayout(2, 1), torch.device("cpu"))
        calls = [lambda number=number: torch.full((1,), float(number)) for number in range(3)]  # type: ignore[misc]
        assert len(spread_over_branches(group, calls, torch.zeros(1))) == 3
        assert group.sent == sent
        assert len(spread_over_branches(group, [lambda: torch.ones(1)], torch.zeros(1))) == 1
        assert group.sent == [*sent, 1.0 - rank]


def test_the_member_that_differs_is_named() -> None:
    expect_equal(gang(3), ["a"] * 3, [{"": "w", "x": "1"}, {"": "w"}, {"": "w", "x": "1"}])
    with pytest.raises(GangsDiffer, match=r"gpu-2 \(rank 2\) was asked for another run"):
        expect_equal(gang(3), ["a", "a", "b"], [{}, {}, {}])
    with pytest.raises(GangsDiffer, match=r"gpu-0 \(rank 0\) has other patched weights .* in x"):
        expect_equal(gang(3), ["a"] * 3, [{"x": "2"}, {"x": "1"}, {"x": "1"}])


def test_only_runs_with_a_gang_import_its_code() -> None:
    """Imports at the top of a module run in every worker; imports of gangs are inside of functions. Benchmarks are
    programs of their own, which no worker imports."""
    room = "modelpool.pool.engine.gang"
    outside = [
        module
        for module in product_modules()
        if not module.name.startswith((room, "benchmarks.")) and "gang" in module.path.read_text(encoding="utf-8")
    ]
    users = {module.name for module in outside if any(name.startswith(room) for name in module.imports)}
    assert users == {"modelpool.pool.engine.engine", "modelpool.actors.worker.gang_store"}
    for module in outside:
        for node in module.tree.body:
            names = {name for name in (getattr(node, "module", None),) if name}
            assert not any(name.startswith(room) for name in names), module.name
