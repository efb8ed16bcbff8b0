"""Language models in GGUF files equal transformers': from llama.cpp's names, order of rows and norms, whatever they are
stored as, the module is the one that the file was made from, and what transformers makes of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from modelpool.pool.files.formats.gguf_header import read_gguf_header
from modelpool.pool.files.formats.safetensors_writer import write_safetensors
from modelpool.pool.models.components.text.build_text_encoder import facts_named, plan_text_encoder
from modelpool.pool.models.loading.recognition_input import recognise_file
from modelpool.pool.values.core.errors import UnknownArchitecture, UserError
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.ops.packed import PackedWeight, stored_bytes
from modelpool.pool.weights.quant.gguf_codec import CHUNK_SCRATCH_BYTES
from modelpool.pool.weights.quant.mapped_file import MappedFile, find_non_finite
from modelpool.pool.weights.quant.tensor_bytes import cast_tensor, copied_tensor
from tests.nearly import assert_nearly
from tests.pool.files.formats.gguf_files import rounded, write_gguf
from tests.pool.models.components.text import cases
from tests.pool.models.components.text.gguf_encoders import ARCHITECTURES, PUBLISHED, in_turns, published, written
from tests.pool.models.components.text.test_build import states

ENCODER = pytest.mark.parametrize("name", ARCHITECTURES)
KIND = pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "F32"])
QUERIES, KEYS = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"


def module_of(name: str) -> Any:
    return cases.CASES[name].module()


def stands_for(name: str, kind: str) -> Any:
    """The module with the values that a file of `kind` has."""
    module = module_of(name)
    state = rounded(module.state_dict(), kind)
    if ARCHITECTURES[name].startswith("gemma"):
        state |= {key: (value + 1) - 1 for key, value in state.items() if key.endswith("norm.weight")}
    module.load_state_dict(state)
    return module


def built(path: Path, name: str) -> nn.Module:
    mapped = MappedFile.open(path)
    return plan_text_encoder(mapped.header.shapes, facts=facts_named(name)).build(mapped.tensors())


def values(weight: Tensor) -> Tensor:
    return weight.unpack(torch.float32) if isinstance(weight, PackedWeight) else weight.float()


@ENCODER
@KIND
def test_it_says_what_the_module_says_that_the_file_was_made_from(name: str, kind: str, tmp_path: Path) -> None:
    path = written(tmp_path / "text.gguf", module_of(name), ARCHITECTURES[name], kind)
    ours, theirs = built(path, name), stands_for(name, kind)
    packed = [weight for weight in ours.state_dict().values() if isinstance(weight, PackedWeight)]
    assert bool(packed) is kind.startswith("Q")
    swap_to_casting(ours)
    with compute(torch.device("cpu"), torch.float32):
        found = states(ours, name)
    for mine, expected in zip(found, states(theirs, name), strict=True):
        assert_nearly(mine, expected)


@pytest.mark.parametrize(("name", "architecture"), [*ARCHITECTURES.items(), ("mistral3_24b", "mistral3")])
def test_its_weights_are_those_that_transformers_reads_from_the_file(
    name: str, architecture: str, tmp_path: Path
) -> None:
    """Files of Mistral say that they are Llama, or newer ones that they are Mistral 3, which transformers does not know
    (nor, with this version of `gguf`, Mistral at all): there it is the file of the same weights as Llama's."""
    written(tmp_path / "theirs.gguf", module_of(name), ARCHITECTURES[name])
    path = written(tmp_path / "ours.gguf", module_of(name), architecture)
    theirs = transformers.AutoModel.from_pretrained(tmp_path, gguf_file="theirs.gguf").state_dict()
    ours = built(path, name).state_dict()
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        assert torch.equal(values(weight), theirs[key].float()), key


