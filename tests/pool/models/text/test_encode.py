"""A conditioning is what the text model says of each chunk; weights move tokens from the empty prompt and back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.text.chunks import split_prompt
from modelpool.pool.models.text.clip_tokenizer import END_ID, ClipTokenizer
from modelpool.pool.models.text.encode import _filled_up, match_lengths, matched_length, read_texts
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

CPU = torch.device("cpu")
LONG = "a small red cat beside a large blue dog " * 12


@pytest.fixture(scope="module")
def tokenizer() -> ClipTokenizer:
    return ClipTokenizer.load()


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    path = tmp_path_factory.mktemp("tiny") / "tiny.safetensors"
    return open_checkpoint(write_tiny_checkpoint(path, dtype=torch.float32)).build(Role.TEXT_ENCODER).module


def by_hand(text_model: nn.Module, tokenizer: ClipTokenizer, text: str) -> Tensor:
    """Chunk by chunk, without weights."""
    chunks = split_prompt(tokenizer, text)
    with torch.no_grad():
        states = [text_model(input_ids=torch.tensor([chunk.token_ids])).last_hidden_state[0] for chunk in chunks]
    return torch.cat(states)


def encoded(text_model: nn.Module, tokenizer: ClipTokenizer, text: str) -> Tensor:
    return read_texts(text_model, tokenizer, (text,), CPU)[0].context_LD


@pytest.mark.parametrize("text", ["", "a cat", LONG])
def test_a_plain_prompt_is_its_chunks_last_hidden_states(
    text_model: nn.Module, tokenizer: ClipTokenizer, text: str
) -> None:
    context = encoded(text_model, tokenizer, text)
    expected = by_hand(text_model, tokenizer, text)
    assert context.dtype == torch.float32
    assert context.shape == expected.shape
    assert context.shape[0] % 77 == 0
    torch.testing.assert_close(context, expected, rtol=1e-5, atol=1e-5)


def test_the_encoding_is_after_the_final_norm(text_model: nn.Module, tokenizer: ClipTokenizer) -> None:
    """Normed states, scaled and shifted by the norm's own weights, have mean 0 and deviation 1 when that is undone."""
    norm = text_model.final_layer_norm
    plain = (encoded(text_model, tokenizer, "a cat") - norm.bias) / norm.weight
    torch.testing.assert_close(plain.mean(1), torch.zeros(77), rtol=0, atol=1e-4)
    torch.testing.assert_close(plain.std(1, unbiased=False), torch.ones(77), rtol=0, atol=1e-2)


@settings(max_examples=25, deadline=None)
@given(text=st.text(st.characters(exclude_characters="\\()"), max_size=80))
def test_a_weight_of_one_changes_nothing_at_all(text_model: nn.Module, tokenizer: ClipTokenizer, text: str) -> None:
    weighted = encoded(text_model, tokenizer, f"x {text} y (z:1.0)")
    assert torch.equal(weighted, encoded(text_model, tokenizer, f"x {text} y z"))


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.4, -1.0])
def test_a_weight_moves_its_tokens_between_the_empty_prompt_and_the_plain_one(
    text_model: nn.Module, tokenizer: ClipTokenizer, weight: float
) -> None:
    """z = empty + (z - empty) * w for the weighted tokens; the others stay as they are."""
    plain, empty = (by_hand(text_model, tokenizer, text) for text in ("a red cat", ""))
    context = encoded(text_model, tokenizer, f"a (red:{weight}) cat")
    place = 2  # begin, a, red
    expected = plain.clone()
    expected[place] = empty[place] + (plain[place] - empty[place]) * weight
    torch.testing.assert_close(context, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(context[place], plain[place], atol=1e-2)


def test_weights_in_a_later_chunk_move_from_the_empty_chunk_in_its_place(
    text_model: nn.Module, tokenizer: ClipTokenizer
) -> None:
    text = "cat " * 75 + "dog"
    plain, empty = (by_hand(text_model, tokenizer, t) for t in (text, ""))
    context = encoded(text_model, tokenizer, "cat " * 75 + "(dog:0)")
    expected = plain.clone()
    expected[77 + 1] = empty[1]
    torch.testing.assert_close(context, expected, rtol=1e-5, atol=1e-5)


def test_half_precision_weights_encode_as_their_float32_values(tmp_path: Path, tokenizer: ClipTokenizer) -> None:
    """A casting module in a compute context gives bit for bit what the same numbers stored as float32 give."""
    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path / "half.safetensors"))
    stored, wide = (checkpoint.build(Role.TEXT_ENCODER).module for _ in range(2))
    wide.float()
    expected = encoded(wide, tokenizer, "a (red:1.3) cat")
    swap_to_casting(stored)
    with compute(CPU, torch.float32):
        context = encoded(stored, tokenizer, "a (red:1.3) cat")
    assert torch.equal(context, expected)
    assert {p.dtype for p in stored.parameters()} == {torch.float16}


