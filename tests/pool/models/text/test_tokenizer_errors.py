"""What the tokenizers library raises becomes the error that the caller names; errors that are nobody's fault pass."""

from __future__ import annotations

import asyncio
import json

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.models.text.tokenizer_errors import convert_errors
from modelpool.pool.values.core.errors import CorruptFile, UnusableField

#: looks at x's in ever more ways, until the library's engine of regular expressions gives up
HOSTILE = "(x+x+)+y"


def refused(said: str) -> CorruptFile:
    return CorruptFile(f"the file: {said}")


def test_a_panic_of_the_library_is_a_refusal() -> None:
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(HOSTILE), behavior="isolated")
    with pytest.raises(BaseException, match="retry-limit") as raw:
        tokenizer.encode("x" * 40)
    assert not isinstance(raw.value, Exception), "this is what would pass every handler"
    with pytest.raises(CorruptFile, match=r"the file: .*retry-limit"), convert_errors(refused):
        tokenizer.encode("x" * 40)


@pytest.mark.parametrize("error", [KeyError("rank"), OverflowError("large"), Exception("bare"), RecursionError("deep")])
def test_errors_become_refusals_that_say_what_is_wrong(error: Exception) -> None:
    with pytest.raises(CorruptFile) as raised, convert_errors(refused):
        raise error
    assert str(error) in str(raised.value)
    assert raised.value.__cause__ is error


def test_a_long_error_is_said_in_short() -> None:
    with pytest.raises(CorruptFile) as raised, convert_errors(refused):
        raise ValueError("x" * 100_000)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
        MemoryError(),
        UnusableField("own"),
    ],
)
def test_what_is_nobodys_fault_passes_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, convert_errors(refused):
        raise error
    assert raised.value is error


def test_a_prompt_that_a_tokenizer_gives_up_on_is_refused_by_name() -> None:
    tokenizer = Tokenizer(models.WordLevel({"x": 0, "</s>": 1, "<pad>": 2}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(HOSTILE), behavior="isolated")
    mine = TextTokenizer(tokenizer, "t5", "a file")
    assert mine.encode("x").ids == (0,)
    with pytest.raises(UnusableField, match=r"prompt: found 'x+\.*x+', expected a text that .* T5 .*a file: .*retry-"):
        mine.encode("x" * 5000)
    alone = Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), "pre_tokenizer": None}))
    assert TextTokenizer(alone, "t5").encode("x").ids == (0,)
