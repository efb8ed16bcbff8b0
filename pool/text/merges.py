"""The ways in which two tokens of a vocabulary make a third, in bounded time and memory. Torch-free.

Vocabularies of SentencePiece and of tekken do not list them, `tokenizers` wants them listed. Does not know their order.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

#: of one token; the longest of real vocabularies are runs of some hundred spaces
LONGEST_TOKEN = 1 << 10
#: of a vocabulary; Gemma's has 580,000
MOST_WAYS = 1 << 20
#: squares of the tokens' lengths together, which is what looking takes; Gemma's have about 18 million
MOST_WORK = 1 << 27


def ways_to_make(tokens: Iterable[str], known: Container[str]) -> Iterator[tuple[str, int]]:
    """Each of `tokens` with each place where it falls into two that are `known`.

    Raises ValueError for a token longer than real ones are, and where there is more to look at or to find than any
    real vocabulary has.
    """
    work = ways = 0
    for token in tokens:
        work += len(token) ** 2
        if len(token) > LONGEST_TOKEN or work > MOST_WORK:
            raise ValueError(f"found a token of {len(token)} signs after {work} to look at, expected a vocabulary")
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                ways += 1
                if ways > MOST_WAYS:
                    raise ValueError(f"found more than {MOST_WAYS} ways to make tokens of two, expected a vocabulary")
                yield token, cut
