"""A real UNet with a file of every kind of adapter: merged and computed on the fly, on CPU and device, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.devices.device_kinds import open_device
from modelpool.pool.models.loading.build_checkpoint import BuiltComponent, open_checkpoint
from modelpool.pool.models.lora_names.lora_key_map import lora_key_map
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.cast import apply_weight_functions
from modelpool.pool.weights.ops.casting_classes import set_weight_functions, swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.patches.lora_file import LoraMatch, match_lora, require_match
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.weights.patches.test_adapter_entries import write

ROLE = Role.DIFFUSION_MODEL
BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
CPU = torch.device("cpu")


def _factors(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return {key: torch.randn(shape, generator=generator) * 0.2 for key, shape in shapes.items()}


#: for weights of the tiny UNet, by their names in diffusers, adapters of each kind in the ends that files use
ADAPTERS: dict[str, dict[str, Tensor]] = {
    f"{BLOCK}.attn1.to_q": _factors(**{"lora_up.weight": (48, 4), "lora_down.weight": (4, 48)}),
    f"{BLOCK}.attn1.to_k": _factors(hada_w1_a=(48, 2), hada_w1_b=(2, 48), hada_w2_a=(48, 2), hada_w2_b=(2, 48)),
    f"{BLOCK}.attn1.to_v": _factors(lokr_w1=(6, 6), lokr_w2_a=(8, 2), lokr_w2_b=(2, 8)),
    f"{BLOCK}.attn1.to_out.0": {
        **_factors(**{"lora_up.weight": (48, 4), "lora_down.weight": (4, 48), "diff_b": (48,)}),
        "dora_scale": torch.linspace(0.5, 1.5, 48)[None],
    },
    f"{BLOCK}.attn2.to_q": _factors(oft_blocks=(12, 4, 4)),
    f"{BLOCK}.attn2.to_out.0": _factors(oft_blocks=(2, 12, 4, 4), rescale=(48, 1)),
    f"{BLOCK}.norm1": _factors(w_norm=(48,), b_norm=(48,)),
    f"{BLOCK}.norm2": _factors(set_weight=(48,)),
    "down_blocks.0.resnets.0.conv1": _factors(
        **{"lora_up.weight": (48, 4, 1, 1), "lora_down.weight": (4, 48, 1, 1), "lora_mid.weight": (4, 4, 3, 3)}
    ),
    "down_blocks.0.resnets.0.conv2": _factors(**{"lora_up.weight": (48, 4, 1, 1), "lora_down.weight": (4, 48, 3, 3)}),
    "up_blocks.1.resnets.0.conv2": _factors(
        hada_w1_a=(2, 48),
        hada_w1_b=(2, 48),
        hada_t1=(2, 2, 3, 3),
        hada_w2_a=(2, 48),
        hada_w2_b=(2, 48),
        hada_t2=(2, 2, 3, 3),
    ),
    "up_blocks.1.resnets.1.conv2": _factors(lokr_w1=(6, 6), lokr_w2_a=(2, 8), lokr_w2_b=(2, 8), lokr_t2=(2, 2, 3, 3)),
    "conv_in": _factors(diff=(48, 4, 3, 3)),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltComponent:
    path = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny.safetensors")
    return open_checkpoint(path).build(ROLE)


@pytest.fixture(scope="module")
def found(built: BuiltComponent, tmp_path_factory: pytest.TempPathFactory) -> LoraMatch:
    tensors = {
        f"lora_unet_{name.replace('.', '_')}.{end}": tensor
        for name, ends in ADAPTERS.items()
        for end, tensor in ends.items()
    }
    path = write(tmp_path_factory.mktemp("lora") / "all.safetensors", tensors)
    shapes = {name: tuple(p.shape) for name, p in built.module.named_parameters()}
    return match_lora(path, "hash", {ROLE: lora_key_map(built)}, {ROLE: shapes})


def run(built: BuiltComponent, patches: PatchSet, device: torch.device, merged: bool) -> Tensor:
    """The UNet's output in float32: with patched weights, or with plain ones that are patched when they are used."""
    with torch.device("meta"):
        module = type(built.module).from_config(built.module.config)  # type: ignore[attr-defined] # of diffusers
    module.requires_grad_(False).eval()
    functions = {name: patches.functions(name) for name, _ in built.module.named_parameters()}
    weights = {
        name: apply_weight_functions(p.data, functions[name], CPU, torch.float32) if merged else p.data
        for name, p in built.module.named_parameters()
    }
    module.load_state_dict(weights, strict=True, assign=True)
    swap_to_casting(module)
    if not merged:
        for name, own in functions.items():
            owner, _, parameter = name.rpartition(".")
            layer: nn.Module = module.get_submodule(owner)
            set_weight_functions(layer, parameter, own)
    generator = torch.Generator().manual_seed(3)
    x, context = torch.randn(1, 4, 8, 8, generator=generator), torch.randn(1, 7, 32, generator=generator)
    with torch.no_grad(), compute(device, torch.float32):
        y = module(x.to(device), torch.tensor(500, device=device), context.to(device)).sample
        assert isinstance(y, Tensor)
        return y.cpu()


def test_the_whole_file_matches(found: LoraMatch) -> None:
    biases = sum(("diff_b" in ends) + ("b_norm" in ends) for ends in ADAPTERS.values())
    assert (found.matched, found.total, found.warning) == (len(ADAPTERS) + biases, len(ADAPTERS) + biases, None)
    require_match(found, "all", "tiny", "SD1")


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_on_the_fly_is_merged(built: BuiltComponent, found: LoraMatch, kind: str) -> None:
    patches = PatchSet(found.patches[ROLE])
    device = open_device(kind, 0, None).torch_device
    streamed = run(built, patches, device, merged=False)
    assert torch.equal(streamed, run(built, patches, device, merged=True))
    assert (streamed - run(built, PatchSet(), CPU, merged=True)).abs().max() > 0.01


def test_host_weights_are_not_written(built: BuiltComponent, found: LoraMatch) -> None:
    before = {name: p.data.clone() for name, p in built.module.named_parameters()}
    run(built, PatchSet(found.patches[ROLE]), CPU, merged=False)
    assert all(torch.equal(p.data, before[name]) for name, p in built.module.named_parameters())
