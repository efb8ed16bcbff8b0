"""What people write into prompts, for every encoder: weights, BREAK, layers left out; and what a reading asks for."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from modelpool.pool.families.parts.text_reading import Cleaning, Padding, Pooled, Reading, cleaned, with_layers_skipped
from modelpool.pool.families.text_readings import READINGS
from modelpool.pool.models.text.chunks import CHUNK_TOKENS, split_prompt
from modelpool.pool.models.text.clip_tokenizer import BEGIN_ID, END_ID, ClipTokenizer
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.models.text.templates import whole_text
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.family_facts import TextFacts
from tests.pool.models.components.text import cases
from tests.pool.models.text.tiny_tokenizers import SENTENCES, tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def clip() -> ClipTokenizer:
    return ClipTokenizer.load()


def own(kind: str) -> TextTokenizer:
    return TextTokenizer(tiny(kind), kind)


def words(kind: str) -> int:
    return int(tiny(kind).get_vocab_size())


#: a reading of each shape: filled up, dropped, cut out of a template, several layers, all layers
WHOLE = {
    "t5": (lambda: cases.t5(words=words("t5")), READINGS["sd3"][2]),
    "umt5": (lambda: cases.umt5(words=words("t5")), READINGS["wan"][0]),
    "bert": (lambda: cases.bert(words=words("bert")), READINGS["hunyuan_dit"][0]),
    "llama3": (lambda: cases.llama(words=words("llama3")), READINGS["hidream"][3]),
    "gemma": (lambda: cases.gemma2(words=words("gemma")), READINGS["lumina2"][0]),
    "qwen": (lambda: cases.qwen2(words=words("qwen")), READINGS["qwen_image"][0]),
    "mistral": (
        lambda: cases.mistral(words=words("mistral")),
        Reading("mistral3_24b", template="[INST]{}[/INST]", least_tokens=40, most_tokens=40, pads_left=True,
                is_masked=True, layers=(1, 2)),
    ),
}  # fmt: skip


def read(kind: str, module: nn.Module, *texts: str) -> list[Tensor]:
    _, reading = WHOLE[kind]
    return [text.context_LD for text in read_texts(module, own(kind), texts, CPU, reading)]


@pytest.mark.parametrize("kind", list(WHOLE))
def test_a_weight_moves_its_tokens_from_the_empty_prompt(kind: str) -> None:
    """z = empty + (z - empty) * w for the tokens of the weighted words, whatever reads them; the others stay."""
    make, reading = WHOLE[kind]
    module = make()
    plain_text, weighted_text = "a large blue dog", "a (large:1.5) blue dog"
    (plain,) = read(kind, module, plain_text)
    (weighted,) = read(kind, module, weighted_text)
    row = whole_text(own(kind), weighted_text, reading)
    empty_row = whole_text(own(kind), "", reading)
    assert row.token_ids == whole_text(own(kind), plain_text, reading).token_ids
    assert {1.0, 1.5} == set(row.weights)
    kept = slice(reading.dropped_tokens, len(row.token_ids))
    places = torch.tensor(row.weights[kept]) == 1.5
    # the empty prompt beside it makes a batch, which kernels may round otherwise
    torch.testing.assert_close(weighted[..., ~places, :], plain[..., ~places, :], rtol=1e-5, atol=1e-5)
    empty = _states_of(kind, module, empty_row.token_ids, empty_row.mask, len(row.token_ids))
    expected = empty + (plain - empty) * 1.5
    torch.testing.assert_close(weighted[..., places, :], expected[..., places, :], rtol=1e-4, atol=1e-4)


def _states_of(kind: str, module: nn.Module, ids: tuple[int, ...], mask: tuple[bool, ...], tokens: int) -> Tensor:
    """The states of a row filled up by hand, as the reading takes them."""
    _, reading = WHOLE[kind]
    rest = tokens - len(ids)
    ids_1T = torch.tensor([[*ids, *[own(kind).pad_id] * rest]])
    told = {"attention_mask": torch.tensor([[*mask, *[False] * rest]]).long()} if reading.is_masked else {}
    with torch.no_grad():
        found = module(input_ids=ids_1T, **told, output_hidden_states=True)
    states = found.hidden_states
    if reading.every_layer:
        z = torch.stack(states[1:])[:, 0]
    elif reading.layers:
        z = torch.cat([states[layer][0] for layer in reading.layers], -1)
    else:
        z = states[-1 - reading.layers_left_out][0]
    return z[..., reading.dropped_tokens :, :]


@pytest.mark.parametrize("kind", ["t5", "qwen", "gemma", "bert"])
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_weights_change_no_token(kind: str, data: st.DataObject) -> None:
    """However a sentence is bracketed, its tokens are the tokens of the sentence, and each weighs what its word
    does."""
    chosen = data.draw(st.sampled_from(SENTENCES)).replace("(", "").split()
    first = data.draw(st.integers(0, len(chosen) - 1))
    last = data.draw(st.integers(first + 1, len(chosen)))
    weight = data.draw(st.sampled_from([0.5, 1.3]))
    before, inside, after = (" ".join(part) for part in (chosen[:first], chosen[first:last], chosen[last:]))
    text = " ".join(part for part in (before, f"({inside}:{weight})", after) if part)
    reading = Reading("t5xxl", template="Draw: {} now")
    row = whole_text(own(kind), text, reading)
    assert row.token_ids == whole_text(own(kind), " ".join(chosen), reading).token_ids
    assert set(row.weights) == {1.0, weight}
    alone = own(kind).encode(f" {inside}").ids
    assert abs(row.weights.count(weight) - len(alone)) <= 2, "the tokens at both ends may be others in a sentence"


@pytest.mark.parametrize("kind", list(WHOLE))
def test_texts_that_are_read_together_are_read_as_alone(kind: str) -> None:
    make, _ = WHOLE[kind]
    module = make()
    texts = ("a red cat", "", "a (large:0.6) dog beside a small table on the moon")
    for together, text in zip(read(kind, module, *texts), texts, strict=True):
        (alone,) = read(kind, module, text)
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=2e-5)


def test_what_only_clip_understands_is_left_out_elsewhere() -> None:
    reading = Reading("t5xxl")
    expected = whole_text(own("t5"), "a red cat", reading)
    assert whole_text(own("t5"), "a red BREAK cat embedding:style", reading) == expected


def test_a_text_that_is_too_long_says_by_how_much() -> None:
    row = whole_text(own("t5"), "cat " * 30, Reading("t5xxl", least_tokens=8, most_tokens=8))
    whole = own("t5").encode("cat " * 30).ids
    assert row.token_ids == (*whole[:7], own("t5").id_of("</s>"))
    assert row.cut == len(whole) - 7


@pytest.mark.parametrize("kept_last", [0, 3])
def test_the_end_of_a_template_does_not_count_as_text_that_is_cut_off(kept_last: int) -> None:
    """Found in a review: a text of which every token was read had a warning about the tokens behind it."""
    before, text, after = "a dog ", "cat " * 5 + "cat", " on the table"
    lengths = [len(own("t5").encode(part).ids) for part in (before + text, before + text + after, before)]
    for most in range(lengths[2] + kept_last, lengths[1] + 2):
        reading = Reading("t5xxl", template=before + "{}" + after, most_tokens=most + 1, kept_last=kept_last)
        row = whole_text(own("t5"), text, reading)
        lost = max(0, lengths[0] - most + min(kept_last, lengths[1] - lengths[0])) if most < lengths[1] else 0
        assert row.cut == lost, most


def test_break_ends_a_chunk(clip: ClipTokenizer) -> None:
    first, second = split_prompt(clip, "a red BREAK cat")
    assert first.token_ids == (BEGIN_ID, *clip.encode("a red"), *(END_ID,) * 74)
    assert second.token_ids == (BEGIN_ID, *clip.encode("cat"), *(END_ID,) * 75)
    assert split_prompt(clip, "a (red BREAK cat:1.2)")[1].weights[1] == 1.2


@pytest.mark.parametrize("text", ["BREAK a cat", "a cat BREAK", "a cat BREAK BREAK", " BREAK BREAK a TEABREAK cat"])
def test_break_makes_no_empty_chunk(clip: ClipTokenizer, text: str) -> None:
    (chunk,) = split_prompt(clip, text)
    words = [word for word in text.split() if word != "BREAK"]
    assert chunk.token_ids[1 : chunk.tokens - 1] == tuple(clip.encode(" ".join(words)))


def test_break_alone_is_an_empty_prompt(clip: ClipTokenizer) -> None:
    assert split_prompt(clip, "BREAK") == split_prompt(clip, "")


@pytest.mark.parametrize("facts", [TextFacts(), TextFacts(1, final_norm=False), READINGS["sd3"][0]])
def test_clip_skip_reads_the_state_some_layers_before(clip: ClipTokenizer, facts: TextFacts | Reading) -> None:
    module = cases.clip(4, projection=16)
    skipped = with_layers_skipped(facts, 2)
    (mine,) = read_texts(module, clip, ("a cat",), CPU, skipped)
    (chunk,) = split_prompt(clip, "a cat")
    with torch.no_grad():
        states = module(input_ids=torch.tensor([chunk.token_ids]), output_hidden_states=True).hidden_states
        z = states[-1 - 2 - facts.layers_left_out]
        expected = module.text_model.final_layer_norm(z) if facts.final_norm else z
    torch.testing.assert_close(mine.context_LD, expected[0], rtol=1e-5, atol=1e-6)


def test_more_layers_than_there_are_cannot_be_skipped(clip: ClipTokenizer) -> None:
    with pytest.raises(UnusableField, match="skipped layers: found 5, expected fewer than the 4 layers of the encoder"):
        read_texts(cases.clip(4), clip, ("a cat",), CPU, with_layers_skipped(TextFacts(1), 4))
    with pytest.raises(UnusableField, match="clip skip: found -1"):
        with_layers_skipped(TextFacts(), -1)
    t5 = READINGS["flux"][1]
    assert with_layers_skipped(t5, 3) is t5


def test_a_file_without_the_last_layer_leaves_out_one_less(clip: ClipTokenizer) -> None:
    """CLIP-H has 24 layers; files for transformers have the 23 that Stable Diffusion 2 reads."""
    (reading,) = READINGS["sd2"]
    module = cases.clip(24, act="gelu")
    (expected,) = read_texts(module, clip, ("a cat",), CPU, reading)
    del module.encoder.layers[23]
    module.config.num_hidden_layers = 23
    (mine,) = read_texts(module, clip, ("a cat",), CPU, reading)
    torch.testing.assert_close(mine.context_LD, expected.context_LD, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("reading", "ran"),
    [
        (Reading("mistral3_24b", layers=(1, 2)), 3),
        (Reading("llama3_8b", layers_left_out=2, final_norm=False), 5),
        (Reading("qwen25_7b"), 6),
        (Reading("llama3_8b", every_layer=True), 6),
    ],
)
def test_layers_behind_the_deepest_that_is_read_do_not_run(reading: Reading, ran: int) -> None:
    """Flux 2 reads the thirtieth of Mistral's forty. One more runs: the last that runs leaves a normed state."""
    module = cases.mistral(words=words("mistral"), layers=6)
    calls: list[int] = []
    for i, layer in enumerate(module.layers):
        layer.register_forward_hook(lambda *_, i=i: calls.append(i))
    (text,) = read_texts(module, own("mistral"), ("a red cat",), CPU, reading)
    assert calls == list(range(ran))
    assert module.config.num_hidden_layers == 6
    with torch.no_grad():
        row = whole_text(own("mistral"), "a red cat", reading)
        states = module(input_ids=torch.tensor([row.token_ids]), output_hidden_states=True).hidden_states
    if reading.layers:
        expected = torch.cat([states[1], states[2]], -1)[0]
    elif reading.every_layer:
        expected = torch.stack(states[1:])[:, 0]
    else:
        expected = states[-1 - reading.layers_left_out][0]
    assert torch.equal(text.context_LD, expected)


