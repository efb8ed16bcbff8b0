"""A vision encoder that does not fit its diffusion model is refused when the checkpoint is opened, by what of it does
not fit; those that do are let through, however they are spelled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from modelpool.pool.catalog.registry.assembling import SelectedFiles, assemble
from modelpool.pool.catalog.registry.registry import open_registry
from modelpool.pool.families.definitions.stable_video import SVD
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.files.formats.model_description import read_description
from modelpool.pool.files.formats.safetensors_file import Header, Shape, TensorEntry
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.vision_fit import check_vision_encoder
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_seen_wan import ONE, described
from tests.pool.families.tiny_transformers import File, seeded
from tests.pool.families.tiny_videos import VIDEOS

ONE_IMAGE, TWO_IMAGES = TRANSFORMERS["wan21_i2v"], TRANSFORMERS["wan21_flf2v"]
Shapes = dict[str, Shape]
PUBLISHED = {"norm": "img_emb.proj.0.bias", "table": "img_emb.emb_pos"}
IN_DIFFUSERS = {
    "norm": "condition_embedder.image_embedder.norm1.weight",
    "table": "condition_embedder.image_embedder.pos_embed",
}
#: what the vision encoder of Stable Video Diffusion's published file begins with
SVD_SEES = SVD.prefixes[Role.VISION_ENCODER]


def wan(width: int = 32, rows: int = 257, level: str = "vision_model.", named: Mapping[str, str] = PUBLISHED) -> Shapes:
    """What a Wan that reads states 32 wide and an encoder of this width and so many positions are told by."""
    return {
        f"vision_encoder.{level}embeddings.position_embedding.weight": (rows, width),
        "vision_encoder.visual_projection.weight": (7, width),
        f"model.diffusion_model.{named['norm']}": (32,),
    }


def svd(projected: int = 24, rows: int = 5) -> Shapes:
    """The same of a UNet that reads 24 numbers."""
    return {
        f"{SVD_SEES}positional_embedding": (rows, 32),
        f"{SVD_SEES}proj": (32, projected),
        "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (64, 24),
    }


def check(family: LocatedFamily, shapes: Mapping[str, Shape]) -> None:
    tensors = {key: TensorEntry(key, "F32", shape, 0, 0) for key, shape in shapes.items()}
    check_vision_encoder(family, Header("m.safetensors", 0, tensors, {}), shapes)


def with_table(shapes: Shapes, rows: int, named: Mapping[str, str] = PUBLISHED) -> Shapes:
    return {**shapes, f"model.diffusion_model.{named['table']}": (1, rows, 32)}


@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        (ONE_IMAGE, wan()),
        (ONE_IMAGE, wan(rows=2, level="")),
        (ONE_IMAGE, wan(named=IN_DIFFUSERS)),
        (TWO_IMAGES, with_table(wan(), 514)),
        (TWO_IMAGES, with_table(wan(named=IN_DIFFUSERS), 514, IN_DIFFUSERS)),
        (SVD, svd()),
        # it sees nothing, whatever lies beside it
        (TRANSFORMERS["wan22_i2v"], wan(width=48)),
        (replace(SVD, sampling=replace(SVD.sampling, vision_use=None)), svd(projected=20)),
    ],
)
def test_what_fits_is_let_through(family: LocatedFamily, shapes: Shapes) -> None:
    check(family, shapes)


@pytest.mark.parametrize(
    ("family", "shapes", "message"),
    [
        (ONE_IMAGE, wan(width=48), "gives states of width 48, expected 32"),
        (ONE_IMAGE, wan(width=48, level="", named=IN_DIFFUSERS), "gives states of width 48, expected 32"),
        (TWO_IMAGES, with_table(wan(rows=65), 514), "gives 65 states of each of 2 images, expected 514 of all"),
        (ONE_IMAGE, wan(rows=1), "has 1 positions, expected one more than the patches of a square"),
        (ONE_IMAGE, wan(rows=0), "has 0 positions, expected"),
        (ONE_IMAGE, wan(rows=7), "has 7 positions, expected"),
        (SVD, svd(projected=20), "gives states of width 20, expected 24"),
        (SVD, svd(rows=1), "has 1 positions, expected"),
        (SVD, {**svd(), f"{SVD_SEES}proj": (24,)}, "has no projection, expected"),
        (SVD, {**svd(), f"{SVD_SEES}positional_embedding": ()}, "has no table of positions, expected"),
    ],
)
def test_what_does_not_fit_is_told(family: LocatedFamily, shapes: Shapes, message: str) -> None:
    with pytest.raises(UnknownArchitecture, match=rf"m\.safetensors: recognised as .* its vision encoder {message}"):
        check(family, shapes)


def without_projection(file: File) -> File:
    return {key: tensor for key, tensor in file.items() if key != f"{SVD_SEES}proj"}


def narrow(file: File) -> File:
    return file | {f"{SVD_SEES}proj": file[f"{SVD_SEES}proj"][:, :20].contiguous()}


def without_patches(file: File) -> File:
    key = f"{SVD_SEES}positional_embedding"
    return file | {key: file[key][:1].contiguous()}


@pytest.mark.parametrize("damage", [without_projection, narrow, without_patches])
def test_a_file_whose_encoder_does_not_fit_is_not_opened(damage: Callable[[File], File], tmp_path: Path) -> None:
    """Found: it was, and ended in an error of PyTorch when a request was cut."""
    save_file(damage(VIDEOS["svd"].file()), tmp_path / "svd.safetensors")
    with pytest.raises(UnknownArchitecture, match=r"svd\.safetensors: recognised as .* its vision encoder"):
        open_checkpoint(tmp_path / "svd.safetensors")


def test_separate_files_that_do_not_fit_are_not_put_together(tmp_path: Path) -> None:
    """Found: an encoder of another model, such as CLIP L beside a model that sees with CLIP H. Its file is named."""
    description = described(tmp_path, ONE, vision_encoder="clip_vision_l.safetensors")
    config = transformers.CLIPVisionConfig(
        hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=16, image_size=28, patch_size=14,
        projection_dim=24,
    )  # fmt: skip
    wide = seeded(lambda: transformers.CLIPVisionModelWithProjection(config), 3).state_dict()
    save_file({key: tensor.contiguous() for key, tensor in wide.items()}, tmp_path / "clip_vision_l.safetensors")
    expected = r"its vision encoder in \S*clip_vision_l\.safetensors gives states of width 48, expected 32"
    with pytest.raises(UnknownArchitecture, match=expected):
        open_checkpoint(read_description(description))
    registry = open_registry((tmp_path,), (), tmp_path / "registry")
    chosen = SelectedFiles(checkpoint="rest", vision_encoder=str(tmp_path / "clip_vision_l.safetensors"))
    with pytest.raises(UnknownArchitecture, match=expected):
        assemble(registry, "new", chosen, tmp_path)
    assert not (tmp_path / "new.model.json").exists()


def test_the_tensors_are_looked_at_as_files_have_them() -> None:
    """What tells a width is in the files that the other tests run: were a name another, nothing would be compared."""
    told = torch.Size((5, 32)), torch.Size((32, 24))
    file = VIDEOS["svd"].file()
    assert (file[f"{SVD_SEES}positional_embedding"].shape, file[f"{SVD_SEES}proj"].shape) == told
    assert "model.diffusion_model.img_emb.proj.0.bias" in ONE.file()
