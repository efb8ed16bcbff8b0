"""Tiny decoders decode as diffusers' AutoencoderTiny, from every layout of their files, and are found by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.catalog.tiny_decoders import decoder_name, find_tiny_decoders
from modelpool.pool.inference.pixels.tiny_decoder import TinyDecoder, tiny_name
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.family_facts import LatentFacts
from tests.pool.models.components.vae import published
from tests.pool.models.components.vae.cases import CASES


@pytest.fixture(scope="module")
def theirs() -> Any:
    return CASES["taesd"].module()


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One decoder in each layout, as its files are called."""
    path, state = tmp_path_factory.mktemp("tiny"), theirs.state_dict()
    both = {key: tensor.contiguous() for key, tensor in published.taesd(state).items()}
    decoder = {key.removeprefix("taesd_decoder."): both[key] for key in both if key.startswith("taesd_decoder.")}
    save_file(decoder, path / "taesd_decoder.safetensors")
    torch.save(decoder, path / "taesdxl_decoder.pth")
    save_file(both, path / "taesdxl.safetensors")
    (path / "taef1").mkdir()
    save_file({key: x.contiguous() for key, x in state.items()}, path / "taef1" / "diffusion_pytorch_model.safetensors")
    save_file({"decoder.conv_in.weight": torch.zeros(1)}, path / "taesd3.safetensors")
    return path


NAMES = (
    "taesd_decoder.safetensors",
    "taesdxl_decoder.pth",
    "taesdxl.safetensors",
    "taef1/diffusion_pytorch_model.safetensors",
)


@pytest.mark.parametrize("name", NAMES)
def test_each_layout_decodes_as_diffusers_does(theirs: Any, folder: Path, name: str) -> None:
    latent = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(3))
    decoder = TinyDecoder.open(folder / name)
    expected = theirs.decode(latent[None]).sample
    found = decoder._module.decode(latent[None]).sample
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    pixels = expected[0].permute(1, 2, 0).add(1).mul(127.5).clamp(0, 255).round().to(torch.uint8).numpy()
    assert np.array_equal(decoder.image(latent.numpy(), 1000), pixels)


def test_a_large_latent_is_reduced_before_it_is_decoded(folder: Path) -> None:
    latent = np.ones((4, 64, 32), np.float32)
    assert TinyDecoder.open(folder / NAMES[0]).image(latent, 128).shape == (128, 64, 3)


def test_decoders_are_found_by_their_names_and_checked_by_their_tensors(folder: Path) -> None:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    found = dict(find_tiny_decoders(paths))
    # taef1 reads 16 channels, and this one 4; taesd3 is another file; pickles are not allowed
    assert found == {"taesd": str(folder / NAMES[0]), "taesdxl": str(folder / "taesdxl.safetensors")}
    pickled = [path for path in paths if path.suffix == ".pth"]
    assert find_tiny_decoders(pickled) == ()
    assert dict(find_tiny_decoders(pickled, allow_pickle=True)) == {"taesdxl": str(pickled[0])}
    assert decoder_name(Path("models/TAESD3-decoder.safetensors")) == "taesd3"
    assert decoder_name(Path("models/vae/model.safetensors")) == ""


def test_each_latent_format_has_its_decoder() -> None:
    formats = {
        "taesd": LatentFacts(4, 8, 0.18215),
        "taesdxl": LatentFacts(4, 8, 0.13025),
        "taesd3": LatentFacts(16, 8, 1.5305, shift=0.0609),
        "taef1": LatentFacts(16, 8, 0.3611, shift=0.1159),
        "": LatentFacts(4, 8, 0.9),
    }
    assert {name: tiny_name(latent) for name, latent in formats.items()} == {name: name for name in formats}


def test_a_file_without_a_decoder_is_refused(folder: Path, tmp_path: Path) -> None:
    case = CASES["kl"]
    save_file(case.file(case.module()), tmp_path / "kl.safetensors")
    with pytest.raises(UnknownArchitecture, match="expected a decoder of TAESD"):
        TinyDecoder.open(tmp_path / "kl.safetensors")
