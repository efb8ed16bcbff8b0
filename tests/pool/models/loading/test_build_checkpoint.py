"""A built component is the file: its parameters are views of the mapping, and it computes what the weights say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextModel

from modelpool.pool.models.loading.build_checkpoint import BuiltComponent, Checkpoint, open_checkpoint
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_hollow_checkpoint, write_tiny_checkpoint, write_tiny_lora

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny.safetensors")


@pytest.fixture(scope="module")
def checkpoint(path: Path) -> Checkpoint:
    return open_checkpoint(path)


@pytest.fixture(scope="module", params=(Role.TEXT_ENCODER, Role.DIFFUSION_MODEL, Role.VAE), ids=lambda role: role.value)
def built(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> BuiltComponent:
    return checkpoint.build(request.param)


def test_every_parameter_is_a_view_of_the_mapped_file(checkpoint: Checkpoint, built: BuiltComponent) -> None:
    start = next(iter(checkpoint.mapped.tensors().values())).untyped_storage().data_ptr()
    parameters = dict(built.module.named_parameters())
    assert parameters
    for name, parameter in parameters.items():
        assert parameter.untyped_storage().data_ptr() == start, name
        assert parameter.dtype == torch.float16
        assert not parameter.requires_grad
    assert not built.module.training


def test_the_module_holds_each_tensor_of_its_component_unchanged(path: Path, built: BuiltComponent) -> None:
    """Saving the module gives back the file's tensors, bit for bit."""
    expected = load_file(path)
    prefix = built.family.prefixes[built.role]
    saved = built.key_map.save(built.module.state_dict())
    assert set(saved) == {k for k in expected if k.startswith(prefix) and not k.endswith("position_ids")}
    assert all(torch.equal(saved[key], expected[key]) for key in saved)


def test_classes_and_facts(path: Path, checkpoint: Checkpoint) -> None:
    classes = {Role.TEXT_ENCODER: CLIPTextModel, Role.DIFFUSION_MODEL: UNet2DConditionModel, Role.VAE: AutoencoderKL}
    for role, expected in classes.items():
        built = checkpoint.build(role)
        assert type(built.module) is expected
        assert built.latent == LatentFacts(channels=4, downscale=8, scaling_factor=0.18215)
        assert built.role is role
        assert open_checkpoint(path).key_map(role) == checkpoint.key_map(role) == built.key_map


def test_the_position_table_is_made_anew(checkpoint: Checkpoint) -> None:
    """Some files carry it rounded to half precision, which shifts positions; the file's own is never used."""
    module = checkpoint.build(Role.TEXT_ENCODER).module
    assert module.embeddings.position_ids.tolist() == [list(range(77))]


def test_two_builds_share_the_weights(checkpoint: Checkpoint) -> None:
    first, second = (dict(checkpoint.build(Role.VAE).module.named_parameters()) for _ in range(2))
    assert all(first[name].data_ptr() == second[name].data_ptr() for name in first)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[Role, nn.Module]:
    path = tmp_path_factory.mktemp("float32") / "tiny.safetensors"
    checkpoint = open_checkpoint(write_tiny_checkpoint(path, dtype=torch.float32))
    return {role: checkpoint.build(role).module for role in checkpoint.roles}


def test_the_whole_way_runs(modules: dict[Role, nn.Module]) -> None:
    """Prompt ids to pixels through all three components, as they come from a float32 file."""
    with torch.no_grad():
        context = modules[Role.TEXT_ENCODER](input_ids=torch.full((1, 77), 49407)).last_hidden_state
        noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        latent = modules[Role.DIFFUSION_MODEL](noise, torch.tensor([500]), context).sample
        pixels = modules[Role.VAE].decode(latent / 0.18215).sample
    assert context.shape == (1, 77, 32)
    assert latent.shape == (1, 4, 8, 8)
    assert pixels.shape == (1, 3, 64, 64)
    assert pixels.isfinite().all()


