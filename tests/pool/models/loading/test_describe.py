"""A description is right about sizes, types and names, and needs neither torch nor the weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.describe import REFERENCE_FACTOR_KEY, describe, describe_lora, reference_factor
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_hollow_checkpoint, write_tiny_checkpoint, write_tiny_lora

REPOSITORY = Path(__file__).parents[4]


def test_components_are_counted_as_they_are_built(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "tiny.safetensors")
    info, checkpoint = describe(path), open_checkpoint(path)
    assert [c.role for c in info.components] == [Role.TEXT_ENCODER, Role.DIFFUSION_MODEL, Role.VAE]
    for component in info.components:
        parameters = list(checkpoint.build(component.role).module.parameters())
        assert component.tensors == len(parameters)
        assert component.parameters == sum(p.numel() for p in parameters)
        assert component.storage_bytes == sum(p.nbytes for p in parameters)
        assert component.dtypes == {"F16": component.storage_bytes}
    assert info.other_bytes == 77 * 8, "the position table"
    assert (info.family, info.file_bytes) == ("sd1", path.stat().st_size)
    assert info.latent == LatentFacts(4, 8, 0.18215)


def test_the_published_sd15_has_the_published_number_of_parameters(tmp_path: Path) -> None:
    """Source: 859.5 million, 123.1 million and 83.7 million, as the model cards count them. No weights are written."""
    path = tmp_path / "sd15.safetensors"
    write_hollow_checkpoint(path, layouts.sd15())
    counted = {c.role: c.parameters for c in describe(path).components}
    assert counted == {
        Role.TEXT_ENCODER: 123_060_480,
        Role.DIFFUSION_MODEL: 859_520_964,
        Role.VAE: 83_653_863,
    }


FACTORS = {"2": 2, "1": 1, "3.6": 4, "0": 1, "-2": 1, "": 1, "half": 1, "nan": 1, "inf": 1}


def test_the_file_of_an_ic_lora_says_how_much_smaller_its_guides_are(tmp_path: Path) -> None:
    """As in ComfyUI: rounded, at least 1, and 1 where nothing readable is there."""
    weights = {"a.lora_A.weight": torch.zeros(1, 1), "a.lora_B.weight": torch.zeros(1, 1)}
    for number, (said, factor) in enumerate(FACTORS.items()):
        save_file(weights, path := tmp_path / f"{number}.safetensors", {REFERENCE_FACTOR_KEY: said})
        assert reference_factor(path) == factor, said
    save_file(weights, path := tmp_path / "plain.safetensors")
    assert reference_factor(path) == 1


RESOLUTIONS = {
    "64x64": (64, 64),
    "768x512": (768, 512),
    " 1024 x 1024 ": (1024, 1024),
    "640": (640, 640),
    "": (512, 512),
    "big": (512, 512),
    "0x0": (512, 512),
    "0x64": (512, 512),
    "64x0": (512, 512),
    "100x100": (512, 512),
}


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_the_native_size_is_what_the_metadata_say_or_the_familys(tmp_path: Path, resolution: str) -> None:
    metadata = {"modelspec.resolution": resolution, "author": "somebody"}
    info = describe(write_tiny_checkpoint(tmp_path / "tiny.safetensors", metadata=metadata))
    assert (info.width, info.height) == RESOLUTIONS[resolution]
    assert info.metadata["author"] == "somebody"


def test_a_kohya_lora(tmp_path: Path) -> None:
    path = write_tiny_lora(tmp_path / "lora.safetensors", rank=4, alpha=2.0, metadata={"ss_network_dim": "4"})
    info = describe_lora(path)
    assert (info.styles, info.algorithms) == (("kohya",), ("LoRA",))
    assert info.modules == {Role.DIFFUSION_MODEL: 4, Role.TEXT_ENCODER: 2}
    assert (info.ranks, info.alphas) == ({4: 6}, {2.0: 6})
    assert (info.tensors, info.unknown) == (18, ())
    assert info.metadata == {"ss_network_dim": "4"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_alphas_of_every_type_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    info = describe_lora(write_tiny_lora(tmp_path / "lora.safetensors", alpha=0.75, dtype=dtype))
    assert info.alphas == {0.75: 6}


def test_other_naming_styles_and_algorithms(tmp_path: Path) -> None:
    up, down = torch.zeros(8, 2), torch.zeros(2, 8)
    tensors = {
        "unet.mid_block.attentions.0.proj_in.lora_A.weight": down,
        "unet.mid_block.attentions.0.proj_in.lora_B.weight": up,
        "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.down.weight": down,
        "text_encoder.text_model.encoder.layers.0.mlp.fc1.lora_linear_layer.up.weight": up,
        "base_model.model.conv_in.lora_A.default.weight": torch.zeros(16, 8),
        "base_model.model.conv_in.lora_B.default.weight": torch.zeros(8, 16),
        "lora_unet_conv_in.hada_w1_a": up,
        "lora_unet_conv_in.hada_w1_b": down,
        "optimizer_state": torch.zeros(1),
    }
    path = tmp_path / "mixed.safetensors"
    save_file({k: v.clone() for k, v in tensors.items()}, path)
    info = describe_lora(path)
    assert (info.styles[0], sorted(info.styles)) == ("diffusers", ["diffusers", "kohya", "peft"])
    assert info.algorithms == ("LoRA", "LoHa")
    assert info.modules == {Role.DIFFUSION_MODEL: 3, Role.TEXT_ENCODER: 1}
    assert info.ranks == {2: 3, 16: 1}
    assert (info.alphas, info.unknown) == ({}, ("optimizer_state",))


def test_a_checkpoint_is_no_lora(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match=r"tiny\.safetensors: none of its 503 tensors is named like"):
        describe_lora(write_tiny_checkpoint(tmp_path / "tiny.safetensors"))


def test_an_alpha_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    pair = {
        "lora_unet_conv_in.lora_up.weight": torch.zeros(8, 2),
        "lora_unet_conv_in.lora_down.weight": torch.zeros(2, 8),
    }
    save_file(pair | {"lora_unet_conv_in.alpha": torch.zeros(3)}, path)
    with pytest.raises(UnknownArchitecture, match=r"alpha': found F32 of shape \(3,\), expected one number"):
        describe_lora(path)


def test_describing_loads_no_torch(tmp_path: Path) -> None:
    """Drivers describe models; only workers need torch."""
    model = write_tiny_checkpoint(tmp_path / "tiny.safetensors")
    lora = write_tiny_lora(tmp_path / "lora.safetensors")
    program = (
        "import sys\n"
        "from modelpool.pool.models.loading.describe import describe, describe_lora\n"
        "from modelpool.pool.weights.quant.file_hash import file_sha256\n"
        "from modelpool.pool.models.text.prompt_weights import parse_weights\n"
        "describe(sys.argv[1]), describe_lora(sys.argv[2]), parse_weights('(a)')\n"
        "print(sorted({'torch', 'numpy', 'diffusers', 'transformers'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", program, str(model), str(lora)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    printed = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"
