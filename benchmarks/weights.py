"""Compares weights and patches with plain torch, diffusers and PEFT: forwards, merges, restores, clones, loading.

Everything runs on one CPU thread in turns (A B C A B C ...) and is timed by the CPU time of this process, so that other
load on the machine affects all rows equally. Figures are medians; ratios are medians of ratios within a turn. Run from
the repository: `python -m benchmarks.weights [forward|patched|merge|clone|load] ...` (all of them without arguments).
PEFT and accelerate are needed for the comparison rows; they come with the "dev" extra.
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import diffusers
import peft
import torch
from torch import Tensor, nn

from benchmarks.weights_loading import print_loading
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import LowRank, PatchSet, WeightPatch

CPU = torch.device("cpu")
RANK = 16
#: 80 matrices with 60 million parameters in total
MATRICES, WIDTH = 80, 866
#: rank-1 keys of the clone row
CLONED_KEYS = 1000
#: latents with much work per layer, and with so little that the overhead per layer is visible
SIDES = (32, 8)
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")


@dataclass(frozen=True, slots=True)
class Timed:
    """A call to time, and a preparation that runs before each call and is not timed."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None

    def __call__(self) -> object:
        """Run the call without the preparation."""
        return self.call()


Rows = Mapping[str, Callable[[], object]]