@pytest.mark.parametrize(("pooled", "width"), [(Pooled.NONE, None), (Pooled.PLAIN, 32), (Pooled.PROJECTED, 16)])
def test_the_vector_is_the_one_that_is_asked_for(clip: ClipTokenizer, pooled: Pooled, width: int | None) -> None:
    (text,) = read_texts(cases.clip(projection=16), clip, ("a cat",), CPU, Reading("clip_l", pooled=pooled))
    assert (None if text.pooled_V is None else text.pooled_V.shape[0]) == width
    (plain,) = read_texts(cases.clip(), clip, ("a cat",), CPU, Reading("clip_l", pooled=Pooled.PROJECTED))
    assert plain.pooled_V is not None
    assert plain.pooled_V.shape == (32,), "a file without a projection: as if it changed nothing"


def test_longer_chunks_are_read_where_the_encoder_has_places_for_them(clip: ClipTokenizer) -> None:
    reading = READINGS["hidream"][0]
    (text,) = read_texts(cases.clip(projection=16), clip, ("a cat",), CPU, reading)
    assert text.context_LD.shape[0] == CHUNK_TOKENS
    assert reading.chunk_tokens > CHUNK_TOKENS


def test_prompts_are_cleaned_as_their_families_want_them() -> None:
    assert cleaned("  A Red CAT ", Cleaning.LOWERED) == "a red cat"
    assert cleaned(" a &amp;amp; b \n\t c ", Cleaning.UNESCAPED) == "a & b c"
    assert cleaned(" A ", Cleaning.NONE) == " A "


