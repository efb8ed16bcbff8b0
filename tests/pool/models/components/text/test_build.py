"""Every kind of text encoder is built from its published file alone, and is transformers' own on those weights."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from modelpool.pool.families.detection.text_encoders import SIGNATURES
from modelpool.pool.models.components.text.build_text_encoder import TextEncoderPlan, facts_named, plan_text_encoder
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.quant.mapped_file import MappedFile
from tests.nearly import assert_nearly
from tests.pool.models.components.text import cases
from tests.pool.models.components.text.cases import CASES, WORDS, Case

GOLDEN = Path(__file__).resolve().parents[4] / "golden"
KEYS: dict[str, list[str]] = json.loads(gzip.decompress((GOLDEN / "text_encoder_keys.json.gz").read_bytes()))

CASE = pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
IDS = torch.randint(0, WORDS - 3, (2, 9), generator=torch.Generator().manual_seed(3))
CLIP_IDS = torch.cat((IDS, torch.tensor([[49407], [49407]])), dim=1)


def shapes_of(file: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(value.shape) for key, value in file.items()}


def planned(case: Case, file: dict[str, Tensor], prefix: str = "") -> TextEncoderPlan:
    return plan_text_encoder(shapes_of(file), prefix, facts=facts_named(case.name, case.layout))


def states(module: nn.Module, name: str) -> list[Tensor]:
    """All that a text encoder says of some tokens, layer by layer."""
    with torch.no_grad():
        ids = CLIP_IDS if name.startswith("clip") else IDS
        mask = torch.ones_like(ids)
        mask[1, 6:] = name.startswith("clip")
        found = module(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    pooled = [found[key] for key in ("text_embeds", "pooler_output") if found.get(key) is not None]
    return [found.last_hidden_state, *found.hidden_states, *pooled]


@CASE
def test_a_published_file_is_transformers_module_and_the_file_again(case: Case, tmp_path: Path) -> None:
    theirs = case.module()
    file = case.file(theirs)
    save_file(file, tmp_path / "encoder.safetensors")
    tensors = MappedFile.open(tmp_path / "encoder.safetensors").tensors()
    plan = planned(case, file)
    ours = plan.build(tensors)
    for mine, expected in zip(states(ours, case.name), states(theirs, case.name), strict=True):
        assert_nearly(mine, expected)
    assert set(plan.key_map.unused) == set(case.unused)
    saved = plan.save(ours, tensors)
    assert saved.keys() == file.keys()
    for key, tensor in file.items():
        assert torch.equal(saved[key], tensor), key
        assert saved[key].dtype == tensor.dtype


@CASE
@pytest.mark.parametrize("stored", [torch.float16, torch.float8_e4m3fn])
def test_weights_stored_in_fewer_bits_run_as_if_they_were_converted(case: Case, stored: torch.dtype) -> None:
    theirs = case.module()
    for value in theirs.parameters():
        value.data = value.data.to(stored).float()
    file = {key: x.to(stored) if x.is_floating_point() else x for key, x in case.file(theirs).items()}
    ours = planned(case, file).build(file)
    swap_to_casting(ours)
    with compute(torch.device("cpu"), torch.float32):
        mine = states(ours, case.name)
    for x, expected in zip(mine, states(theirs, case.name), strict=True):
        assert_nearly(x, expected)


@pytest.mark.parametrize("name", ["clip_l", "t5xxl", "umt5_xxl", "hydit_bert", "qwen3_4b"])
def test_a_prefix_inside_a_checkpoint_changes_nothing(name: str) -> None:
    case = CASES[name]
    theirs = case.module()
    prefix = f"text_encoders.{name}.transformer."
    file = {prefix + key: tensor for key, tensor in case.file(theirs).items()} | {"model.x.weight": torch.ones(3)}
    plan = planned(case, file, prefix)
    ours = plan.build(file)
    for mine, expected in zip(states(ours, name), states(theirs, name), strict=True):
        assert_nearly(mine, expected)
    assert plan.save(ours, file).keys() == file.keys() - {"model.x.weight"}


@pytest.mark.parametrize("name", ["t5xxl", "umt5_xxl"])
def test_the_tokens_of_t5_are_one_module_however_it_is_counted(name: str) -> None:
    """A table of a quarter of a million tokens that was counted, and loaded, twice would be gigabytes."""
    case = CASES[name]
    ours = planned(case, file := case.file(case.module())).build(file)
    tables = [m for m in ours.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == WORDS]
    assert len(tables) == 1
    assert ours.get_submodule("encoder.embed_tokens") is ours.get_submodule("shared")


@pytest.mark.parametrize("layers", [2, 3])
def test_the_last_state_of_the_first_layers_of_mistral_is_not_normed(layers: int) -> None:
    """Flux 2 reads three of its states; files with those layers alone have a norm's weight, or none."""
    whole = cases.mistral(layers=3)
    file = {key: x for key, x in cases.under("model.")(whole).items() if f".{layers}." not in key}
    if layers == 3:
        del file["model.norm.weight"]
    plan = plan_text_encoder(shapes_of(file), facts=facts_named("mistral3_24b_pruned"))
    ours = plan.build(file)
    assert_nearly(ours(input_ids=IDS).last_hidden_state, _after_layer(whole, layers))
    assert plan.save(ours, file).keys() == file.keys()


