"""Models merge as ComfyUI's merge nodes do, with the patches that each has."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.values.core.errors import AdapterMismatch, PatchFailed
from modelpool.pool.values.specs.spec import UNPATCHED, ComponentKey, Role
from modelpool.pool.weights.ops.cast import apply_weight_functions
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.model_merging import ModelWeights, add, blend, merge, model_as_lora, subtract
from modelpool.pool.weights.patches.patch_set import LowRank, PatchSet, WeightPatch
from modelpool.pool.weights.quant.quantize import quantize
from tests.pool.toy import make_toy, patches_for

TOUCHED = ("wide.weight", "conv.weight")


def weights(seed: int) -> dict[str, Tensor]:
    return {name: p.data for name, p in make_toy(seed).named_parameters()}


def patched(own: Mapping[str, Tensor], patches: PatchSet) -> dict[str, Tensor]:
    cpu = torch.device("cpu")
    patches.check({name: tuple(w.shape) for name, w in own.items()})
    return {n: apply_weight_functions(w, patches.functions(n), cpu, torch.float32) for n, w in own.items()}


def other_model() -> ModelWeights:
    """Another toy with a LoRA on two of its weights."""
    return ModelWeights.of("other", weights(1), patches_for(make_toy(1), "lora", TOUCHED))


def test_the_four_merges() -> None:
    one, other = weights(0), other_model()
    theirs = patched(other.weights, other.patches)
    expected = {
        "blend": (blend(other, 0.25), lambda w, o: 0.75 * w + 0.25 * o),
        "add": (add(other), lambda w, o: w + o),
        "subtract": (subtract(other, 0.5), lambda w, o: 0.5 * (w - o)),
        "merge": (merge(other, 2.0, -1.0), lambda w, o: 2 * o - w),
    }
    for name, (patches, rule) in expected.items():
        for parameter, result in patched(one, PatchSet(patches)).items():
            assert torch.allclose(result, rule(one[parameter].float(), theirs[parameter]), atol=1e-6), (name, parameter)


def test_difference_of_two_added_to_a_third() -> None:
    """Train a model by adding what training made of another: nested twice."""
    base, trained, third = weights(0), other_model(), weights(2)
    learned = ModelWeights("learned", trained.weights, PatchSet(()), {})
    difference = ModelWeights("difference", learned.weights, PatchSet(subtract(ModelWeights.of("base", base))), {})
    result = patched(third, PatchSet(add(difference)))
    for name, weight in third.items():
        expected = weight.float() + trained.weights[name].float() - base[name].float()
        assert torch.allclose(result[name], expected, atol=1e-6), name


def test_a_model_as_lora() -> None:
    base, trained = weights(0), other_model()
    half = patched(base, PatchSet(model_as_lora(trained, base, 0.5)))
    whole = patched(base, PatchSet(model_as_lora(trained, base)))
    for name, weight in base.items():
        assert torch.allclose(half[name], torch.lerp(weight.float(), trained.weights[name].float(), 0.5), atol=1e-6)
        assert torch.allclose(whole[name], trained.weights[name].float(), atol=1e-6)


def test_the_original_is_what_it_was_before_other_patches() -> None:
    """The difference to another model does not shrink by a LoRA that comes first."""
    base, trained = weights(0), other_model()
    lora = patches_for(make_toy(0), "first", ("wide.weight",))
    together = patched(base, lora.with_patches(model_as_lora(trained, base)))["wide.weight"]
    apart = patched(base, lora)["wide.weight"] + trained.weights["wide.weight"].float() - base["wide.weight"].float()
    assert torch.allclose(together, apart, atol=1e-6)


def test_digests_know_what_is_nested() -> None:
    plain = ModelWeights.of("other", weights(1))
    assert PatchSet(blend(plain, 0.5)).digest != PatchSet(blend(other_model(), 0.5)).digest
    assert PatchSet(blend(plain, 0.0)).digest == UNPATCHED
    untouched = ["narrow.weight"]
    digests = {PatchSet(blend(m, 0.5)).digest_for(untouched) for m in (plain, other_model())}
    assert len(digests) == 1


def test_quantized_weights_are_converted_first() -> None:
    stored = torch.randint(-100, 100, (4, 4), dtype=torch.int8)
    other = ModelWeights("q", {"w": stored}, PatchSet(()), {"w": lambda q: q.float() * 0.5})
    result = patched({"w": torch.ones(4, 4)}, PatchSet(add(other)))["w"]
    assert torch.equal(result, 1 + stored.float() * 0.5)
    plain = ModelWeights.of("q", {"w": stored})
    assert add(plain) == ()


def test_weights_that_are_not_there_or_do_not_fit() -> None:
    other = ModelWeights.of("other", {"w": torch.ones(3, 3)})
    with pytest.raises(AdapterMismatch, match="model 'other' has no 'v'"):
        add(other, ["w", "v"])
    with pytest.raises(PatchFailed, match=r"the other weight, patched, has shape \(3, 3\), expected \(4, 3\)"):
        patched({"w": torch.ones(4, 3)}, PatchSet(add(other)))


def test_nested_patches_do_not_write_to_the_other_model() -> None:
    own = {"w": torch.ones(4, 4)}
    inner = WeightPatch("w", "x", LowRank(torch.ones(4, 1), torch.ones(1, 4), 1.0))
    other = ModelWeights.of("other", {"w": torch.ones(4, 4)}, PatchSet((inner,)))
    assert torch.equal(patched(own, PatchSet(add(other)))["w"], torch.full((4, 4), 3.0))
    assert torch.equal(other.weights["w"], torch.ones(4, 4))


@pytest.mark.parametrize("with_lora", [True, False])
def test_a_quantized_model_of_float32_is_a_patch_value_elsewhere(with_lora: bool) -> None:
    """Its packed weight stands for float32, in which patches are computed: it is unpacked all the same."""
    toy, name = make_toy(1, torch.float32), "wide.weight"
    packed = quantize(toy.wide.weight.data, "int8_tensorwise")
    assert packed.dtype is torch.float32
    toy.wide.weight = nn.Parameter(packed, requires_grad=False)
    form, cpu = WeightForm(torch.float32), torch.device("cpu")
    other = ModelPatcher.of(ComponentKey("other"), Role.DIFFUSION_MODEL, toy, cpu, form)
    if with_lora:
        other.add_patches(patches_for(toy, "lora", (name,)).patches)
    theirs = packed.unpack(torch.float32)
    for function in other.patches.functions(name):
        theirs = function(theirs)
    one = ModelPatcher.of(ComponentKey("one"), Role.DIFFUSION_MODEL, make_toy(0), cpu, form)
    assert one.add_patches(other.get_key_patches(name), 0.3, 0.7) == (name,)
    own = make_toy(0).wide.weight.data.float()
    (function,) = one.patches.functions(name)
    found = function(own.clone())
    assert type(found) is Tensor
    torch.testing.assert_close(found, own * 0.7 + theirs * 0.3)
