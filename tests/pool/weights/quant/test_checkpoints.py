"""A checkpoint with a quantized diffusion model opens, builds over the mapped file, and draws the same image.

Proves, on copies of the shapes model: layers stay packed, their bytes are the file's, images are near the original's
and the same bytes on cpu and on sim whatever the budget; LoRAs apply; and that what cannot stay packed
becomes values.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.shapes.checker import matches, read_image
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.describe import describe
from modelpool.pool.values.core.errors import BadQuantization
from modelpool.pool.values.core.joining import why_single
from modelpool.pool.values.core.stage_params import (
    BatchMember,
    DecodeParams,
    EncodeParams,
    GuidanceParams,
    ImagePixels,
    Latent,
    OutputShape,
    Result,
    RunHooks,
    SampleParams,
    SamplingSchedule,
    StageParams,
    stage_of,
)
from modelpool.pool.values.specs.spec import Role, TaskId, TaskSpec
from modelpool.pool.values.specs.wire_value import evolve
from modelpool.pool.weights.ops.packed import PackedWeight, stored_bytes
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.pool.weights.quant.marked_codec import QuantCodec
from modelpool.pool.weights.quant.quantize import PER_ROW, quantize
from modelpool.pool.weights.quant.state_dict import load, save
from tests.pool.input_names import inputs_of
from tests.pool.pipeline import open_engine

SHAPES = Path(__file__).resolve().parents[4] / "examples" / "shapes"
UNET = "model.diffusion_model."
PROMPT = "a red circle"
QUIET = RunHooks(on_step=lambda done, steps: None, should_stop=lambda: False)
PLENTY_BYTES = 256 << 20
FORMS: dict[str, tuple[str, dict[str, object]]] = {
    "fp8": ("float8_e4m3fn", {}),
    "int8": ("int8_tensorwise", {PER_ROW: True}),
    "mxfp8": ("mxfp8", {}),
}


def quantized(tensors: dict[str, Tensor], name: str, settings: dict[str, object]) -> dict[str, Tensor]:
    """`tensors` with every matrix of the UNet's blocks in a format, as published."""
    chosen = {
        key: quantize(tensor, name, settings)
        for key, tensor in tensors.items()
        if key.startswith(UNET) and key.endswith(".weight") and ".transformer_blocks." in key and tensor.dim() == 2
    }
    return save({**tensors, **chosen})


@pytest.fixture(scope="module")
def original() -> dict[str, Tensor]:
    return load_file(SHAPES / "models" / "shapes.safetensors")


def test_a_file_whose_kernels_scale_inputs_by_the_pass_has_no_batch_size(
    tmp_path: Path, original: dict[str, Tensor]
) -> None:
    """Found in a review: NVFP4 kernels scale inputs by the largest of all rows, unless the file has a scale for them:
    an image had other bytes beside others, in passes of one size, too."""
    for name, is_scaled, device, is_refused in (
        ("nvfp4", False, "cuda", True),
        ("nvfp4", True, "cuda", False),
        ("float8_e4m3fn", False, "cuda", False),
        ("nvfp4", False, "cpu", False),
        ("nvfp4", False, "sim", False),
    ):
        save_nvfp4(tmp_path, original, name, is_scaled)
        for known in (True, False):  # a pool of any devices may have cards, whatever this machine has
            catalog = Catalog([tmp_path], [], device, device_is_known=known)
            facts, work = catalog.model_defaults(catalog.find_model("shapes")).sampling, sampling(catalog)
            expected = is_refused or (name == "nvfp4" and not is_scaled and not known)
            assert bool(why_single(work, facts)) == expected, (name, is_scaled, device, known)
        (tmp_path / "shapes.safetensors").unlink()


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_on_hosts_such_a_file_has_equal_bytes_beside_any_others(
    tmp_path: Path, original: dict[str, Tensor], device: str
) -> None:
    """They were refused there, too, though no CPU multiplies NVFP4."""
    save_nvfp4(tmp_path, original, "nvfp4", is_scaled=False)
    catalog = Catalog([tmp_path], [], device)
    engine = open_engine(device, PLENTY_BYTES)
    model, size = catalog.find_model("shapes"), 4
    texts: list[Result] = []
    for text in (PROMPT, "", "a green star", "two blue squares"):
        work = EncodeParams(model, (), text)
        texts.append(engine.run(task(catalog, work), work, {}, QUIET)[0])
    members = []
    for seed, prompt in enumerate((texts[0], texts[2], texts[3])):
        sample = evolve(sampling(catalog), seed=seed, batch_size=size)
        asked = evolve(task(catalog, sample), batch_size=size)
        members.append(BatchMember(asked, sample, inputs_of(sample, prompt, texts[1]), QUIET))
    beside = [outcome[0] for outcome in engine.run_batch(members) if not isinstance(outcome, Exception)]
    alone = [
        outcome[0] for each in members for outcome in engine.run_batch([each]) if not isinstance(outcome, Exception)
    ]
    assert len(beside) == len(alone) == len(members)
    for one, other in zip(beside, alone, strict=True):
        assert isinstance(one, Latent)
        assert isinstance(other, Latent)
        np.testing.assert_array_equal(one.samples_CHW, other.samples_CHW)
    engine.close()


