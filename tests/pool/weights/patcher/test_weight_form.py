"""The three forms of resident weights compute the same function of (host weights, patch set), each in its own bytes.

Proves, for plain and packed storage: resident weights have the bytes that the sizes say; STORED gives bit for bit what
COMPUTE gives, patched or not, resident or streamed; STORED_MERGED rounds once and is near; a packed linear layer takes
a LoRA beside it; and going back to no patches gives the exact bytes again.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.ops import cast as cast_module
from modelpool.pool.weights.ops.packed import stored_bytes
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import ResidentForm, WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.quant.quantize import quantize
from tests.each_case import each_case
from tests.pool.toy import Toy, make_patch, make_toy, patches_for

DEVICE = "sim:0"
IDS_BL = torch.tensor([[1, 4, 9, 49, 0], [2, 2, 7, 30, 5]])
WEIGHTS = ("wide.weight", "narrow.weight", "conv.weight", "table.weight")
LINEARS = ("wide", "narrow")
STORAGES = ("float16", "float8_e4m3fn", "packed")


@pytest.fixture(autouse=True)
def _device() -> None:
    sim.install()
    sim.configure(0, 1 << 30)


def toy_in(storage: str) -> Toy:
    """The same random weights, stored as asked; "packed" quantizes the linear layers and leaves the rest in float16."""
    toy = make_toy(3, torch.float16 if storage == "packed" else getattr(torch, storage))
    if storage == "packed":
        for name in LINEARS:
            layer = toy.get_submodule(name)
            packed = quantize(layer._parameters["weight"].float(), "float8_e4m3fn")
            layer._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
    return toy


def patcher_of(toy: Toy, form: ResidentForm) -> ModelPatcher:
    return ModelPatcher.of(
        ComponentKey("toy"), Role.DIFFUSION_MODEL, toy, torch.device(DEVICE), WeightForm(torch.float32, form)
    )


def output(patcher: ModelPatcher, patches: PatchSet, resident: bool) -> torch.Tensor:
    names = frozenset(m.name for m in patcher.modules()) if resident else frozenset[str]()
    patcher.realize(WeightsTarget(names, patches))
    with patcher.running() as module:
        return module(IDS_BL.to(DEVICE)).to("cpu")


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("form", ResidentForm)
def test_resident_bytes_are_those_of_the_form_and_leave_wholly(form: ResidentForm, storage: str) -> None:
    patcher = patcher_of(toy_in(storage), form)
    patches = patches_for(make_toy(), "a", WEIGHTS)
    for wanted in (PatchSet(), patches):
        patcher.realize(WeightsTarget(frozenset(m.name for m in patcher.modules()), wanted))
        assert patcher.resident().resident_bytes == patcher.spec().weight_bytes == sim.memory_stats(0).used_bytes
    patcher.unload()
    assert sim.memory_stats(0).used_bytes == 0


@pytest.mark.parametrize("storage", STORAGES)
def test_stored_weights_stay_as_small_as_the_file(storage: str) -> None:
    toy = toy_in(storage)
    of_file = sum(stored_bytes(p) for p in toy.parameters()) + sum(b.nbytes for b in toy.buffers())
    assert patcher_of(toy, ResidentForm.STORED).spec().weight_bytes == of_file
    assert patcher_of(toy_in(storage), ResidentForm.COMPUTE).spec().weight_bytes > of_file


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("patched", [False, True], ids=["plain", "patched"])
def test_stored_and_computed_give_the_same_bits_resident_and_streamed(patched: bool, storage: str) -> None:
    patches = patches_for(make_toy(), "a", WEIGHTS, 0.7) if patched else PatchSet()
    results = [
        output(patcher_of(toy_in(storage), form), patches, resident)
        for form in (ResidentForm.COMPUTE, ResidentForm.STORED)
        for resident in (True, False)
    ]
    if patched and storage == "float8_e4m3fn":  # stored, a LoRA is a product next to the layer
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[2], results[3])
        torch.testing.assert_close(results[2], results[0], rtol=1e-4, atol=1e-4)
        return
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_lora_on_a_plain_8_bit_layer_converts_nothing_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did at each layer and step of files with plain 8-bit floats, which stay stored on GPUs."""
    toy = toy_in("float8_e4m3fn")
    patches = patches_for(make_toy(), "a", ("wide.weight",), 0.7)
    patcher = patcher_of(toy, ResidentForm.STORED)
    applied: list[object] = []
    monkeypatch.setattr(cast_module, "apply_weight_functions", lambda *args, **kwargs: applied.append(args))
    patched = output(patcher, patches, True)
    assert "_low_rank_path" in toy.wide.__dict__
    assert not applied
    assert not torch.equal(patched, output(patcher, PatchSet(), True))


