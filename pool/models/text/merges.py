"""Finds the BPE merges of a vocabulary that does not list them, in bounded time and memory. Torch-free.

Vocabularies of SentencePiece and tekken have no merges, which `tokenizers` requires. Does not order them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from modelpool.pool.values.core.errors import counted

#: characters of a token; the longest of real vocabularies are runs of some hundred spaces
MAX_TOKEN_LENGTH = 1 << 10
#: merges of a vocabulary; Gemma's has 580,000
MAX_MERGES = 1 << 20
#: sum of squared token lengths, the cost of the search; Gemma's is about 18 million
MAX_SEARCH_COST = 1 << 27


def find_merges(tokens: Iterable[str], known: Container[str]) -> Iterator[tuple[str, int]]:
    """Yield each of `tokens` with each position that splits it into two `known` tokens.

    Raises ValueError for a token longer than in real vocabularies, and for more work or more merges than any real
    vocabulary has.
    """
    work = count = 0
    for token in tokens:
        work += len(token) ** 2
        if len(token) > MAX_TOKEN_LENGTH or work > MAX_SEARCH_COST:
            raise ValueError(
                f"found a token of {counted(len(token), 'character')}, "
                f"at a search cost of {work}, expected a vocabulary"
            )
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                count += 1
                if count > MAX_MERGES:
                    raise ValueError(f"found more than {MAX_MERGES} merges, expected a vocabulary")
                yield token, cut