def save_nvfp4(folder: Path, original: dict[str, Tensor], name: str, is_scaled: bool) -> None:
    """The example model quantized to this format, with a scale of the inputs of each layer if `is_scaled`."""
    tensors = quantized(original, name, {})
    if is_scaled:
        keys = [key.removesuffix("weight_scale") for key in tensors if key.endswith(".weight_scale")]
        tensors |= {f"{key}input_scale": torch.ones(()) for key in keys}
    save_file(tensors, folder / "shapes.safetensors", {"modelspec.resolution": "64x64"})


def sampling(catalog: Catalog) -> SampleParams:
    """A short run of the file."""
    model, schedule = catalog.find_model("shapes"), SamplingSchedule(2, "euler", "normal")
    return SampleParams(model, (), OutputShape(64, 64), schedule, GuidanceParams(2.0), 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, original: dict[str, Tensor]) -> Path:
    path = tmp_path_factory.mktemp("quantized")
    for form, (name, settings) in FORMS.items():
        save_file(quantized(original, name, settings), path / f"{form}.safetensors", {"modelspec.resolution": "64x64"})
    return path


@pytest.fixture(scope="module")
def catalog(folder: Path) -> Catalog:
    return Catalog([folder, SHAPES / "models"], [SHAPES / "loras"], "sim")


def draw(catalog: Catalog, name: str, device: str, budget_bytes: int | None = None, lora: str = "") -> np.ndarray:
    """The image of PROMPT; a budget of None is enough for all, 0 the least that will do."""
    model = catalog.find_model(name)
    loras = (catalog.find_lora(lora, 1.0),) if lora else ()
    sample = SampleParams(
        model, loras, OutputShape(64, 64), SamplingSchedule(8, "euler", "normal"), GuidanceParams(4.0), 7
    )
    works = (
        EncodeParams(model, loras, PROMPT),
        EncodeParams(model, loras, ""),
        sample,
        DecodeParams(model, OutputShape(64, 64)),
    )
    tasks = [task(catalog, work) for work in works]
    if budget_bytes == 0:
        budget_bytes = max(needed_bytes(t.uses, t.activation_bytes) for t in tasks)
    if device == "sim":
        sim.install()
        sim.configure(0, budget_bytes or PLENTY_BYTES)
        sim.reset_peak(0)
    engine = Engine.open(EngineSettings(device, 0, budget_bytes or PLENTY_BYTES))
    try:
        encoded = tuple(engine.run(tasks[i], works[i], {}, QUIET)[0] for i in (0, 1))
        latent: Result = engine.run(tasks[2], sample, inputs_of(sample, *encoded), QUIET)[0]
        image = engine.run(tasks[3], works[3], {"latent": latent}, QUIET)[0]
    finally:
        engine.close()
    assert isinstance(image, ImagePixels)
    if device == "sim":
        assert sim.memory_stats(0).used_bytes == 0
        assert sim.memory_stats(0).peak_bytes <= (budget_bytes or PLENTY_BYTES)
    return image.pixels_HWC