def test_what_the_converter_of_these_tests_does_is_what_llama_cpp_does() -> None:
    """The formula of its converter for a head of four rows, by hand."""
    rows = torch.arange(8.0).reshape(8, 1)
    assert in_turns(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@KIND
def test_rows_of_whole_heads_stay_packed_views(kind: str, tmp_path: Path) -> None:
    module = module_of("llama3_8b")
    mapped = MappedFile.open(written(tmp_path / "text.gguf", module, "llama", kind))
    weight = mapped.tensor(QUERIES)
    expected = rounded(module.state_dict(), kind)[QUERIES.removeprefix("model.")]
    head = module.config.head_dim
    assert torch.equal(values(weight), expected)
    assert torch.equal(values(weight[head : 3 * head]), expected[head : 3 * head])
    some = weight[3:5]
    assert not isinstance(some, PackedWeight)
    assert torch.equal(some, expected[3:5].to(some.dtype))
    if isinstance(weight, PackedWeight):
        rows = weight[head : 3 * head]
        assert isinstance(rows, PackedWeight)
        storage = mapped.raw(QUERIES).untyped_storage().data_ptr()
        assert rows.parts["weight"].untyped_storage().data_ptr() == storage
        assert stored_bytes(rows) * 2 == stored_bytes(weight)
        in_order = mapped.tensor(KEYS.replace("k_proj", "v_proj"))
        assert isinstance(in_order, PackedWeight)
        more = weight.scratch_bytes(torch.float32) - CHUNK_SCRATCH_BYTES * weight.numel()
        assert more == stored_bytes(weight), "its codes are put in order meanwhile"
        assert in_order.scratch_bytes(torch.float32) == CHUNK_SCRATCH_BYTES * in_order.numel()
        assert torch.equal(weight.rows_for(torch.tensor([5, 0]), torch.float32), expected[[5, 0]])


@KIND
def test_it_is_saved_as_transformers_has_it(kind: str, tmp_path: Path) -> None:
    """Whatever is written of such a file has the rows in order and the norms as they are, unconverted too."""
    for name in ("llama3_8b", "gemma2_2b"):
        path = written(tmp_path / f"{name}.gguf", module_of(name), ARCHITECTURES[name], kind)
        mapped, expected = MappedFile.open(path), stands_for(name, kind).state_dict()
        plain = [key for key in mapped.header.tensors if not isinstance(mapped.tensor(key), PackedWeight)]
        assert any(not mapped.header.tensors[key].is_as_stored for key in plain) or name == "llama3_8b"
        for number, write in enumerate((copied_tensor, lambda m, key: cast_tensor(m, key, torch.float32))):
            place = tmp_path / f"{name}-{number}.safetensors"
            write_safetensors(place, [write(mapped, key) for key in plain], {})
            for key, saved in load_file(place).items():
                assert torch.equal(saved.float(), expected[key.removeprefix("model.")]), key


def test_a_tied_or_missing_head_and_stretched_positions_are_no_weights(tmp_path: Path) -> None:
    module, more = module_of("llama3_8b"), {"rope_freqs.weight": torch.ones(4), "output.weight": torch.ones(120, 32)}
    path = written(tmp_path / "text.gguf", module, "llama", more=more)
    found = MappedFile.open(path)
    assert "lm_head.weight" in found.header.tensors
    assert not any("rope" in name for name in found.header.tensors)
    without = built(written(tmp_path / "tied.gguf", module, "llama"), "llama3_8b")
    with_head = built(path, "llama3_8b")
    assert all(torch.equal(values(x), values(with_head.state_dict()[key])) for key, x in without.state_dict().items())
    assert find_non_finite(found) == ()


def test_a_split_file_says_in_its_first_part_how_rows_are_ordered(tmp_path: Path) -> None:
    module = module_of("mistral3_24b")
    written(tmp_path / "text.gguf", module, "llama", part_tensors=7)
    [first] = tmp_path.glob("text-00001-of-*.gguf")
    whole = built(written(tmp_path / "whole.gguf", module, "llama"), "mistral3_24b").state_dict()
    for key, weight in built(first, "mistral3_24b").state_dict().items():
        assert torch.equal(values(weight), values(whole[key])), key


@pytest.mark.parametrize("said", [None, 3, 0, "two", [4, 4]])
@pytest.mark.parametrize("key", ["head_count", "head_count_kv"])
def test_without_a_number_of_heads_that_fits_it_is_refused(key: str, said: Any, tmp_path: Path) -> None:
    """One that is no number, or of which the rows are no multiple; no order of rows is guessed."""
    module = module_of("llama3_8b")
    path = written(tmp_path / "text.gguf", module, "llama", entries={f"llama.attention.{key}": said})
    which = "attn_q" if key == "head_count" else "attn_k"
    with pytest.raises(UnknownArchitecture, match=rf"text\.gguf: tensor .*{which}.*rows and llama\.attention\.{key} "):
        read_gguf_header(str(path))
    told = recognise_problem(path)
    assert "expected a number of heads with two halves each" in told


def recognise_problem(path: Path) -> str:
    try:
        recognise_file(path)
    except UserError as error:
        return str(error)
    return ""


def test_a_norm_in_blocks_is_refused(tmp_path: Path) -> None:
    path = written(
        tmp_path / "text.gguf", module_of("gemma2_2b"), "gemma2", more={"blk.9.attn_norm.weight": torch.ones(2, 32)}
    )
    with pytest.raises(UnknownArchitecture, match="found a norm as Q8_0, expected plain numbers"):
        read_gguf_header(str(path))


@pytest.mark.parametrize("architecture", ["gemma2", "llama"])
def test_a_file_with_the_names_of_transformers_has_its_values(architecture: str, tmp_path: Path) -> None:
    """What llama.cpp changes it changes with the names: a file that another tool wrote is read as it is."""
    tensors = {"model.norm.weight": torch.arange(8.0), QUERIES: torch.arange(64.0).reshape(8, 8)}
    write_gguf(tmp_path / "a.gguf", tensors, "F32", architecture, entries={f"{architecture}.attention.head_count": 2})
    found = MappedFile.open(tmp_path / "a.gguf")
    assert all(torch.equal(found.tensor(key), value) for key, value in tensors.items())


@ENCODER
def test_published_sizes_are_recognised(name: str, tmp_path: Path) -> None:
    path = published(tmp_path / "text.gguf", name)
    [found] = recognise_file(path).components
    assert found.name == name
    module = plan_text_encoder(read_gguf_header(str(path)).shapes).empty()
    config: Any = module.config
    assert (config.num_attention_heads, config.num_key_value_heads) == PUBLISHED[name][5]