@pytest.mark.parametrize("storage", STORAGES)
def test_merging_into_the_storage_format_rounds_and_stays_near(storage: str) -> None:
    patches = patches_for(make_toy(), "a", WEIGHTS, 0.7)
    exact = output(patcher_of(toy_in(storage), ResidentForm.COMPUTE), patches, True)
    patcher = patcher_of(toy_in(storage), ResidentForm.STORED_MERGED)
    unpatched = output(patcher, PatchSet(), True)
    merged = output(patcher, patches, True)
    error = (merged - exact).norm() / exact.norm()
    assert 0 < error < (0.01 if storage == "float16" else 0.15)
    assert torch.equal(merged, output(patcher_of(toy_in(storage), ResidentForm.STORED_MERGED), patches, True))
    assert torch.equal(output(patcher, PatchSet(), True), unpatched)


def test_a_lora_on_a_packed_layer_is_a_product_beside_it() -> None:
    """And equals the same LoRA added to the unpacked weight, but for the order of additions."""
    toy = toy_in("packed")
    patches = patches_for(make_toy(), "a", ("wide.weight",), 0.7)
    patcher = patcher_of(toy, ResidentForm.COMPUTE)
    result = output(patcher, patches, True)
    assert "_low_rank_path" in toy.wide.__dict__
    plain = toy_in("packed")
    for name in LINEARS:
        layer = plain.get_submodule(name)
        unpacked = layer._parameters["weight"].unpack(torch.float32)
        layer._parameters["weight"] = nn.Parameter(unpacked, requires_grad=False)
    expected = output(patcher_of(plain, ResidentForm.COMPUTE), patches, True)
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(result, output(patcher, PatchSet(), True))
    assert "_low_rank_path" not in toy.wide.__dict__


class OwnForward(nn.Linear):
    """A linear layer that does not compute as torch's, so that it keeps its own forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) * 2


class Reader(nn.Module):
    """Attention of torch's own, which reads the weight of a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize(
    ("make", "parameter"), [(lambda: OwnForward(16, 16), "weight"), (Reader, "attention.out_proj.weight")]
)
def test_a_lora_on_a_packed_weight_reaches_code_that_does_not_call_the_layer(make, parameter: str) -> None:
    torch.manual_seed(0)
    module = make().eval().requires_grad_(False)
    owner, _, name = parameter.rpartition(".")
    layer = module.get_submodule(owner)
    packed = quantize(layer._parameters[name].float(), "float8_e4m3fn")
    layer._parameters[name] = nn.Parameter(packed, requires_grad=False)
    patch = make_patch(parameter, tuple(packed.shape), "a")
    x = torch.randn(2, 3, 16)
    results = []
    for patches in (PatchSet(), PatchSet((patch,))):
        patcher = ModelPatcher.of(
            ComponentKey("m"), Role.DIFFUSION_MODEL, module, torch.device("cpu"), WeightForm(torch.float32)
        )
        patcher.realize(WeightsTarget(frozenset(), patches))
        with patcher.running() as running:
            results.append(running(x))
    assert not torch.allclose(results[0], results[1])


