"""Estimates of activations against the exact books of a simulated device.

Proves: for every architecture of the zoo, in float32 and bfloat16, the estimate is never below what was held and at
most a few percent above, and the dry run that makes it leaves no trace on the module; attention in plain operations
counts as it allocates; what each stage of an image holds, whole and divided, is estimated within a narrow band.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.weights.tracing.activation_bytes import GPU_MARGIN_BYTES, attention_form, peak_bytes, with_margin
from modelpool.pool.weights.tracing.dry_run import META, AttentionForm, dry_run
from tests.pool.zoo import FAMILIES, build
from tests.pool.zoo.peaks import call_on_meta, estimated_bytes, peaks_of
from tests.pool.zoo.sizes import sizes_of

INDEX = 59  # of a simulated device that no other test uses
#: an estimate is at most so much above the truth: a mixture of experts is counted as if all tokens chose the same ones
MOST_OVER = 0.10


@pytest.fixture(scope="module")
def device() -> torch.device:
    sim.install()
    sim.configure(INDEX, 1 << 28)
    return torch.device("sim", INDEX)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_estimate_is_under_or_far_over(family: str, device: torch.device) -> None:
    case, errors = build(family), {}
    for dtype in (torch.float32, torch.bfloat16):
        errors[dtype] = peaks_of(case, {"as built": case.inputs}, dtype, device)["as built"].error
    assert {which: error for which, error in errors.items() if not 0.0 <= error <= MOST_OVER} == {}


@pytest.mark.parametrize("family", ["unet", "flux2", "wan", "vae_hunyuan", "llama"])
def test_estimates_follow_batch_and_size(family: str, device: torch.device) -> None:
    case = build(family)
    sizes = sizes_of(family, case)
    peaks = peaks_of(case, sizes, torch.float32, device)
    assert all(0.0 <= peak.error <= MOST_OVER for peak in peaks.values()), peaks
    assert all(peaks[name].estimated_bytes > peaks["as built"].estimated_bytes for name in sizes if name != "as built")


@pytest.mark.parametrize("family", ["zimage", "vae_oobleck", "vae_wan", "hidream", "unet"])
def test_a_dry_run_leaves_no_trace(family: str) -> None:
    """Some modules keep tables that they made: tensors of a dry run would hold no numbers."""
    case = build(family)
    expected = build(family).run()
    before = {name: type(m) for name, m in case.module.named_modules()}
    first = estimated_bytes(case.module, case.inputs, torch.float32)
    assert {name: type(m) for name, m in case.module.named_modules()} == before
    assert estimated_bytes(case.module, case.inputs, torch.float32) == first
    assert not any(t.is_meta for m in case.module.modules() for t in m.__dict__.values() if isinstance(t, Tensor))
    found = case.run()
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def test_a_dry_run_that_fails_leaves_no_trace_either() -> None:
    case = build("unet")
    before = [type(m) for m in case.module.modules()]

    def call(module: nn.Module) -> None:
        module.conv_in.kept = torch.empty(3, device=META)
        raise KeyError("as if the module could not take its input")

    with pytest.raises(KeyError):
        peak_bytes(case.module, torch.float32, call)
    assert [type(m) for m in case.module.modules()] == before
    assert "kept" not in case.module.conv_in.__dict__
    assert torch.autocast.__name__ == "autocast"


class Attending(nn.Module):
    """Attention over what it is given, and nothing else."""

    def forward(self, x_BHLE: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query=x_BHLE, key=x_BHLE, value=x_BHLE)


class AttendingInParts(nn.Module):
    """The same by torch's own plain operations."""

    def forward(self, x_BHLE: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_attention_math(x_BHLE, x_BHLE, x_BHLE)[0]


@pytest.mark.parametrize("length", [16, 64])
def test_attention_counts_as_the_kernel_allocates(length: int, device: torch.device) -> None:
    shape_BHLE = (2, 3, length, 8)
    input_bytes, scores_bytes = 4 * 2 * 3 * length * 8, 4 * 2 * 3 * length * length

    def call(module: nn.Module) -> object:
        return module(torch.empty(shape_BHLE, device=META))

    fused = peak_bytes(Attending(), torch.float32, call)
    math = peak_bytes(Attending(), torch.float32, call, AttentionForm.MATH)
    assert fused == 2 * input_bytes
    assert math >= fused + scores_bytes
    before_bytes = sim.memory_stats(INDEX).used_bytes
    sim.reset_peak(INDEX)
    with torch.no_grad():
        AttendingInParts()(torch.ones(shape_BHLE, device=device))
    assert math == sim.memory_stats(INDEX).peak_bytes - before_bytes


def test_kinds_without_fused_attention_count_the_scores() -> None:
    assert attention_form("cuda") is AttentionForm.FUSED
    assert attention_form("mps") is AttentionForm.MATH
    # Found in a review: kinds of which nothing is known counted as if their kernels held no scores
    assert {k.value for k in DeviceKind if attention_form(k.value) is AttentionForm.FUSED} == {"cuda", "sim", "cpu"}


def test_gpus_get_a_margin_and_simulated_ones_none() -> None:
    assert with_margin(1000, "sim") == with_margin(1000, "cpu") == 1000
    assert with_margin(1000, "cuda") == with_margin(1000, "rocm") == 1250 + GPU_MARGIN_BYTES


class Reading(nn.Module):
    """Code that reads numbers, as models that pack sequences do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: tuple[object, ...] = ()

    def forward(self, mask_BL: Tensor) -> Tensor:
        lengths = mask_BL.sum(dim=1)
        positions = torch.arange(int(lengths.max()), device=mask_BL.device)
        taken = torch.ones(mask_BL.shape, device=mask_BL.device)[mask_BL]
        counts = torch.bincount(torch.tensor([0, 0, 2], device=mask_BL.device)).cpu().tolist()
        SEEN.append((lengths.tolist(), bool((positions == 0).any()), tuple(taken.shape), counts))
        written = torch.zeros(2, dtype=torch.long, device=mask_BL.device)
        written[0] = lengths[1]
        SEEN.append(written.tolist())
        return taken


SEEN: list[object] = []


def test_small_whole_numbers_and_masks_can_be_read() -> None:
    mask_BL = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    SEEN.clear()
    dry_run(Reading(), torch.float32, lambda module: module(mask_BL.to(META)))
    assert SEEN == [([2, 3], True, (5,), [2, 0, 1]), [3, 0]]


def test_numbers_that_cannot_be_known_are_refused_not_invented() -> None:
    def call(module: nn.Module) -> object:
        x = torch.empty(4, device=META)
        return int((x > 0).sum())

    with pytest.raises(RuntimeError):
        dry_run(Attending(), torch.float32, call)


def test_the_call_helper_keeps_the_values_of_whole_numbers() -> None:
    found: list[object] = []

    class Keeping(nn.Module):
        def forward(self, ids: Tensor, x: Tensor) -> None:
            found.append((ids.tolist(), x.dtype, x.device.type))

    inputs = {"ids": torch.tensor([5, 7]), "x": torch.ones(3)}
    dry_run(Keeping(), torch.bfloat16, call_on_meta(inputs, torch.bfloat16))
    assert found == [([5, 7], torch.bfloat16, "meta")]