@given(a=st.integers(1, 4), b=st.integers(1, 4))
def test_matched_lengths_repeat_both_as_a_whole(a: int, b: int) -> None:
    a_LD, b_LD = torch.randn(a * 77, 3), torch.randn(b * 77, 3)
    long_a_LD, long_b_LD = match_lengths(a_LD, b_LD)
    assert long_a_LD.shape == long_b_LD.shape
    for long_LD, short_LD in ((long_a_LD, a_LD), (long_b_LD, b_LD)):
        for part_LD in long_LD.split(short_LD.shape[0]):
            assert torch.equal(part_LD, short_LD)


def test_equal_lengths_stay_as_they_are() -> None:
    a_LD, b_LD = torch.randn(154, 3), torch.randn(154, 3)
    long_a_LD, long_b_LD = match_lengths(a_LD, b_LD)
    assert torch.equal(long_a_LD, a_LD)
    assert torch.equal(long_b_LD, b_LD)


def test_repeating_changes_no_attention() -> None:
    """Why lengths may be matched by repeating: the weighted mean over the keys is the same."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, 9, 16, generator=generator)
    short_LD, long_LD = torch.randn(77, 16, generator=generator), torch.randn(231, 16, generator=generator)
    repeated_LD, _ = match_lengths(short_LD, long_LD)
    attention = nn.functional.scaled_dot_product_attention
    once = attention(queries, short_LD[None], short_LD[None])
    thrice = attention(queries, repeated_LD[None], repeated_LD[None])
    torch.testing.assert_close(once, thrice, rtol=1e-5, atol=1e-6)


@given(a=st.integers(1, 400), b=st.integers(1, 400))
def test_no_text_is_repeated_to_more_than_four_times_the_longer_one(a: int, b: int) -> None:
    """Beyond that the two stay as they are and run apart: 5 and 6 chunks would be 30."""
    length = matched_length(a * 77, b * 77)
    common = math.lcm(a, b) * 77
    assert length == (common if common <= 4 * 77 * max(a, b) else None)
    if max(a, b) <= 4:
        assert length == common
    if length is None:
        a_LD, b_LD = torch.zeros(a * 77, 1), torch.zeros(b * 77, 1)
        assert [t.shape for t in match_lengths(a_LD, b_LD)] == [a_LD.shape, b_LD.shape]


def test_a_text_that_spells_the_end_token_is_read_to_its_end(tokenizer: ClipTokenizer) -> None:
    """Found in review: with another token to fill up, all behind the spelling was lost."""
    (chunk,) = split_prompt(tokenizer, "a red <|endoftext|> cat")
    filled = _filled_up(chunk, 0)
    assert filled[: chunk.tokens] == chunk.token_ids[: chunk.tokens]
    assert END_ID in filled[1 : chunk.tokens - 1]
    assert set(filled[chunk.tokens :]) == {0}