def turns(rows: Rows, rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each row's call for `rounds` rounds, in turns, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(rounds + 1):
        for name, call in rows.items():
            if isinstance(call, Timed):
                call.before()
            begun = time.process_time()
            call()
            if number:
                seconds[name].append(time.process_time() - begun)
    return seconds


def print_table(title: str, seconds: Mapping[str, list[float]], base: str) -> None:
    """Print a row for each entry: its median, and the median of its ratio to `base` in the same turn."""
    print(f"\n{title}\n\n| operation | median ms | ratio |\n|---|---|---|")
    for name, taken in seconds.items():
        ratio = statistics.median(t / b for t, b in zip(taken, seconds[base], strict=True))
        print(f"| {name} | {1000 * statistics.median(taken):.2f} | {ratio:.3f} |", flush=True)


def unet() -> diffusers.UNet2DConditionModel:
    """Return a UNet of the SD1 shape with 78 million random parameters."""
    torch.manual_seed(0)
    config = {
        "block_out_channels": (96, 192, 384, 384),
        "layers_per_block": 2,
        "cross_attention_dim": 256,
        "attention_head_dim": 8,
        "sample_size": 32,
    }
    module = diffusers.UNet2DConditionModel(**config)
    return module.eval().requires_grad_(False)


def in_storage(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy with parameters rounded to `dtype`."""
    return copy.deepcopy(module).to(dtype)


def patcher(module: nn.Module) -> ModelPatcher:
    """Return a patcher over `module` that computes in float32 on the CPU."""
    return ModelPatcher.of(ComponentKey("bench"), Role.DIFFUSION_MODEL, module, CPU, WeightForm(torch.float32))


def everything(of: ModelPatcher) -> frozenset[str]:
    """Return the names of all modules, to make them resident."""
    return frozenset(m.name for m in of.modules())


def attention_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights that a typical LoRA targets."""
    return {
        f"{name}.weight": linear.weight
        for name, linear in module.named_modules()
        if isinstance(linear, nn.Linear) and name.endswith(ATTENTION)
    }


def lora(weights: Mapping[str, Tensor], seed: int, rank: int = RANK) -> PatchSet:
    """Return a random low-rank patch for each weight."""
    generator = torch.Generator().manual_seed(seed)
    patches = []
    for name, weight in weights.items():
        up_OR = torch.randn(weight.shape[0], rank, generator=generator) * 0.01
        down_RI = torch.randn(rank, weight.shape[1], generator=generator) * 0.01
        patches.append(WeightPatch(name, f"bench-{seed}:{name}", LowRank(up_OR, down_RI, 1.0)))
    return PatchSet(tuple(patches))


def joined(sets: Iterable[PatchSet]) -> PatchSet:
    """Return all patches in order, as one set."""
    return PatchSet(tuple(p for patches in sets for p in patches.patches))


def caller(module: nn.Module, side: int) -> Callable[[], Tensor]:
    """Return a forward of a UNet with fixed inputs: batch 2, latents of `side` x `side`, 77 tokens."""
    torch.manual_seed(1)
    inputs = (torch.randn(2, 4, side, side), torch.tensor([10, 500]), torch.randn(2, 77, 256))

    def call() -> Tensor:
        with torch.no_grad():
            result: Tensor = module(*inputs, return_dict=False)[0]
            return result

    return call


def running(of: ModelPatcher, side: int) -> Callable[[], Tensor]:
    """Return a forward as `caller` does, through a patcher."""
    call = caller(of.module, side)

    def run() -> Tensor:
        with of.running():
            return call()

    return run


def realized(module: nn.Module, resident: bool, patches: PatchSet = PatchSet()) -> ModelPatcher:  # noqa: B008 - frozen
    """Return a patcher over `module`, realized with all modules resident or none."""
    made = patcher(module)
    made.patches = patches
    made.realize(WeightsTarget(everything(made) if resident else frozenset(), patches))
    return made


def print_forward(rounds: int = 15) -> None:
    """Print forwards without patches, from float32 and float16 files."""
    plain = unet()
    million = sum(p.numel() for p in plain.parameters()) / 1e6
    twin = copy.deepcopy(plain)  # measures the machine's noise
    resident = realized(copy.deepcopy(plain), True)
    half = in_storage(plain, torch.float16)
    converted, streamed = realized(copy.deepcopy(half), True), realized(copy.deepcopy(half), False)
    layerwise = copy.deepcopy(plain)
    layerwise.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32)
    for side in SIDES:
        rows = {
            "plain torch": caller(plain, side),
            "plain torch, second copy": caller(twin, side),
            "modelpool, resident": running(resident, side),
            "modelpool, float16 file, resident in float32": running(converted, side),
            "modelpool, float16 file, streamed": running(streamed, side),
            "diffusers layerwise casting, float16": caller(layerwise, side),
        }
        title = f"Forward of a UNet with {million:.0f} million parameters, latents {side} x {side}"
        print_table(title, turns(rows, rounds * SIDES[0] // side), "plain torch")


def print_patched(rounds: int = 15) -> None:
    """Print forwards with LoRAs of rank 16 on all attention matrices."""
    plain = unet()
    weights = attention_weights(plain)
    sets = [lora(weights, seed) for seed in range(4)]
    merged = {n: realized(copy.deepcopy(plain), True, joined(sets[:n])) for n in (1, 4)}
    on_the_fly = {n: realized(copy.deepcopy(plain), False, joined(sets[:n])) for n in (1, 4)}
    unmerged = {n: with_peft(copy.deepcopy(plain), sets[:n]) for n in (1, 4)}
    for side in SIDES:
        rows = {"plain torch, no LoRA": caller(plain, side)}
        for count in (1, 4):
            rows[f"modelpool, {count} merged"] = running(merged[count], side)
            rows[f"modelpool, {count} on the fly"] = running(on_the_fly[count], side)
            rows[f"PEFT, {count} unmerged"] = caller(unmerged[count], side)
        seconds = turns(rows, rounds * SIDES[0] // side)
        title = f"Forward with LoRAs on {len(weights)} attention matrices, latents {side} x {side}"
        print_table(title, seconds, "plain torch, no LoRA")
        pairs = zip(seconds["modelpool, 4 on the fly"], seconds["modelpool, 1 on the fly"], strict=True)
        print(f"\n4 LoRAs on the fly take {statistics.median(a / b for a, b in pairs):.2f} times as long as one.")


def with_peft(module: diffusers.UNet2DConditionModel, sets: list[PatchSet]) -> nn.Module:
    """Return `module` with each of `sets` as an active PEFT adapter."""
    names = [f"lora{n}" for n in range(len(sets))]
    for name in names:
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(ATTENTION))
        module.add_adapter(config, adapter_name=name)
    fill_adapters(module, dict(zip(names, sets, strict=True)))
    module.set_adapters(names)
    return module.eval().requires_grad_(False)


def fill_adapters(module: nn.Module, adapters: Mapping[str, PatchSet]) -> None:
    """Write the factors of each patch set into the PEFT layers of its name."""
    for adapter, patches in adapters.items():
        for patch in patches.patches:
            layer = module.get_submodule(patch.parameter.removesuffix(".weight"))
            assert isinstance(patch.value, LowRank)
            layer.lora_A[adapter].weight.data.copy_(patch.value.down_RI)
            layer.lora_B[adapter].weight.data.copy_(patch.value.up_OR)


class Matrices(nn.Module):
    """Linear layers without a bias, for merging only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MATRICES))

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers in sequence."""
        for layer in self.layers:
            x = layer(x)
        return x


def print_merge(rounds: int = 21) -> None:
    """Print the merge of a LoRA of rank 16 into 80 matrices, and the restore of the unpatched weights."""
    torch.manual_seed(0)
    module = Matrices().requires_grad_(False)
    weights = dict(module.named_parameters())
    patches = lora(weights, 0)
    half_module = in_storage(module, torch.float16)
    adapted = peft.get_peft_model(
        copy.deepcopy(module), peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=r"layers\.\d+")
    )
    fill_adapters(adapted.base_model.model, {"default": patches})
    merges = {
        "only products and additions": lambda: [
            w + p.value.up_OR @ p.value.down_RI for w, p in zip(weights.values(), patches.patches, strict=True)
        ],
        "modelpool, merge": switch(module, PatchSet(), patches),
        "PEFT, merge": Timed(adapted.merge_adapter, adapted.unmerge_adapter),
    }
    million = sum(w.numel() for w in weights.values()) / 1e6
    seconds = turns(merges, rounds)
    print_table(
        f"Merge of a LoRA over {MATRICES} matrices, {million:.0f} million parameters", seconds, next(iter(merges))
    )
    restores = {
        "only conversion of float16 to float32": lambda: [p.float() for p in half_module.parameters()],
        "modelpool, restore from a float16 file": switch(half_module, patches, PatchSet()),
    }
    print_table("Restore the unpatched weights", turns(restores, rounds), next(iter(restores)))


def switch(module: nn.Module, before: PatchSet, after: PatchSet) -> Timed:
    """Return a call that switches all resident weights from one patch set to another; switching back is not timed."""
    shared = patcher(copy.deepcopy(module))
    resident = everything(shared)
    return Timed(
        lambda: shared.realize(WeightsTarget(resident, after)),
        lambda: shared.realize(WeightsTarget(resident, before)),
    )


def print_clone(rounds: int = 2000) -> None:
    """Print the time to clone a patcher with 1,000 patched keys."""
    module = nn.ModuleDict({f"l{n}": nn.Linear(4, 4, bias=False) for n in range(CLONED_KEYS)}).requires_grad_(False)
    base = patcher(module)
    base.patches = lora(dict(module.named_parameters()), 0, rank=1)
    assert len(base.patches.parameters) == CLONED_KEYS
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        base.clone()
        seconds.append(time.perf_counter() - begun)
    print(f"\nClone with {CLONED_KEYS} patched keys: {1e6 * statistics.median(seconds):.2f} microseconds (median).")


PARTS: Mapping[str, Callable[[], None]] = {
    "forward": print_forward,
    "patched": print_patched,
    "merge": print_merge,
    "clone": print_clone,
    "load": print_loading,
}


def main(parts: Sequence[str]) -> None:
    """Print the requested tables, or all. Several parts run in separate processes, since memory that the allocator kept
    from one part would affect the next."""
    torch.set_num_threads(1)
    if len(parts) == 1:
        PARTS[parts[0]]()
        return
    for name in parts or PARTS:
        subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.weights", name], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