@given(text=st.text("a\n'\"\u2018\u2019\u201c\u201d", max_size=30))
def test_what_stands_in_quotation_marks_is_what_the_authors_patterns_find(text: str) -> None:
    """HunyuanImage's and HunyuanVideo's, which look from each mark that opens to the end of the line."""
    patterns = (r"'(.*?)'", r'"(.*?)"', "\u2018(.*?)\u2019", "\u201c(.*?)\u201d")
    found = [part for pattern in patterns for part in re.findall(pattern, text)]
    assert cleaned(text, Cleaning.QUOTED) == "".join(f'Text "{part}". ' for part in found)
    once = dict.fromkeys(one or other for one, other in re.findall(f"{patterns[1]}|{patterns[3]}", text))
    assert cleaned(text, Cleaning.QUOTED_ONCE) == "".join(f'Text "{part}". ' for part in once)


@pytest.mark.parametrize("cleaning", [Cleaning.QUOTED, Cleaning.QUOTED_ONCE])
def test_marks_that_open_and_never_close_are_looked_at_once(cleaning: Cleaning) -> None:
    """Were each of them looked at to the end of the text, this would take hours."""
    assert cleaned("\u201c" * 1_000_000 + "\n\u201cOPEN\u201d", cleaning) == 'Text "OPEN". '


