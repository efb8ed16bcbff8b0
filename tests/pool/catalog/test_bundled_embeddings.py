"""Embeddings in LoRA files: with the LoRA they have their names in prompts, and change the text as files of their own
do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.models.text.embeddings import ANY, read_embedding
from modelpool.pool.values.core.errors import UnknownName
from modelpool.pool.values.core.stage_params import EncodeParams
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora
from tests.pool.pipeline import PLENTY_BYTES, Pipeline, open_engine

ROWS = torch.randn(2, 32, generator=torch.Generator().manual_seed(4))
TEXT = "a (embedding:worn:1.2) chair"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    write_tiny_checkpoint(path / "toy.safetensors", 1, metadata={"modelspec.resolution": "64x64"})
    plain = load_file(write_tiny_lora(path / "plain.safetensors", 2, text=False))
    bundled = {
        "bundle_emb.worn.clip_l": ROWS,
        "bundle_emb.worn.clip_l_out": -ROWS,
        "bundle_emb.odd.clip_l": 2 * ROWS[:1],
    }
    save_file({**plain, **bundled}, path / "onetrainer.safetensors")
    save_file({**plain, "bundle_emb.worn.string_to_param.*": ROWS}, path / "a1111.safetensors")
    return path


@pytest.fixture
def pipe(folder: Path) -> Iterator[Pipeline]:
    engine = open_engine("cpu", PLENTY_BYTES)
    yield Pipeline(engine, Catalog([folder], [folder], "cpu"), {})
    engine.close()


@pytest.mark.parametrize("lora", ["onetrainer", "a1111"])
def test_a_prompt_may_name_an_embedding_that_a_lora_bundles(pipe: Pipeline, folder: Path, lora: str) -> None:
    catalog = pipe.catalog
    with pytest.raises(UnknownName, match="worn"):
        catalog.embeddings.of(TEXT)
    ref = catalog.find_lora(lora, 1.0)
    assert catalog.lora_warning(pipe.model, ref) is None, "an embedding is no key that is not used"
    (found,) = catalog.embeddings.of(TEXT, (ref,))
    assert (found.name, found.rows, found.path) == ("worn", 2, ref.path)
    own = folder / f"{lora} alone.pt.safetensors"
    save_file({"emb_params": ROWS}, own)
    alone = replace(found, path=str(own), sha256="alone")
    bundled, expected, without = (
        pipe.run(EncodeParams(pipe.model, (), text, embeddings=named)).context_LD
        for text, named in ((TEXT, (found,)), (TEXT, (alone,)), ("a worn chair", ()))
    )
    own.unlink()
    assert np.array_equal(bundled, expected)
    assert not np.array_equal(bundled, without)


def test_a_lora_with_embeddings_alone_in_use_is_not_said_to_change_nothing(pipe: Pipeline) -> None:
    """Found in a review: at 0 on all its patches, its embedding changed the text, and the warning said nothing did."""
    ref = replace(pipe.catalog.find_lora("onetrainer", 0.0), text_strength=1.0)
    assert ref.has_effect
    assert pipe.catalog.embeddings.of(TEXT, (ref,))
    told = "none of its patches acts: all are for the diffusion model, and its strength on them is 0"
    assert pipe.catalog.lora_warning(pipe.model, ref) == told


def test_each_of_several_embeddings_of_a_file_is_read_by_its_name(folder: Path) -> None:
    assert read_embedding(folder / "onetrainer.safetensors", "odd").vectors["clip_l"].shape == (1, 32)
    assert torch.equal(read_embedding(folder / "a1111.safetensors", "worn").vectors[ANY], ROWS)
