"""Convolution weights with their channels last: the values of contiguous ones within rounding, for every UNet and VAE.

Patched or not, resident, in part or streamed, and in no more memory than the plan counts.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from modelpool.pool.devices.capabilities import cuda_capabilities, host_capabilities
from modelpool.pool.devices.device_kinds import DeviceKind
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import MemoryFormat, WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.toy import make_patch, make_toy, patches_for
from tests.pool.weights.ops.test_zoo import deviation
from tests.pool.zoo import FAMILIES, Case, build, store_in
from tests.pool.zoo.case import quiet_libraries, tensors_in

INDEX = 73  # of a simulated device that no other test uses
PLENTY_BYTES = 1 << 28
GIB = 1 << 30


def patcher_of(module: nn.Module, device: torch.device, channels_last: bool) -> ModelPatcher:
    form = WeightForm(torch.float32, channels_last=channels_last)
    return ModelPatcher.of(ComponentKey("model"), Role.DIFFUSION_MODEL, module, device, form)


def convolutions(module: nn.Module) -> list[str]:
    return [name for name, m in module.named_modules() if isinstance(m, nn.Conv2d)]


def output(patcher: ModelPatcher, case: Case) -> list[Tensor]:
    with patcher.running() as module, quiet_libraries():
        inputs = pytree.tree_map_only(Tensor, lambda t: t.to(patcher.device), case.inputs)
        return [t.to("cpu") for t in tensors_in(module(**inputs))]


def patches_on(case: Case) -> PatchSet:
    """On the first convolution, one in the middle, and a linear layer if there is one."""
    named = dict(case.module.named_modules())
    found = convolutions(case.module)
    layers = {found[0], found[len(found) // 2], *[n for n, m in named.items() if isinstance(m, nn.Linear)][:1]}
    weights = {f"{name}.weight": named[name].weight for name in sorted(layers)}
    return PatchSet(tuple(make_patch(n, tuple(w.shape), n, 0.5) for n, w in weights.items()))


def test_every_unet_and_vae_computes_the_same_within_rounding() -> None:
    """With patches of some of the convolutions; resident, and with every second module streamed."""
    seen = []
    for family in FAMILIES:
        case = build(family, torch.float16)
        layers = convolutions(case.module)
        if len(layers) < 4:  # others only have some to read an image
            continue
        store_in(case.module, torch.float16)
        patches, results = patches_on(case), []
        for channels_last in (False, True):
            patcher = patcher_of(case.module, torch.device("cpu"), channels_last)
            patcher.patches = patches
            names = [module.name for module in patcher.modules()]
            for resident in (names, names[::2]) if channels_last else (names,):
                patcher.realize(WeightsTarget(frozenset(resident), patches))
                results.append(output(patcher, case))
                weights = [case.module.get_submodule(n).weight for n in layers if n in resident]
                last = [w.is_contiguous(memory_format=torch.channels_last) for w in weights]
                assert all(last) or not channels_last, family
            patcher.unload()
        assert all(deviation(found, results[0]) <= 1e-4 for found in results[1:]), family
        seen.append(family)
    assert len(seen) > 10, seen


def test_it_takes_the_memory_that_the_plan_counts_and_switches_keep_the_order() -> None:
    sim.install()
    device = torch.device("sim", INDEX)
    for names in ((), ("conv.weight",), ("conv.weight", "wide.weight")):
        sim.configure(INDEX, PLENTY_BYTES)
        toy = make_toy(3, torch.float16)
        patcher, patches = patcher_of(toy, device, channels_last=True), patches_for(make_toy(), "a", names)
        everything = frozenset(module.name for module in patcher.modules())
        patcher.patches = patches
        sim.configure(INDEX, patcher.spec().weight_bytes + patcher.use().scratch_bytes)
        for target in (PatchSet(), patches, PatchSet(), patches):
            patcher.realize(WeightsTarget(everything, target))
            weight = toy.conv._parameters["weight"]
            assert weight is not None
            assert weight.stride() == torch.empty(weight.shape).contiguous(memory_format=torch.channels_last).stride()
            assert sim.memory_stats(INDEX).used_bytes == patcher.spec().weight_bytes
        del weight
        patcher.unload()
        assert sim.memory_stats(INDEX).used_bytes == 0


@pytest.mark.parametrize(
    ("chosen", "role", "dtype", "generation", "expected"),
    [
        ("auto", Role.DIFFUSION_MODEL, torch.float16, (8, 9), True),
        ("auto", Role.VAE, torch.bfloat16, (9, 0), True),
        ("auto", Role.VAE, torch.float32, (9, 0), False),
        ("auto", Role.DIFFUSION_MODEL, torch.float16, (6, 1), False),
        ("auto", Role.TEXT_ENCODER, torch.bfloat16, (9, 0), False),
        ("channels_last", Role.DIFFUSION_MODEL_2, torch.float32, (6, 1), True),
        ("channels_last", Role.TEXT_ENCODER, torch.float16, (9, 0), False),
        ("contiguous", Role.VAE, torch.bfloat16, (9, 0), False),
    ],
)
def test_where_channels_are_last(
    chosen: str, role: Role, dtype: torch.dtype, generation: tuple[int, int], expected: bool
) -> None:
    card = cuda_capabilities("a card", generation, GIB)
    assert MemoryFormat(chosen).puts_channels_last(role, dtype, card) == expected
    on_host = MemoryFormat(chosen).puts_channels_last(role, dtype, host_capabilities(DeviceKind.CPU, GIB))
    assert on_host == (expected and chosen == "channels_last")
