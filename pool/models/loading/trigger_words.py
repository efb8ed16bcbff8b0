"""Reads the words that select what a LoRA was trained on from the metadata of its file. Torch-free.

Sources: `modelspec.trigger_phrase` of Stability's metadata standard, which authors write, and `ss_tag_frequency` of
kohya's trainer, which counts the tags of the training captions by folder.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

TRIGGER_KEY, TAGS_KEY = "modelspec.trigger_phrase", "ss_tag_frequency"
#: words reported for a file, and characters of each
MOST_WORDS, MOST_CHARACTERS = 5, 80
#: a tag is a trigger word if it is in at least this share of the captions of its folder with the most frequent tag
_SHARE = 0.9


def trigger_words(metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the trigger words in the metadata of a LoRA, the most important first; those that the author wrote, else
    the tags of nearly all training captions. Empty if the metadata have none, or are damaged."""
    written = metadata.get(TRIGGER_KEY, "").strip()
    words = [part.strip() for part in written.split(",")] if written else _frequent_tags(metadata.get(TAGS_KEY, ""))
    return tuple(dict.fromkeys(word[:MOST_CHARACTERS] for word in words if word))[:MOST_WORDS]


def _frequent_tags(text: str) -> list[str]:
    """Return the tags that are in nearly all captions of a folder, the most frequent first."""
    try:
        folders = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return []
    counts: Counter[str] = Counter()
    for tags in folders.values() if isinstance(folders, dict) else ():
        numbers = {tag.strip(): n for tag, n in tags.items() if type(n) is int} if isinstance(tags, dict) else {}
        most = max(numbers.values(), default=0)
        counts.update({tag: n for tag, n in numbers.items() if n >= _SHARE * most > 0})
    return [tag for tag, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0]))]
