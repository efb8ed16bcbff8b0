"""How the members of a gang divide a run: texts of guidance among some, tokens among the others. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.families.gang_support import text_groups


@dataclass(frozen=True, slots=True)
class GangLayout:
    """The division of a run.

    branches  groups of members that each predict for some of the texts
    parts     members of such a group, which divide the tokens. Ranks of a group follow each other
    """

    branches: int
    parts: int

    @property
    def group_sizes(self) -> tuple[int, int]:
        """The members of each group that exchanges tensors: those that divide tokens, and those with other texts."""
        return self.parts, self.branches

    def branch_of(self, rank: int) -> int:
        """Return the group of a member."""
        return rank // self.parts

    def part_of(self, rank: int) -> int:
        """Return the place of a member in its group."""
        return rank % self.parts

    def branch_ranks(self) -> list[list[int]]:
        """Return the ranks of each group."""
        return [[branch * self.parts + part for part in range(self.parts)] for branch in range(self.branches)]

    def part_ranks(self) -> list[list[int]]:
        """Return, for each place in a group, the ranks of the members with it."""
        return [[branch * self.parts + part for branch in range(self.branches)] for part in range(self.parts)]


def layout_of(degree: int, texts: int) -> GangLayout:
    """Return how `degree` members divide a run with `texts` texts in each step: by texts first, which sends one latent
    in each step, and the members of a group by tokens."""
    branches = text_groups(texts, degree)
    return GangLayout(branches, degree // branches)
