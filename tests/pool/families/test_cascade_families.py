"""What the stages of Stable Cascade read, from shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.families.parts.two_stages import pooled_width
from modelpool.pool.values.core.errors import UnusableField
from tests.pool.families.tiny_cascade import STAGE_B, STAGE_C, stage_b_file, stage_c_file, write_files
from tests.pool.families.tiny_transformers import WIDTH

PREFIX = "model.diffusion_model."


def test_both_stages_tell_how_wide_a_pooled_text_they_read() -> None:
    for file in (stage_c_file(), stage_b_file()):
        bare = {key.removeprefix(PREFIX): tuple(x.shape) for key, x in file.items() if key.startswith(PREFIX)}
        assert pooled_width(bare) == WIDTH
    assert pooled_width({"clip_txt_pooled_mapper.weight": (128, 7)}) == 7
    assert pooled_width({"clip_mapper.weight": (7,)}) is None


@pytest.mark.parametrize("is_named", [True, False])
def test_a_stage_b_of_another_text_encoder_is_refused_where_it_is_found(is_named: bool, tmp_path: Path) -> None:
    """Found: it was run, and PyTorch could not multiply."""
    write_files(tmp_path)
    (tmp_path / f"{STAGE_B}.safetensors").unlink()
    file, key = stage_b_file(), f"{PREFIX}clip_mapper.weight"
    save_file(file | {key: torch.cat([file[key]] * 2, dim=1).contiguous()}, tmp_path / "wide.safetensors")
    catalog = Catalog((tmp_path,), (), "cpu")
    expected = rf"decoder: found 'wide', expected one that reads pooled texts of width {WIDTH}, .* reads {2 * WIDTH}"
    with pytest.raises(UnusableField, match=expected):
        catalog.find_decoder(catalog.find_model(STAGE_C), "wide" if is_named else "")
