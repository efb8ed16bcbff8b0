"""SD2 whose text encoder was cut to the 23 layers that are read, as programs write it that make a file of a folder of
diffusers: with its projection or without one, in the spelling of open_clip. It draws what the whole one draws."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_model import TinyModel
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import open_clip
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
TEXT = "cond_stage_model.model."
LAST, PROJECTION = f"{TEXT}transformer.resblocks.23.", f"{TEXT}text_projection"
RUN = {"steps": 2, "cfg": 4.0, "width": 64, "height": 48, "negative": "blurry"}


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """A file of SD2 with as many layers as the published one, in a folder of its own."""
    folder.mkdir()
    layout = {key: shape for key, shape in layouts.tiny_sd2().items() if not key.startswith(TEXT)}
    path = folder / "tiny.safetensors"
    write_tiny_checkpoint(path, seed=3, dtype=torch.float32, layout={**layout, **open_clip(32, 24, 128, prefix=TEXT)})
    return load_file(path)


def cut(folder: Path, tensors: dict[str, torch.Tensor], has_projection: bool = False) -> Path:
    folder.mkdir()
    kept = {key: x for key, x in tensors.items() if not key.startswith(LAST)}
    save_file({k: x for k, x in kept.items() if has_projection or k != PROJECTION}, folder / "tiny.safetensors")
    return folder / "tiny.safetensors"


@pytest.mark.parametrize("has_projection", [False, True])
def test_a_text_encoder_without_its_last_layer_reads_what_the_whole_one_does(
    tmp_path: Path, has_projection: bool
) -> None:
    tensors = whole(tmp_path / "whole")
    cut(tmp_path / "cut", tensors, has_projection)
    drawn = []
    for place in ("whole", "cut"):
        tiny = TinyModel.of_folder(tmp_path / place)
        assert tiny.family.name == "sd2"
        made = tiny.made(**RUN)
        drawn.append((made.texts["prompt_embeds"], made.latents[0]))
        tiny.close()
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


def test_it_is_saved_as_it_was_and_as_a_folder(tmp_path: Path) -> None:
    path = cut(tmp_path / "cut", whole(tmp_path / "whole"))
    save_checkpoint(open_checkpoint(path), tmp_path / "again.safetensors")
    before, after = load_file(path), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    save_diffusers(open_checkpoint(path), tmp_path / "folder")
    assert open_checkpoint(tmp_path / "folder").config(Role.TEXT_ENCODER)["num_hidden_layers"] == 23


def test_a_file_made_of_its_folder_reads_and_draws_the_same(tmp_path: Path) -> None:
    """A folder has 23 layers and no projection, as its pipeline reads it: so has the file."""
    whole(tmp_path / "whole")
    for place in ("folder", "file"):
        (tmp_path / place).mkdir()
    save_diffusers(open_checkpoint(tmp_path / "whole" / "tiny.safetensors"), tmp_path / "folder" / "tiny")
    path = save_checkpoint(open_checkpoint(tmp_path / "folder" / "tiny"), tmp_path / "file" / "tiny.safetensors").path
    assert not [key for key in load_file(path) if key == PROJECTION or key.startswith(LAST)]
    drawn = []
    for place in ("whole", "folder", "file"):
        tiny = TinyModel.of_folder(tmp_path / place)
        made = tiny.made(**RUN)
        drawn.append((made.texts["prompt_embeds"], made.latents[0]))
        tiny.close()
    for texts, latents in drawn[1:]:
        assert torch.equal(texts, drawn[0][0])
        assert torch.equal(latents, drawn[0][1])


def test_a_text_encoder_that_is_told_of_as_a_vector_needs_its_projection(tmp_path: Path) -> None:
    """SDXL's second."""
    layout = {key: shape for key, shape in layouts.tiny_sdxl().items() if not key.endswith("text_projection")}
    write_tiny_checkpoint(tmp_path / "tiny.safetensors", layout=layout)
    with pytest.raises(UnknownArchitecture, match="text_projection"):
        open_checkpoint(tmp_path / "tiny.safetensors")
