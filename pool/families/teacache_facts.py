"""TeaCache facts of all families: the polynomial of the relative change, and thresholds. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.parts.teacache import TeaCacheFacts

#: by the name of a family; of several for one size, the first with enough pixels counts
TEACACHE_FACTS: Mapping[str, tuple[TeaCacheFacts, ...]] = MappingProxyType(
    {family.name: family.options.teacache for family in defined_families() if family.options.teacache}
)


def teacache_facts(row: str, blocks: int) -> tuple[TeaCacheFacts, ...]:
    """Return what was published for a model of the row `row` with so many blocks, by rising pixels; empty for none."""
    return tuple(facts for facts in TEACACHE_FACTS.get(row, ()) if facts.blocks in (0, blocks))