def task(catalog: Catalog, work: StageParams) -> TaskSpec:
    role = {"encode": Role.TEXT_ENCODER, "sample": Role.DIFFUSION_MODEL, "decode": Role.VAE}[stage_of(work).value]
    loras = () if isinstance(work, DecodeParams) else work.loras
    use = catalog.use(work.model, role, loras, work.schedule.steps if isinstance(work, SampleParams) else 1)
    activation_bytes = catalog.figures.activation_bytes(work.model, work)
    return TaskSpec(TaskId(f"{stage_of(work).value}"), stage_of(work), (use,), activation_bytes, 0.1)


@pytest.fixture(scope="module")
def plain(catalog: Catalog) -> np.ndarray:
    return draw(catalog, "shapes", "cpu")


@pytest.mark.parametrize("form", FORMS)
def test_weights_stay_packed_over_the_file(folder: Path, original: dict[str, Tensor], form: str) -> None:
    checkpoint = open_checkpoint(folder / f"{form}.safetensors")
    module = checkpoint.build(Role.DIFFUSION_MODEL).module
    packed = {name: p for name, p in module.named_parameters() if isinstance(p.data, PackedWeight)}
    assert len(packed) == len(checkpoint.layers) > 20
    assert checkpoint.quantization(Role.DIFFUSION_MODEL) == {FORMS[form][0]: len(packed)}
    assert checkpoint.quantization(Role.VAE) == {}
    key = UNET + "input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight"
    found = module.get_parameter("down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q.weight")
    assert isinstance(found, PackedWeight)
    assert found.parts["weight"].data_ptr() == checkpoint.mapped.tensor(key).data_ptr()
    error = (found.unpack(torch.float32) - original[key].float()).norm() / original[key].float().norm()
    assert error < 0.04
    info = next(c for c in describe(folder / f"{form}.safetensors").components if c.role is Role.DIFFUSION_MODEL)
    assert info.dtypes[FORMS[form][0]] >= sum(stored_bytes(p) for p in packed.values())
    whole = next(c for c in describe(SHAPES / "models" / "shapes.safetensors").components if c.role is info.role)
    assert info.tensors == whole.tensors
    padding = sum(np.prod(layer.shape) for layer in checkpoint.layers.values()) - sum(
        p.numel() for p in packed.values()
    )
    assert info.parameters - whole.parameters == padding
    assert bool(padding) == (form == "mxfp8")


@pytest.mark.parametrize("form", FORMS)
def test_the_image_is_near_the_originals_and_the_same_everywhere(
    catalog: Catalog, plain: np.ndarray, form: str
) -> None:
    image = draw(catalog, form, "cpu")
    difference = np.abs(image.astype(int) - plain.astype(int))
    assert 0 < difference.mean() < 6
    assert np.array_equal(draw(catalog, form, "sim"), image)
    assert np.array_equal(draw(catalog, form, "sim", 0), image)


@pytest.mark.parametrize("form", FORMS)
def test_the_image_still_shows_what_its_prompt_says(catalog: Catalog, form: str) -> None:
    assert matches(read_image(draw(catalog, form, "cpu")), PROMPT)


def test_a_lora_draws_the_same_on_quantized_weights(catalog: Catalog, plain: np.ndarray) -> None:
    wanted, drawn = (draw(catalog, name, "cpu", lora="light") for name in ("shapes", "int8"))
    difference = float(np.abs(wanted.astype(int) - drawn.astype(int)).mean())
    change = float(np.abs(wanted.astype(int) - plain.astype(int)).mean())
    assert difference < change / 4
    assert np.array_equal(draw(catalog, "int8", "sim", 0, lora="light"), drawn)