def test_first_layers_are_known_in_the_place_of_the_whole() -> None:
    """Found: a whole file of Flux 2 says which encoder stands there, not that it is cut, and asked for its norm."""
    own = cases.under("model.")(cases.mistral(layers=30))
    file = {key: x for key, x in own.items() if key != "model.norm.weight"}
    plan = plan_text_encoder(shapes_of(file), facts=facts_named("mistral3_24b"))
    assert plan.facts.name == "mistral3_24b_pruned"
    assert plan.build(file)(input_ids=IDS).last_hidden_state.isfinite().all()
    assert plan_text_encoder(shapes_of(own), facts=facts_named("mistral3_24b")).facts.name == "mistral3_24b"


def _after_layer(module: nn.Module, layer: int) -> Tensor:
    """What leaves the layer `layer` of three, as the next one (or the norm) takes it."""
    taken: list[Tensor] = []
    place = module.norm if layer == 3 else module.layers[layer]  # type: ignore[index]
    handle = place.register_forward_pre_hook(lambda _, args: taken.append(args[0]))  # type: ignore[operator]
    module(input_ids=IDS)
    handle.remove()
    return taken[0]


#: width, rows of the inner layer, tokens of the published models. Source: their config.json
_CLIP_SIZES = {"clip_l": (768, 3072, 768), "clip_h": (1024, 4096, 1024), "clip_g": (1280, 5120, 1280)}
_T5_SIZES = {"t5xxl": (4096, 10240, 64, 32128), "mt5xl": (2048, 5120, 32, 250112)}


def published_shape(encoder: str, key: str) -> tuple[int, ...]:
    """The shape of a published tensor; `key` is as the golden lists have it, without prefix."""
    if encoder in _CLIP_SIZES:
        return _clip_shape(key, *_CLIP_SIZES[encoder])
    if encoder in _T5_SIZES:
        return _t5_shape(key, *_T5_SIZES[encoder])
    return _bert_shape(key)


def _clip_shape(key: str, width: int, inner: int, projected: int) -> tuple[int, ...]:
    tables = {"token_embedding.weight": (49408, width), "position_embedding.weight": (77, width)}
    for end, shape in tables.items():
        if key.endswith(end):
            return shape
    if "text_projection" in key:
        return projected, width
    if "fc1" in key:
        return (inner, width) if key.endswith("weight") else (inner,)
    if "norm" in key or key.endswith("bias"):
        return (width,)
    return (width, inner) if "fc2" in key else (width, width)


def _t5_shape(key: str, width: int, inner: int, heads: int, words: int) -> tuple[int, ...]:
    if key == "shared.weight":
        return words, width
    if "relative_attention_bias" in key:
        return 32, heads
    if "norm" in key:
        return (width,)
    if "SelfAttention" in key:
        return (width, heads * 64) if ".o." in key else (heads * 64, width)
    return (width, inner) if ".wo." in key else (inner, width)


