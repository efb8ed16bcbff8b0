"""Text encoders are recognised, and put together into sets, as 598 golden routes list it: without a difference."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.detection.text_encoders import (
    MEMBERS,
    ONE_FILE,
    TWO_FILES,
    ClipType,
    TextEncoderFacts,
    recognise_text_encoder,
    route,
)
from modelpool.pool.values.core.errors import UnknownArchitecture
from tests.each_case import each_case

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
ROUTING: dict[str, Any] = json.loads((GOLDEN / "text_encoder_routing.json").read_text())
KEYS: dict[str, list[str]] = json.loads(gzip.decompress((GOLDEN / "text_encoder_keys.json.gz").read_bytes()))

#: the golden names (model class, tokenizer) of each of our sets
SETS = {
    "sd1": ("SD1ClipModel", "SD1Tokenizer"),
    "sd2": ("SD2ClipModel", "SD2Tokenizer"),
    "sdxl": ("SDXLClipModel", "SDXLTokenizer"),
    "sdxl_refiner": ("SDXLRefinerClipModel", "SDXLTokenizer"),
    "stable_cascade": ("StableCascadeClipModel", "StableCascadeTokenizer"),
    "sd3": ("SD3ClipModel_", "SD3Tokenizer"),
    "stable_audio": ("SAT5Model", "SAT5Tokenizer"),
    "hunyuan_dit": ("HyditModel", "HyditTokenizer"),
    "flux": ("FluxClipModel_", "FluxTokenizer"),
    "flux2": ("Flux2TEModel_", "Flux2Tokenizer"),
    "mochi": ("MochiTEModel_", "MochiT5Tokenizer"),
    "ltxv": ("MochiTEModel_", "LTXVT5Tokenizer"),
    "hunyuan_video": ("HunyuanVideoClipModel_", "HunyuanVideoTokenizer"),
    "pixart": ("PixArtTEModel_", "PixArtTokenizer"),
    "aura_flow": ("AuraT5Model", "AuraT5Tokenizer"),
    "cosmos": ("CosmosTEModel_", "CosmosT5Tokenizer"),
    "lumina2": ("LuminaTEModel_", "LuminaTokenizer"),
    "newbie": ("LuminaTEModel_", "NTokenizer"),
    "wan": ("WanTEModel", "WanT5Tokenizer"),
    "hidream": ("HiDreamTEModel_", "HiDreamTokenizer"),
    "ace_step": ("AceT5Model", "AceT5Tokenizer"),
    "omnigen2": ("Omnigen2TEModel_", "Omnigen2Tokenizer"),
    "qwen_image": ("QwenImageTEModel_", "QwenImageTokenizer"),
    "hunyuan_image": ("QwenImageTEModel_", "HunyuanImageTokenizer"),
    "hunyuan_video_15": ("QwenImageTEModel_", "HunyuanVideo15Tokenizer"),
    "z_image": ("ZImageTEModel_", "ZImageTokenizer"),
    "ovis": ("OvisTEModel_", "OvisTokenizer"),
    "kandinsky5": ("Kandinsky5TEModel_", "Kandinsky5Tokenizer"),
    "kandinsky5_image": ("Kandinsky5TEModel_", "Kandinsky5TokenizerImage"),
}
#: the golden names of encoders that differ from ours by more than case
ENCODERS = {"LLAMA3_8": "llama3_8b", "T5_XXL": "t5xxl", "T5_XL": "t5xl", "T5_XXL_OLD": "t5xxl_old",
            "MISTRAL3_24B_PRUNED_FLUX2": "mistral3_24b_pruned", "GEMMA_2_2B": "gemma2_2b",
            "GEMMA_3_4B": "gemma3_4b"}  # fmt: skip


def encoder(name: str) -> TextEncoderFacts | None:
    return recognise_text_encoder({key: tuple(shape) for key, shape in ROUTING["te_inputs"][name].items()})


@pytest.mark.parametrize("name", list(ROUTING["te_inputs"]))
def test_every_listed_encoder_is_what_it_is(name: str) -> None:
    golden, found = ROUTING["detect_te_model"][name], encoder(name)
    if golden is None:
        assert found is None
    else:
        assert found is not None
        assert found.name == ENCODERS.get(golden, golden.lower())


@each_case("clip_type", list(ROUTING["clip_types"]))
def test_every_listed_route_leads_where_it_does(clip_type: str) -> None:
    """26 combinations of files for each of 23 kinds of model."""
    routes = {
        key.partition("|")[2]: value for key, value in ROUTING["routes"].items() if key.startswith(clip_type + "|")
    }
    assert len(routes) == 26
    for files, golden in routes.items():
        found = route(ClipType[clip_type], [encoder(name) for name in files.split("+")])
        assert SETS[found.name] == tuple(golden), files


def test_the_tables_know_the_same_names() -> None:
    assert {kind.name for kind in ClipType} == set(ROUTING["clip_types"])
    reachable = set(TWO_FILES.values()) | {"sdxl", "sd3", "hidream"}
    for usual, otherwise in ONE_FILE.values():
        reachable |= {usual, *otherwise.values()}
    own = {family.readings_name for family in defined_families()}
    assert reachable | own == set(MEMBERS)
    assert set(SETS) <= set(MEMBERS) <= set(SETS) | own


def found(clip_type: str, *names: str) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    chosen = route(clip_type, [encoder(name) for name in names])
    return chosen.missing, chosen.unplaced, chosen.guessed


def test_a_set_says_what_it_lacks_and_what_it_has_no_use_for() -> None:
    assert found("flux", "clip_l", "t5xxl") == ((), (), False)
    assert found("flux", "t5xxl", "clip_l") == ((), (), False)
    assert found("flux", "clip_l", "clip_g") == (("t5xxl",), (1,), True)
    assert found("stable_diffusion", "clip_l", "llama3_8b") == (("clip_g",), (1,), True)
    assert found("wan", "t5xxl") == ((), (), False)
    assert found("flux", "mistral3_24b_pruned") == ((), (), False)
    assert found("hunyuan_image", "qwen25_7b") == (("byt5_small_glyph",), (), False)


def test_a_language_model_may_be_published_without_the_level_of_its_head() -> None:
    """Qwen 3 Embedding, which ACE-Step 1.5 reads texts with, is."""
    bare = {
        "embed_tokens.weight": (151669, 1024),
        "layers.0.post_attention_layernorm.weight": (1024,),
        "layers.0.self_attn.q_norm.weight": (128,),
        "layers.27.self_attn.q_norm.weight": (128,),
        "norm.weight": (1024,),
    }
    for shapes in (bare, {f"model.{key}": shape for key, shape in bare.items()}):
        found = recognise_text_encoder(shapes)
        assert found is not None
        assert (found.name, found.width, found.layers, found.vocabulary) == ("qwen3_06b", 1024, 28, 151669)


def test_sets_that_run_with_any_of_their_members_lack_nothing() -> None:
    assert found("sd3", "clip_g") == ((), (), False)
    assert found("hidream", "llama3_8b") == ((), (), False)
    assert found("stable_diffusion", "clip_l", "clip_g", "t5xxl") == ((), (), False)


def test_a_file_that_nobody_knows_is_a_guess() -> None:
    assert found("stable_diffusion", "unknown") == (("clip_l",), (0,), True)
    assert found("sd3", "unknown") == (("clip_l", "clip_g", "t5xxl"), (0,), True)


def test_what_no_model_reads_and_wrong_counts_are_refused() -> None:
    qwen3_8b = recognise_text_encoder(
        {
            "model.layers.0.post_attention_layernorm.weight": (4096,),
            "model.layers.0.self_attn.q_norm.weight": (128,),
            "model.layers.0.self_attn.k_proj.weight": (1024, 4096),
        }
    )
    assert qwen3_8b is not None
    assert qwen3_8b.name == "qwen3_8b"
    with pytest.raises(UnknownArchitecture, match=r"Qwen 3 8B: no model reads it, expected one of clip_g"):
        route(ClipType.FLUX, [qwen3_8b])
    for count in (0, 5):
        with pytest.raises(UnknownArchitecture, match=f"found {count} files, expected one to four"):
            route(ClipType.FLUX, [None] * count)
    with pytest.raises(ValueError, match="nonsense"):
        route("nonsense", [None])


def test_sizes_are_read_off_the_tensors() -> None:
    shapes = {
        "shared.weight": (256384, 4096),
        **{f"encoder.block.{i}.layer.0.SelfAttention.relative_attention_bias.weight": (32, 64) for i in range(24)},
        "encoder.block.23.layer.1.DenseReluDense.wi_1.weight": (10240, 4096),
    }
    facts = recognise_text_encoder(shapes)
    assert facts == TextEncoderFacts("umt5_xxl", "UMT5-XXL", "umt5", "transformers", 4096, 24, 256384)
    chosen = route(ClipType.STABLE_DIFFUSION, [facts])
    assert (chosen.name, chosen.missing, chosen.guessed) == ("wan", (), False)


def test_a_tower_for_images_does_not_count_as_layers_of_text() -> None:
    facts = recognise_text_encoder(
        {
            "model.layers.0.self_attn.k_proj.bias": (512,), "model.layers.0.self_attn.k_proj.weight": (512, 3584),
            "model.layers.27.self_attn.k_proj.weight": (512, 3584), "visual.blocks.31.norm1.weight": (1280,),
            "visual.layers.40.norm1.weight": (1280,),
        }
    )  # fmt: skip
    assert facts is not None
    assert (facts.name, facts.layers) == ("qwen25_7b", 28)


@pytest.mark.parametrize(
    ("model", "prefix", "name", "layers"),
    [
        ("sd1", "clip_l.transformer.", "clip_l", 12),
        ("sd2", "clip_h.transformer.", "clip_h", 24),
        ("sdxl", "clip_g.transformer.", "clip_g", 32),
        ("sd3_lgt5", "clip_l.transformer.", "clip_l", 12),
        ("hydit", "hydit_clip.transformer.", "hydit_bert", 24),
    ],
)
def test_encoders_of_whole_models_are_found_by_their_keys(model: str, prefix: str, name: str, layers: int) -> None:
    bare = {key.removeprefix(prefix): (1, 1) for key in KEYS[model] if key.startswith(prefix)}
    facts = recognise_text_encoder(bare)
    assert facts is not None
    assert (facts.name, facts.layers) == (name, layers)


@pytest.mark.parametrize(("deepest", "name"), [(11, "clip_l"), (23, "clip_h"), (31, "clip_g")])
def test_clip_in_the_naming_of_its_training_code(deepest: int, name: str) -> None:
    shapes = {f"transformer.resblocks.{i}.mlp.c_fc.weight": (64, 16) for i in range(deepest + 1)}
    facts = recognise_text_encoder({**shapes, "token_embedding.weight": (49408, 16)})
    assert facts is not None
    assert (facts.name, facts.layout, facts.layers, facts.width) == (name, "open_clip", deepest + 1, 16)
