"""LearnedToken tokens come out of every published form of file, and stand in a prompt where their names do."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.files.formats.torch_objects import BadPickle
from modelpool.pool.files.formats.torch_pickle import read_pickle
from modelpool.pool.models.text.chunks import CHUNK_TOKENS, LEARNED_ID, LearnedToken, embeddings_in, split_prompt
from modelpool.pool.models.text.clip_tokenizer import ClipTokenizer
from modelpool.pool.models.text.embeddings import Embedding, read_embedding
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.values.core.errors import AdapterMismatch, CorruptFile, UnknownName, UnsafeFile
from tests.pool.models.components.text import cases

CPU = torch.device("cpu")
ROWS = torch.arange(6 * 32, dtype=torch.float32).reshape(6, 32) / 100


@pytest.fixture(scope="module")
def tokenizer() -> ClipTokenizer:
    return ClipTokenizer.load()


def _old(rows: Tensor) -> dict[str, object]:
    return {
        "string_to_token": {"*": 265}, "string_to_param": {"*": torch.nn.Parameter(rows)}, "name": "style",
        "step": 4999, "sd_checkpoint": None, "sd_checkpoint_name": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "expected"),
    [({"emb_params": ROWS}, ROWS), ({"<cat-toy>": ROWS[0]}, ROWS[:1]), ({"*": ROWS.half()}, ROWS.half().float())],
)
def test_a_file_of_one_encoder(tmp_path: Path, file: dict[str, Tensor], expected: Tensor) -> None:
    save_file({key: x.contiguous() for key, x in file.items()}, tmp_path / "style.safetensors")
    found = read_embedding(tmp_path / "style.safetensors")
    assert found.name == "style"
    assert torch.equal(found.for_encoder("clip_l", 32), expected)


def test_a_file_of_both_encoders_of_sdxl(tmp_path: Path) -> None:
    save_file({"clip_l": ROWS, "clip_g": torch.ones(6, 80)}, tmp_path / "x.safetensors")
    found = read_embedding(tmp_path / "x.safetensors", "style")
    assert torch.equal(found.for_encoder("clip_l", 32), ROWS)
    assert found.for_encoder("clip_g", 80).shape == (6, 80)
    with pytest.raises(
        AdapterMismatch, match="embedding 'style': found vectors for clip_g, clip_l, expected vectors for"
    ):
        found.for_encoder("clip_h", 32)


def test_a_pickle_is_read_where_that_is_allowed(tmp_path: Path) -> None:
    torch.save(_old(ROWS), tmp_path / "style.pt")
    with pytest.raises(UnsafeFile):
        read_embedding(tmp_path / "style.pt")
    found = read_embedding(tmp_path / "style.pt", allow_pickle=True)
    assert torch.equal(found.for_encoder("clip_l", 32), ROWS)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "file",
    [
        {**_old(ROWS), "string_to_param": torch.nn.ParameterDict({"*": torch.nn.Parameter(ROWS)})},
        {"string_to_token": {"*": torch.tensor(265)}, "string_to_param": {"*": ROWS}},
        {"<style>": torch.nn.Parameter(ROWS)},
    ],
    ids=["table of parameters", "tokens as numbers", "diffusers"],
)
def test_the_forms_of_pickles_that_people_have(tmp_path: Path, file: dict[str, object], zipped: bool) -> None:
    """Found: the authors' own program and early web UIs keep the vectors in a `ParameterDict`, which was taken for
    code."""
    torch.save(file, tmp_path / "style.bin", _use_new_zipfile_serialization=zipped)
    found = read_embedding(tmp_path / "style.bin", allow_pickle=True)
    assert torch.equal(found.for_encoder("clip_l", 32), ROWS)


def test_a_table_of_parameters_that_is_told_much_again_and_again_is_refused(tmp_path: Path) -> None:
    """Each telling would copy all that it is told."""
    table = pickle_of_tables(values=1000, tables=1000)
    with pytest.raises(BadPickle, match="passes more than"):
        read_pickle(io.BytesIO(table), len(table))


def pickle_of_tables(values: int, tables: int) -> bytes:
    """A list of tables of parameters, all told the same state."""
    items = b"".join(b"X" + len(str(i)).to_bytes(4, "little") + str(i).encode() + b"N" for i in range(values))
    state = b"}X\x0b\x00\x00\x00_parameters}(" + items + b"usq\x01"
    one = b"ctorch.nn.modules.container\nParameterDict\n)\x81h\x01b"
    return b"\x80\x02" + state + b"0](" + one * tables + b"e."


def test_another_width_is_another_models() -> None:
    with pytest.raises(AdapterMismatch, match="found vectors of size 32, expected 1024 for clip_h"):
        Embedding("style", {"": ROWS}).for_encoder("clip_h", 1024)


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ({"a": ROWS, "b": ROWS}, "found 2 tensors"),
        ({"a": torch.zeros(2, 3, 4)}, "found .2, 3, 4. of torch.float32"),
        ({"a": torch.zeros(0, 32)}, "expected 1 to 1024 rows"),
        ({"a": torch.zeros(2, 3, dtype=torch.int32)}, "of torch.int32"),
        ({"a": torch.full((2, 3), torch.nan)}, "NaN or infinity"),
    ],
)
def test_what_is_no_embedding_is_refused(tmp_path: Path, file: dict[str, Tensor], reason: str) -> None:
    save_file({key: x.clone() for key, x in file.items()}, tmp_path / "x.safetensors")
    with pytest.raises(CorruptFile, match=reason):
        read_embedding(tmp_path / "x.safetensors")


def test_a_name_stands_for_its_rows_with_its_weight(tokenizer: ClipTokenizer) -> None:
    (chunk,) = split_prompt(tokenizer, "a (embedding:style:1.2), cat", {"style": 3})
    assert chunk.learned == tuple((2 + row, LearnedToken("style", row)) for row in range(3))
    assert chunk.token_ids[2:5] == (LEARNED_ID,) * 3
    assert chunk.weights[2:6] == (1.2, 1.2, 1.2, 1.0)
    plain = tokenizer.encode("a, cat")
    assert [i for place, i in enumerate(chunk.token_ids[1 : chunk.tokens - 1], 1) if not 2 <= place < 5] == plain


def test_rows_are_not_torn_by_the_end_of_a_chunk(tokenizer: ClipTokenizer) -> None:
    first, second = split_prompt(tokenizer, "cat " * 74 + "embedding:style", {"style": 3})
    assert not first.learned
    assert [place for place, _ in second.learned] == [1, 2, 3]
    many = split_prompt(tokenizer, "embedding:style", {"style": 100})
    assert [len(chunk.learned) for chunk in many] == [CHUNK_TOKENS - 2, 25]


def test_an_unknown_name_is_told_with_the_nearest(tokenizer: ClipTokenizer) -> None:
    with pytest.raises(UnknownName, match="unknown embedding 'stile'; did you mean 'style'"):
        split_prompt(tokenizer, "embedding:stile", {"style": 3})


def test_names_in_a_prompt_are_listed_once() -> None:
    text = "embedding:a, (embedding:b.v2:1.1) and embedding:a"
    assert embeddings_in("embedding:a, b embedding:c embedding:a") == ("a", "c")
    assert embeddings_in(text)[0] == "a"


@pytest.mark.parametrize("projection", [0, 24])
def test_its_vectors_are_read_as_tokens_that_have_them(tokenizer: ClipTokenizer, projection: int) -> None:
    """The same as a model with a table that has the vectors as tokens of its own; afterwards nothing is left of it."""
    module = cases.clip(projection=projection)
    plain = read_texts(module, tokenizer, ("a cat", "a dog"), CPU)
    read = read_texts(module, tokenizer, ("a embedding:style cat", "a dog"), CPU, embeddings={"style": ROWS[:2]})
    assert torch.equal(read_texts(module, tokenizer, ("a cat", "a dog"), CPU)[0].context_LD, plain[0].context_LD)
    table = module.get_input_embeddings()
    kept = table.weight.clone()
    learned = [tokenizer.encode("lighthouse")[0], tokenizer.encode("umbrella")[0]]
    table.weight[learned] = ROWS[:2]
    expected = read_texts(module, tokenizer, ("a lighthouse umbrella cat", "a dog"), CPU)
    table.weight[:] = kept
    for mine, theirs in zip(read, expected, strict=True):
        torch.testing.assert_close(mine.context_LD, theirs.context_LD, rtol=1e-5, atol=1e-6)