def test_older_files_open_as_newer_ones_do(tmp_path: Path, folder: Path, catalog: Catalog) -> None:
    """The same bytes under the older names: `scale_weight` beside each weight, one mark for the whole model."""
    newer = load_file(folder / "fp8.safetensors")
    older = {
        key.removesuffix("weight_scale") + "scale_weight" if key.endswith(".weight_scale") else key: tensor
        for key, tensor in newer.items()
        if not key.endswith(".comfy_quant")
    }
    older[UNET + "scaled_fp8"] = torch.zeros(0, dtype=torch.float32)
    save_file(older, tmp_path / "older.safetensors", {"modelspec.resolution": "64x64"})
    first, second = (open_checkpoint(path) for path in (folder / "fp8.safetensors", tmp_path / "older.safetensors"))
    assert first.layers.keys() == second.layers.keys()
    ours, theirs = (c.build(Role.DIFFUSION_MODEL).module.state_dict() for c in (first, second))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


REFUSED = {
    "no scale": ("to_q.weight_scale", None, "to_q.weight_scale': found nothing, expected the weight_scale of a float8"),
    "no weight": ("to_q.weight", None, "to_q.comfy_quant': marks a layer without a weight"),
    "scale shape": ("to_q.weight_scale", torch.ones(5), r"to_q.weight_scale': found shape \(5,\)"),
    "huge marker": ("to_q.comfy_quant", torch.zeros(1 << 17, dtype=torch.uint8), "to_q.comfy_quant': found 128.0 KiB"),
    "marker": ("to_q.comfy_quant", torch.tensor([123], dtype=torch.uint8), "to_q.comfy_quant': .*expected JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_damaged_file_is_refused_by_name_and_listed_with_its_problem(tmp_path: Path, folder: Path, case: str) -> None:
    ending, replacement, message = REFUSED[case]
    tensors = load_file(folder / "fp8.safetensors")
    key = next(key for key in sorted(tensors) if key.endswith(ending))
    if replacement is None:
        del tensors[key]
    else:
        tensors[key] = replacement
    save_file(tensors, tmp_path / "damaged.safetensors")
    with pytest.raises(BadQuantization, match=rf"damaged\.safetensors: '{UNET}.*{message}"):
        open_checkpoint(tmp_path / "damaged.safetensors")
    [listed] = Catalog([tmp_path], [], "cpu").models()
    assert "damaged.safetensors" in listed.problem


def test_scales_without_a_marker_are_applied_under_every_known_name_and_refused_under_others(
    tmp_path: Path, folder: Path
) -> None:
    marked = load_file(folder / "fp8.safetensors")
    expected = open_checkpoint(folder / "fp8.safetensors").build(Role.DIFFUSION_MODEL).module.state_dict()
    path = tmp_path / "unmarked.safetensors"
    for name in ("weight_scale", "weight_scale_inv", "scale_weight"):
        save_file(renamed_scales(marked, name), path)
        found = open_checkpoint(path).build(Role.DIFFUSION_MODEL).module.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in found), name
    for name in ("scales", "weight.scale", "weight_zero_point", "qscale"):
        save_file(renamed_scales(marked, name), path)
        with pytest.raises(BadQuantization, match=rf"unmarked\.safetensors: '.*\.weight': .* beside '.*\.{name}'"):
            open_checkpoint(path).build(Role.DIFFUSION_MODEL)


def renamed_scales(marked: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """`marked` without its markers, with another name for the scale of each weight."""
    return {
        key.removesuffix("weight_scale") + name if key.endswith(".weight_scale") else key: tensor
        for key, tensor in marked.items()
        if not key.endswith(".comfy_quant")
    }


ATTENTION = "decoder.mid_block.attentions.0.to_q.weight"


def quantized_vae(tensors: dict[str, Tensor], name: str, settings: dict[str, object]) -> dict[str, Tensor]:
    """`tensors` with every weight of the VAE in a format."""
    chosen = {
        key: quantize(tensor.float(), name, settings)
        for key, tensor in tensors.items()
        if key.startswith("first_stage_model.") and key.endswith(".weight") and tensor.dim() > 1
    }
    return save({**tensors, **chosen})


@pytest.mark.parametrize("form", ["fp8", "int8", "fp8 rows"])
def test_a_vae_that_is_quantized_throughout_stays_packed_and_decodes(
    tmp_path: Path, original: dict[str, Tensor], form: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its attention is a convolution in the file and a matrix in the module."""
    name, settings = {**FORMS, "fp8 rows": ("float8_e4m3fn", {PER_ROW: True})}[form]
    assert original["first_stage_model.decoder.mid.attn_1.q.weight"].dim() == 4
    tensors = quantized_vae(original, name, settings)
    save_file(tensors, tmp_path / "vae.safetensors", {"modelspec.resolution": "64x64"})
    checkpoint = open_checkpoint(tmp_path / "vae.safetensors")
    built = checkpoint.build(Role.VAE)
    packed = {n: p for n, p in built.module.named_parameters() if isinstance(p.data, PackedWeight)}
    assert len(packed) == len(checkpoint.layers)
    assert packed[ATTENTION].dim() == 2
    assert not caplog.records
    saved = save(built.key_map.save(built.module.state_dict()))
    assert all(
        torch.equal(saved[key].float(), tensors[key].float()) and saved[key].shape == tensors[key].shape
        for key in saved
    )
    plain = {
        key: tensor.unpack(torch.float16) if isinstance(tensor, PackedWeight) else tensor
        for key, tensor in load(tensors).items()
    }
    save_file(plain, tmp_path / "plain.safetensors", {"modelspec.resolution": "64x64"})
    catalog = Catalog([tmp_path], [], "sim")
    expected = draw(catalog, "plain", "cpu")
    assert np.abs(draw(catalog, "vae", "cpu").astype(int) - expected.astype(int)).max() <= 2
    assert np.array_equal(draw(catalog, "vae", "sim", 0), draw(catalog, "vae", "cpu"))


def test_weights_in_a_form_that_their_format_does_not_have_become_values_and_are_told(
    tmp_path: Path, original: dict[str, Tensor], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = quantized_vae(original, "float8_e4m3fn", {})
    save_file(tensors, tmp_path / "vae.safetensors")
    monkeypatch.setattr(QuantCodec, "reshaped", lambda *_: None)
    module = open_checkpoint(tmp_path / "vae.safetensors").build(Role.VAE).module
    weight, key = module.get_parameter(ATTENTION), "first_stage_model.decoder.mid.attn_1.q.weight"
    assert not isinstance(weight, PackedWeight)
    packed = load(tensors)[key]
    assert isinstance(packed, PackedWeight)
    assert torch.equal(weight, packed.unpack(torch.bfloat16).squeeze())
    [record] = caplog.records
    assert "vae.safetensors: 8 quantized weights are unpacked to torch.bfloat16" in record.getMessage()
    assert "first_stage_model." in record.getMessage()


def test_a_scale_beside_a_plain_weight_of_an_older_file_is_told_for_what_it_is(
    tmp_path: Path, original: dict[str, Tensor]
) -> None:
    key = UNET + "input_blocks.1.1.transformer_blocks.0.attn1.to_k.scale_weight"
    save_file({**original, key: torch.ones(())}, tmp_path / "one.safetensors")
    built = open_checkpoint(tmp_path / "one.safetensors").build(Role.DIFFUSION_MODEL)
    assert not any(isinstance(p, PackedWeight) for p in built.module.parameters())
    save_file({**original, key: torch.tensor(0.5)}, tmp_path / "half.safetensors")
    with pytest.raises(BadQuantization, match=r"half\.safetensors: .*found a scale \(0\.5\) of a weight of type F"):
        open_checkpoint(tmp_path / "half.safetensors")


def test_quantized_convolutions_stay_packed_too(tmp_path: Path, original: dict[str, Tensor]) -> None:
    key = UNET + "input_blocks.1.0.in_layers.2.weight"
    packed = quantize(original[key].float(), "int8_tensorwise", {PER_ROW: True})
    assert packed.parts["weight_scale"].shape == (original[key].shape[0], 1, 1, 1)
    save_file(save({**original, key: packed}), tmp_path / "conv.safetensors")
    module = open_checkpoint(tmp_path / "conv.safetensors").build(Role.DIFFUSION_MODEL).module
    weight = module.get_parameter("down_blocks.0.resnets.0.conv1.weight")
    assert isinstance(weight, PackedWeight)
    assert torch.equal(weight.unpack(torch.float32), packed.unpack(torch.float32))