def rows_run(module: nn.Module) -> list[int]:
    """How many rows each pass of `module` reads, as they come."""
    seen: list[int] = []
    module.register_forward_hook(lambda _, __, given, ___: seen.append(given["input_ids"].shape[0]), with_kwargs=True)
    return seen


@pytest.mark.parametrize("reading", [READINGS["flux"][0], READINGS["hunyuan_video"][0], *READINGS["hidream"][:2]])
def test_of_a_clip_that_tells_its_vector_alone_one_chunk_is_run(clip: ClipTokenizer, reading: Reading) -> None:
    long = f"{SENTENCES[0]} " * 30 + "(far:1.4)"
    module = cases.clip(projection=16)
    (whole,) = read_texts(module, clip, (long,), CPU, replace(reading, reads_states=True))
    seen = rows_run(module.text_model if reading.pooled is Pooled.PLAIN else module)
    (text,) = read_texts(module, clip, (long,), CPU, reading)
    assert seen == [1]
    assert text.pooled_V is not None
    assert whole.pooled_V is not None
    torch.testing.assert_close(text.pooled_V, whole.pooled_V, rtol=1e-5, atol=1e-6)
    assert whole.context_LD.shape[0] > text.context_LD.shape[0] == CHUNK_TOKENS


def test_a_weight_moves_a_negative_from_the_empty_prompt_in_its_own_words() -> None:
    """Lumina 2 puts the system prompt before what an image is to show alone. Read together, each is read as alone."""
    make, reading = WHOLE["gemma"]
    module, tokenizer = make(), own("gemma")
    assert reading.negative_template != reading.template
    weighted_text, plain_text = "a (large:1.5) dog", "a large dog"
    together = read_texts(
        module, tokenizer, (weighted_text,) * 2 + ("a cat",), CPU, reading, negative=(True, False, True)
    )
    for mine, is_negative in zip(together, (True, False), strict=False):
        plain, empty = (
            read_texts(module, tokenizer, (text,), CPU, reading, negative=(is_negative,))[0].context_LD
            for text in (plain_text, "")
        )
        row = whole_text(tokenizer, weighted_text, reading, is_negative=is_negative)
        weights_L1 = torch.tensor(row.weights)[:, None]
        expected = empty + (plain - empty) * weights_L1
        torch.testing.assert_close(mine.context_LD, expected, rtol=1e-4, atol=1e-4)
        (alone,) = read_texts(module, tokenizer, (weighted_text,), CPU, reading, negative=(is_negative,))
        torch.testing.assert_close(mine.context_LD, alone.context_LD, rtol=1e-4, atol=1e-5)
    (unweighted,) = read_texts(module, tokenizer, ("a cat",), CPU, reading, negative=(True,))
    torch.testing.assert_close(together[2].context_LD, unweighted.context_LD, rtol=1e-4, atol=1e-5)


def test_what_fills_up_is_dropped_or_zero() -> None:
    module = cases.t5(words=words("t5"))
    (kept,) = read_texts(module, own("t5"), ("a cat",), CPU, Reading("t5xxl", least_tokens=20, is_masked=True))
    tokens = len(own("t5").encode("a cat").ids) + 1
    for padding in (Padding.ZEROED, Padding.DROPPED):
        reading = Reading("t5xxl", least_tokens=20, is_masked=True, padding=padding)
        (text,) = read_texts(module, own("t5"), ("a cat",), CPU, reading)
        assert torch.equal(text.context_LD[:tokens], kept.context_LD[:tokens])
        assert text.context_LD.shape[0] == (20 if padding is Padding.ZEROED else tokens)
        assert not text.context_LD[tokens:].any()
    assert kept.context_LD[tokens:].any()