def _bert_shape(key: str) -> tuple[int, ...]:
    tables = {"word_embeddings": 47020, "position_embeddings": 512, "token_type_embeddings": 2}
    for part, rows in tables.items():
        if part in key:
            return rows, 1024
    if "intermediate" in key:
        return (4096, 1024) if key.endswith("weight") else (4096,)
    if "LayerNorm" in key or key.endswith("bias"):
        return (1024,)
    return (1024, 4096) if ".output.dense" in key and "attention" not in key else (1024, 1024)


@pytest.mark.parametrize("entry", list(KEYS))
def test_published_sizes_are_planned_whole(entry: str) -> None:
    """The module of the configuration that the shapes tell has the keys and shapes that the file becomes."""
    encoders = {key.split(".")[0] for key in KEYS[entry]}
    assert encoders <= {"clip_l", "clip_h", "clip_g", "t5xxl", "hydit_clip", "mt5xl"}
    for encoder in encoders:
        prefix = f"{encoder}.transformer."
        shapes = {
            key: published_shape(encoder, key.removeprefix(prefix)) if key.startswith(prefix) else ()
            for key in KEYS[entry]
            if key.startswith(f"{encoder}.")
        }
        plan = plan_text_encoder(shapes, prefix)
        assert plan.facts.name == {"hydit_clip": "hydit_bert", "mt5xl": "t5xl"}.get(encoder, encoder)
        assert not plan.key_map.unused
        heads = plan.config.get("num_attention_heads") or plan.config["num_heads"]
        published = {"clip_l": 12, "clip_h": 16, "clip_g": 20, "t5xxl": 64, "mt5xl": 32, "hydit_clip": 16}
        assert heads == published[encoder]
        assert all(value.is_meta for value in plan.empty().parameters())


def test_llama_3_and_its_successor_are_told_by_their_vocabularies() -> None:
    """Both have the same shapes but for the tokens of images that HunyuanVideo's file has; the positions of 3.1 are
    stretched, which changes the states of short texts too."""
    file = shapes_of(cases.under("model.")(cases.llama()))
    kinds = {}
    for words in (128256, 128320):
        shapes = file | {"model.embed_tokens.weight": (words, 32)}
        kinds[words] = plan_text_encoder(shapes, facts=facts_named("llama3_8b")).config["rope_parameters"]["rope_type"]
    assert kinds == {128256: "llama3", 128320: "default"}


def test_every_encoder_that_is_recognised_has_a_case() -> None:
    named = {case.name for case in CASES.values()} | {"mistral3_24b_pruned"}
    alike = {"qwen25_3b": "qwen25_7b", "qwen3_2b": "qwen3_4b", "qwen3_8b": "qwen3_4b", "qwen3vl_8b": "qwen3vl_4b"}
    alike |= {"gemma3_12b": "gemma3_4b", "qwen3_06b": "qwen3_4b"}
    assert {alike.get(s.facts.name, s.facts.name) for s in SIGNATURES} == named


def test_what_is_no_text_encoder_is_told_with_its_first_keys() -> None:
    with pytest.raises(UnknownArchitecture, match=r"its 1 tensor matches no known text encoder .*foo\.weight"):
        plan_text_encoder({"foo.weight": (3, 3)})


@CASE
def test_a_tensor_too_many_or_missing_is_told(case: Case) -> None:
    file = case.file(case.module())
    norm = next(key for key in reversed(file) if "norm" in key.lower() or "ln_" in key)
    short = {key: x for key, x in file.items() if key != norm}
    with pytest.raises(UnknownArchitecture):
        planned(case, short).empty()


def test_layers_that_a_key_alone_asks_for_are_not_built() -> None:
    file = shapes_of(CASES["qwen3_4b"].file(CASES["qwen3_4b"].module())) | {"model.layers.900000.x.weight": (1,)}
    with pytest.raises(UnknownArchitecture, match="found 4 layers without number 3"):
        plan_text_encoder(file, facts=facts_named("qwen3_4b"))
