"""Textual inversions and CLIP skip, from a request to the text that the diffusion model reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.models.text.clip_tokenizer import BEGIN_ID, END_ID, ClipTokenizer
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.values.core.errors import AdapterMismatch, UnknownName, UnsafeFile, UnusableField
from modelpool.pool.values.core.stage_params import Encoded, EncodeParams
from modelpool.pool.values.specs.spec import JobId, Role
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.models.loading import layouts

RUN = {"steps": 1, "cfg": 1.0, "width": 32, "height": 32}
PROMPT = "a (embedding:worn:1.2) chair"


def encoded(tiny: TinyModel, **fields: Any) -> Encoded:
    (found,) = tiny.made(**RUN, **fields).of(EncodeParams)
    assert isinstance(found, Encoded)
    return found


def test_a_prompt_reads_the_vectors_that_it_names(tmp_path: Path) -> None:
    tiny = TinyModel(tmp_path, layouts.tiny_sd1())
    vectors = torch.randn(2, 32, generator=torch.Generator().manual_seed(4))
    (tmp_path / "embeddings").mkdir()
    save_file({"emb_params": vectors}, tmp_path / "embeddings" / "worn.safetensors")
    found = encoded(tiny, prompt=PROMPT)
    module, tokenizer = tiny.module(Role.TEXT_ENCODER), ClipTokenizer.load()
    (expected,) = read_texts(module, tokenizer, [PROMPT], torch.device("cpu"), embeddings={"worn": vectors})
    np.testing.assert_allclose(found.context_LD, expected.context_LD, atol=1e-6)
    plain = encoded(tiny, prompt="a (worn:1.2) chair")
    assert not np.allclose(plain.context_LD, found.context_LD, atol=1e-3)
    tiny.close()


@pytest.mark.parametrize("ending", ["pt", "bin"])
def test_a_pickle_is_read_where_that_was_allowed(ending: str, tmp_path: Path) -> None:
    """And is no embedding without the flag."""
    vectors = torch.randn(2, 32, generator=torch.Generator().manual_seed(4))
    (tmp_path / "embeddings").mkdir()
    torch.save({"string_to_param": {"*": vectors}, "name": "worn"}, tmp_path / "embeddings" / f"worn.{ending}")
    tiny = TinyModel(tmp_path, layouts.tiny_sd1())
    with pytest.raises((UnknownName, UnsafeFile), match="worn"):
        encoded(tiny, prompt=PROMPT)
    tiny.catalog = Catalog((tmp_path,), (), "cpu", allow_pickle=True)
    found = encoded(tiny, prompt=PROMPT)
    module, tokenizer = tiny.module(Role.TEXT_ENCODER), ClipTokenizer.load()
    (expected,) = read_texts(module, tokenizer, [PROMPT], torch.device("cpu"), embeddings={"worn": vectors})
    np.testing.assert_allclose(found.context_LD, expected.context_LD, atol=1e-6)
    tiny.close()


def test_a_name_that_nobody_knows_is_refused_with_those_that_are(tmp_path: Path) -> None:
    tiny = TinyModel(tmp_path, layouts.tiny_sd1())
    (tmp_path / "embeddings").mkdir()
    save_file({"emb_params": torch.zeros(2, 32)}, tmp_path / "embeddings" / "worn.safetensors")
    with pytest.raises(UnknownName, match=r"embedding.*'torn'.*worn"):
        encoded(tiny, prompt="a embedding:torn chair")
    tiny.close()


def test_vectors_of_another_width_are_refused_by_name(tmp_path: Path) -> None:
    tiny = TinyModel(tmp_path, layouts.tiny_sd1())
    (tmp_path / "embeddings").mkdir()
    save_file({"emb_params": torch.zeros(1, 48)}, tmp_path / "embeddings" / "wide.safetensors")
    with pytest.raises(AdapterMismatch, match="embedding 'wide': found vectors of size 48, expected 32 for clip_l"):
        encoded(tiny, prompt="a embedding:wide chair")
    tiny.close()


@pytest.mark.parametrize("skipped", [0, 1])
def test_layers_are_skipped_as_diffusers_counts_them(skipped: int, tmp_path: Path) -> None:
    tiny = TinyModel(tmp_path, layouts.tiny_sd1())
    found = encoded(tiny, prompt="a chair", clip_skip=skipped)
    module = tiny.module(Role.TEXT_ENCODER)
    tokens = ClipTokenizer.load().encode("a chair")
    ids = torch.tensor([[BEGIN_ID, *tokens, END_ID, *[END_ID] * (75 - len(tokens))]])
    with torch.no_grad():
        states = module(ids, output_hidden_states=True).hidden_states
        inner = getattr(module, "text_model", module)
        expected = inner.final_layer_norm(states[-(1 + skipped)])[0]
    np.testing.assert_allclose(found.context_LD, expected, atol=1e-5)
    tiny.close()


@pytest.mark.parametrize("layout", [layouts.tiny_sd1, layouts.tiny_sd2, layouts.tiny_sdxl])
def test_more_layers_than_the_encoders_have_are_refused_before_any_of_them_runs(
    layout: Callable[[], layouts.Layout], tmp_path: Path
) -> None:
    """Found by extreme values: such jobs were accepted, and failed in their first task. The largest number runs."""
    tiny = TinyModel(tmp_path, layout())
    with pytest.raises(
        UnusableField, match=r"^clip_skip: found '30 skipped layers', expected at most \d+: text encoders of"
    ) as refused:
        build_graph(GenerateRequest(model="tiny", prompt="a chair", seed=1, clip_skip=30), JobId("job"), tiny.catalog)
    most = int(str(refused.value).split("at most ")[1].split(":")[0])
    assert encoded(tiny, clip_skip=most).context_LD.any()
    with pytest.raises(
        UnusableField, match=f"^clip_skip: found '{most + 1} skipped layers?', expected at most {most}:"
    ):
        build_graph(
            GenerateRequest(model="tiny", prompt="a chair", seed=1, clip_skip=most + 1), JobId("job"), tiny.catalog
        )
    tiny.close()


def test_a_clip_with_only_its_pooled_text_read_skips_no_layer(tmp_path: Path) -> None:
    """As other encoders than CLIP: no number changes what the model reads."""
    tiny = TinyFamilyModel(tmp_path, FAMILIES["flux_dev"])
    found, skipped = encoded(tiny), encoded(tiny, clip_skip=30)
    assert found.pooled_V is not None
    assert skipped.pooled_V is not None
    np.testing.assert_array_equal(found.pooled_V, skipped.pooled_V)
    np.testing.assert_array_equal(found.context_LD, skipped.context_LD)
    tiny.close()