def test_a_built_vae_computes_what_one_built_and_filled_by_hand_computes(
    tmp_path: Path, modules: dict[Role, nn.Module]
) -> None:
    """The same weights through the ordinary way: construct, then copy each tensor in by its name."""
    file = load_file(write_tiny_checkpoint(tmp_path / "tiny.safetensors", dtype=torch.float32))
    by_hand = AutoencoderKL(
        block_out_channels=(32, 32, 64, 64),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=8,
    )
    with torch.no_grad():
        by_hand.post_quant_conv.weight.copy_(file["first_stage_model.post_quant_conv.weight"])
        by_hand.post_quant_conv.bias.copy_(file["first_stage_model.post_quant_conv.bias"])
        by_hand.decoder.conv_in.weight.copy_(file["first_stage_model.decoder.conv_in.weight"])
        by_hand.decoder.conv_in.bias.copy_(file["first_stage_model.decoder.conv_in.bias"])
        latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
        expected = by_hand.decoder.conv_in(by_hand.post_quant_conv(latent))
        vae = modules[Role.VAE]
        assert torch.equal(vae.decoder.conv_in(vae.post_quant_conv(latent)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_weights_keep_the_type_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path / "tiny.safetensors", dtype=dtype))
    module = checkpoint.build(Role.TEXT_ENCODER).module
    assert {p.dtype for p in module.parameters()} == {dtype}


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    layout = layouts.tiny_sd1()
    del layout["model.diffusion_model.output_blocks.1.0.in_layers.2.weight"]
    path = write_tiny_checkpoint(tmp_path / "hole.safetensors", layout=layout)
    with pytest.raises(UnknownArchitecture, match=r"hole\.safetensors: .*1 parameter has no source, such as up_blo"):
        open_checkpoint(path).build(Role.DIFFUSION_MODEL)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    layout = layouts.tiny_sd1() | {"first_stage_model.decoder.conv_out.weight": (3, 16, 3, 3)}
    path = write_tiny_checkpoint(tmp_path / "odd.safetensors", layout=layout)
    message = r"decoder\.conv_out\.weight has shape \(3, 16, 3, 3\) in the file and \(3, 32, 3, 3\) in the module"
    with pytest.raises(UnknownArchitecture, match=message):
        open_checkpoint(path).build(Role.VAE)


def test_files_that_are_no_checkpoint_do_not_open(tmp_path: Path, path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match="this is a LoRA"):
        open_checkpoint(write_tiny_lora(tmp_path / "lora.safetensors"))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFile, match="truncated"):
        open_checkpoint(cut)


#: run in a process of its own, so that what other tests left behind does not count. Reads /proc for anonymous bytes:
#: pages of the file that a single process has touched count as its own, but can be dropped at any time.
MEASURE = """
import sys
from pathlib import Path
import psutil
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint

def own_bytes():
    return psutil.Process().memory_full_info().uss

def anonymous_bytes():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Anonymous:")) * 1024

warm, big = sys.argv[1:]
warmed = open_checkpoint(warm)
kept = [warmed.build(role) for role in warmed.roles]
own, anonymous = own_bytes(), anonymous_bytes()
checkpoint = open_checkpoint(big)
built = [checkpoint.build(role) for role in checkpoint.roles]
loaded = own_bytes() - own
for component in built:
    for parameter in component.module.parameters():
        parameter.flatten()[::1024].float().sum()  # something of every page
print(loaded, anonymous_bytes() - anonymous)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="counts memory as Linux does")
def test_loading_a_large_file_takes_almost_no_memory(tmp_path: Path, path: Path) -> None:
    """200 MB of weights: under 40 MB after loading, and under 40 MB that the kernel could not drop after using all."""
    sizes = layouts.LdmUnet(model_channels=160, multipliers=(1, 2, 4), res_blocks=1, depths=(1, 1, 1), context_width=32)
    whole = layouts.ldm_unet(sizes) | layouts.ldm_vae(layouts.TINY_VAE) | layouts.hf_clip(layouts.TINY_CLIP)
    big = write_hollow_checkpoint(tmp_path / "big.safetensors", whole)
    assert big.stat().st_size > 200_000_000
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURE, str(path), str(big)]
    printed = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    loaded_bytes, anonymous_bytes = map(int, printed.split())
    assert loaded_bytes < 40_000_000
    assert anonymous_bytes < 40_000_000


def test_tensors_of_a_vae_without_a_parameter_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = {**layouts.tiny_sd1(), "first_stage_model.decoder.surplus.weight": (2,), "first_stage_model.odd": (1,)}
    checkpoint = open_checkpoint(write_tiny_checkpoint(tmp_path / "odd.safetensors", layout=layout))
    checkpoint.build(Role.VAE)
    (record,) = caplog.records
    named = "first_stage_model.decoder.surplus.weight, first_stage_model.odd"
    assert record.getMessage().endswith(f"its VAE has no parameter for 2 tensors, which are not used: {named}")


def test_how_an_ltx_file_counts_frames_is_read_from_its_metadata(tmp_path: Path) -> None:
    """Found unused: 2B files since 0.9.5 count from a single frame, which no shape shows."""
    tensors = FAMILIES["ltxv"].file()
    rule = "causal_temporal_positioning"
    for stated in (False, True):
        path = tmp_path / f"{stated}.safetensors"
        save_file(tensors, path, metadata={"config": json.dumps({"transformer": {rule: stated}})})
        module: Any = open_checkpoint(path).build(Role.DIFFUSION_MODEL).module
        assert module.config[rule] is stated