def test_a_lora_beside_a_layer_takes_no_second_tensor_of_the_results_size() -> None:
    """What a run needs at most is the same with and without it, but for the factors and the thin product."""
    peaks = []
    for patches in (PatchSet(), patches_for(make_toy(), "a", ("wide.weight",))):
        layer = nn.Linear(16, 64).requires_grad_(False)
        layer._parameters["weight"] = nn.Parameter(quantize(layer.weight, "float8_e4m3fn"), requires_grad=False)
        toy = nn.ModuleDict({"wide": layer})
        patcher = ModelPatcher.of(
            ComponentKey("m"), Role.DIFFUSION_MODEL, toy, torch.device(DEVICE), WeightForm(torch.float32)
        )
        patcher.realize(WeightsTarget(frozenset({"wide"}), patches))
        x = torch.randn(4096, 16).to(DEVICE)
        sim.reset_peak(0)
        with patcher.running() as module:
            module["wide"](x)
        peaks.append(sim.memory_stats(0).peak_bytes)
        patcher.unload()
    rank, result_bytes = 2, 4096 * 64 * 4
    assert peaks[1] - peaks[0] <= 4096 * rank * 4 + 4 * rank * (64 + 16) < result_bytes // 4


@each_case("resident", [True, False], ids=["resident", "streamed"])
@each_case("storage", [*STORAGES, "int8"])
@each_case("form", ResidentForm)
def test_bringing_patched_weights_in_takes_no_more_than_is_promised(
    form: ResidentForm, storage: str, resident: bool
) -> None:
    """Resident weights and the scratch of the hungriest module."""
    torch.manual_seed(0)
    wide = nn.Linear(256, 512, bias=False).requires_grad_(False)
    if storage in ("packed", "int8"):
        stored = quantize(wide.weight, "float8_e4m3fn" if storage == "packed" else "int8_tensorwise")
    else:
        stored = wide.weight.to(getattr(torch, storage))
    wide._parameters["weight"] = nn.Parameter(stored, requires_grad=False)
    patcher = ModelPatcher.of(
        ComponentKey("m"), Role.DIFFUSION_MODEL, nn.ModuleDict({"wide": wide}), torch.device(DEVICE),
        WeightForm(torch.float32, form),
    )  # fmt: skip
    patcher.patches = PatchSet((make_patch("wide.weight", (512, 256), "a"),))
    x = torch.randn(1, 256).to(DEVICE)
    sim.reset_peak(0)
    patcher.realize(WeightsTarget(frozenset({"wide"}) if resident else frozenset(), patcher.patches))
    with patcher.running() as module:
        module["wide"](x)
    promised = (patcher.spec().weight_bytes if resident else 0) + patcher.use().scratch_bytes
    assert sim.memory_stats(0).peak_bytes <= promised + 8 * (256 + 512) * 4


def test_the_scratch_of_an_embedding_is_what_its_load_takes() -> None:
    """A doubt of a review: its rows are gathered on the host, so a table that streams needs none. One that is loaded in
    another dtype does."""
    ids = torch.arange(7).to(DEVICE)
    for storage, scratch in ((torch.float16, 1000 * 64 * 2), (torch.float32, 0)):
        table = nn.Embedding(1000, 64, dtype=storage).requires_grad_(False)
        patcher = ModelPatcher.of(
            ComponentKey("m"), Role.TEXT_ENCODER, table, torch.device(DEVICE), WeightForm(torch.float32)
        )
        assert patcher.use().scratch_bytes == scratch
        sim.reset_peak(0)
        used_bytes = sim.memory_stats(0).used_bytes
        with patcher.running() as module:
            rows = module(ids)
        assert sim.memory_stats(0).peak_bytes - used_bytes <= 2 * rows.nbytes
        del rows
        sim.reset_peak(0)
        patcher.realize(WeightsTarget(frozenset(owner.name for owner in patcher.modules()), PatchSet()))
        assert sim.memory_stats(0).peak_bytes - used_bytes == patcher.spec().weight_bytes + scratch
        patcher.unload()
