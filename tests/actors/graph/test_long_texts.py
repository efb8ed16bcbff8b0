"""Warnings about texts that are longer than a text encoder reads, counted in tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.values.core.prompt_tokens import Tokens
from modelpool.pool.values.core.stage_params import EncodeParams
from modelpool.pool.values.specs.spec import JobId
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.models.loading.layouts import tiny_sd1
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

NOT_READ = "at its end are not read by a text encoder of model 'tiny': it is too long"


def _warnings(catalog: Catalog, **fields: str) -> tuple[str, ...]:
    request = GenerateRequest(**{"model": "tiny", "prompt": "a cat", "seed": 1, "steps": 1, **fields})
    return build_graph(request, JobId("job"), catalog)[1].warnings


@pytest.mark.parametrize(("family", "most"), [("chroma", 512), ("auraflow", 256)])
def test_tokens_behind_the_limit_of_a_text_encoder_are_counted(tmp_path: Path, family: str, most: int) -> None:
    """Found in a review: two prompts that differ behind the limit made one image, and nobody was told."""
    tiny = TinyFamilyModel(tmp_path, FAMILIES[family])
    catalog, long = tiny.catalog, "red " * 5000
    tiny.close()
    assert _warnings(catalog) == _warnings(catalog, negative="a dog") == ()
    (tokens,) = catalog.tokenize(EncodeParams(tiny.model, (), long)).tokens
    assert isinstance(tokens, Tokens)
    cut = len(tokens.ids) + 1 - most  # with the token that ends a text
    assert _warnings(catalog, prompt=long) == (f"prompt: {cut} tokens {NOT_READ}",)
    assert _warnings(catalog, negative=long) == (f"negative: {cut} tokens {NOT_READ}",)


def test_a_text_that_fits_without_the_end_of_its_template_has_no_warning(tmp_path: Path) -> None:
    """Found in a review: the template of Z-Image ends behind the text, with tokens that are cut off first."""
    tiny = TinyFamilyModel(tmp_path, FAMILIES["z_image"])
    catalog = tiny.catalog
    tiny.close()
    tokens = len(catalog.tokenize(EncodeParams(tiny.model, (), "a")).tokens[0].ids)
    whole, with_one_more = 1 + 512 - tokens, 1 + 512 - tokens + 5 + 1  # five tokens are behind the text
    assert _warnings(catalog, prompt=" ".join("a" * whole)) == ()
    assert _warnings(catalog, prompt=" ".join("a" * (with_one_more - 1))) == ()
    assert _warnings(catalog, prompt=" ".join("a" * with_one_more)) == (
        "prompt: 1 token at its end is not read by a text encoder of model 'tiny': it is too long",
    )


def test_a_text_that_another_encoder_reads_is_not_said_to_be_lost(tmp_path: Path) -> None:
    """Found in a review: the BERT of Hunyuan-DiT reads 77 tokens and its T5 256, but the text was said to be unread."""
    tiny = TinyFamilyModel(tmp_path, FAMILIES["hunyuan_dit"])
    catalog = tiny.catalog
    tiny.close()
    assert _warnings(catalog, prompt="red " * 20) == ()
    (told,) = _warnings(catalog, prompt="a " * 80)
    assert told.endswith(f"tokens {NOT_READ}"), "of one encoder: it says nothing about the other one"


def test_clip_reads_all_chunks_of_a_text(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tiny.safetensors", layout=tiny_sd1())
    assert _warnings(Catalog((tmp_path,), (), "cpu"), prompt="red " * 5000) == ()
