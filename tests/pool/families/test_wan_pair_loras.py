"""LoRA files for a tiny model of two experts: parts for each of them, tables, and text encoders in Wan's own naming."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.values.core.stage_params import LoraRef
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.tiny_pairs import TINY, write_pair

FIRST, SECOND, TEXT = Role.DIFFUSION_MODEL, Role.DIFFUSION_MODEL_2, Role.TEXT_ENCODER
TO_Q = "blocks.0.attn1.to_q.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder, TINY["wan_t2v"])
    return OpenModel(Catalog((folder,), (), "cpu").find_model("tiny"), "cpu")


def shape_of(model: OpenModel, role: Role, parameter: str) -> tuple[int, ...]:
    return tuple(model.component(role).built.module.get_parameter(parameter).shape)


def ref(path: Path, tensors: dict[str, Tensor], noise: str = "") -> LoraRef:
    save_file(tensors, path)
    return LoraRef(path.stem, str(path), hashlib.sha256(path.read_bytes()).hexdigest(), 1.0, noise=noise)


def delta_of(model: OpenModel, role: Role, parameter: str, lora: LoraRef) -> Tensor | None:
    patches = model.patch_set(role, [lora]).patches_for(parameter)
    found = torch.zeros(shape_of(model, role, parameter))
    for patch in patches:
        found = patch(found)
    return found if patches else None


def test_each_expert_is_patched_with_its_part(model: OpenModel, tmp_path: Path) -> None:
    rows, columns = shape_of(model, FIRST, TO_Q)
    parts = {prefix: torch.randn(rows, columns) for prefix in ("transformer.", "transformer_2.")}
    tensors = {f"{prefix}blocks.0.attn1.to_q.diff": delta for prefix, delta in parts.items()}
    lora = ref(tmp_path / "both.safetensors", tensors)
    assert model.lora_warning(lora) is None
    for role, prefix in ((FIRST, "transformer."), (SECOND, "transformer_2.")):
        found = delta_of(model, role, TO_Q, lora)
        assert found is not None
        assert torch.equal(found, parts[prefix])
    for noise, role, other in (("high", FIRST, SECOND), ("low", SECOND, FIRST)):
        one = ref(tmp_path / "both.safetensors", tensors, noise)
        assert delta_of(model, role, TO_Q, one) is not None
        assert delta_of(model, other, TO_Q, one) is None


def test_a_lora_without_a_part_for_the_chosen_expert_is_told(model: OpenModel, tmp_path: Path) -> None:
    tensors = {"transformer_2.blocks.0.attn1.to_q.diff": torch.randn(shape_of(model, FIRST, TO_Q))}
    assert "it has nothing for high noise" in (
        model.lora_warning(ref(tmp_path / "a.safetensors", tensors, "high")) or ""
    )
    assert model.lora_warning(ref(tmp_path / "a.safetensors", tensors, "low")) is None


def test_differences_of_tables_are_read_under_every_name(model: OpenModel, tmp_path: Path) -> None:
    shape = shape_of(model, FIRST, "blocks.0.scale_shift_table")
    for name in (
        "diffusion_model.blocks.0.diff_m",
        "blocks.0.diff_m",
        "transformer.blocks.0.diff_m",
        "lora_unet_blocks_0_diff_m",
        "diffusion_model.blocks.0.modulation.diff",
        "transformer.blocks.0.scale_shift_table.diff",
    ):
        delta = torch.randn(shape)
        lora = ref(tmp_path / "table.safetensors", {name: delta})
        assert model.lora_warning(lora) is None, name
        found = delta_of(model, FIRST, "blocks.0.scale_shift_table", lora)
        assert found is not None, name
        assert torch.equal(found, delta), name
    head = ref(tmp_path / "head.safetensors", {"diffusion_model.head.diff_m": torch.ones(1)})
    with pytest.raises(ValueError, match=r"head\.modulation"):
        model.lora_warning(head)


def test_text_encoders_have_the_names_of_transformers_and_of_wan(model: OpenModel, tmp_path: Path) -> None:
    pairs = {
        "encoder.block.0.layer.0.SelfAttention.q": "blocks.0.attn.q",
        "encoder.block.0.layer.1.DenseReluDense.wi_0": "blocks.0.ffn.gate.0",
        "encoder.block.0.layer.1.DenseReluDense.wi_1": "blocks.0.ffn.fc1",
        "encoder.block.0.layer.1.DenseReluDense.wo": "blocks.0.ffn.fc2",
        "encoder.block.0.layer.0.layer_norm": "blocks.0.norm1",
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias": "blocks.0.pos_embedding.embedding",
        "encoder.final_layer_norm": "norm",
    }
    for module, own in pairs.items():
        shape = shape_of(model, TEXT, f"{module}.weight")
        for base in (module, own):
            joined = base.replace(".", "_")
            for name in (f"text_encoder.{base}", f"lora_te1_{joined}", f"lora_te_{joined}", f"te1.{base}"):
                lora = ref(tmp_path / "text.safetensors", {f"{name}.diff": torch.randn(shape)})
                assert model.lora_warning(lora) is None, name
                assert delta_of(model, TEXT, f"{module}.weight", lora) is not None, name
