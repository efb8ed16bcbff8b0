"""Splits the keys of LoRA files into a base name and a tensor's part of an adapter. Torch-free.

Knows the public conventions of kohya, LyCORIS, diffusers and PEFT. `pool.models.lora_names` maps base names to weights;
`pool.weights.patches` computes with the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]

#: key endings and their parts; the longest matching ending applies
PARTS: tuple[tuple[str, str], ...] = (
    (".lora_up.weight", "up"),
    (".lora_down.weight", "down"),
    (".lora_mid.weight", "mid"),
    (".lora_B.weight", "up"),
    (".lora_A.weight", "down"),
    (".lora_B", "up"),
    (".lora_A", "down"),
    (".lora.up.weight", "up"),
    (".lora.down.weight", "down"),
    ("_lora.up.weight", "up"),
    ("_lora.down.weight", "down"),
    (".lora_linear_layer.up.weight", "up"),
    (".lora_linear_layer.down.weight", "down"),
    (".lora_embedding_B", "embedding_up"),
    (".lora_embedding_A", "embedding_down"),
    (".vera_lambda_b", "vera_lambda_b"),
    (".vera_lambda_d", "vera_lambda_d"),
    *((f"_lora{number}.{part}.weight", part) for number in (1, 2) for part in ("up", "down")),
    (".lora_up.bias", "diff_b"),
    (".lora_B.bias", "diff_b"),
    (".lora.up.bias", "diff_b"),
    (".lora_linear_layer.up.bias", "diff_b"),
    (".alpha", "alpha"),
    (".reshape_weight", "reshape_weight"),
    (".dora_scale", "dora_scale"),
    (".lora_magnitude_vector.weight", "magnitude"),
    (".lora_magnitude_vector", "magnitude"),
    (".diff", "diff"),
    (".diff_b", "diff_b"),
    (".set_weight", "set_weight"),
    (".w_norm", "w_norm"),
    (".b_norm", "b_norm"),
    *((f".hada_{part}", f"hada_{part}") for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")),
    *((f".lokr_{part}", f"lokr_{part}") for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")),
    *((f".{part}.weight", part) for part in ("a1", "a2", "b1", "b2")),
    (".oft_blocks", "oft_blocks"),
    (".oft_diag", "oft_diag"),
    (".oft_R.weight", "oft_R"),
    (".oft_R", "oft_R"),
    (".oft_R.scaled_oft", "scaled_oft"),
    (".rescale", "rescale"),
)
#: differences of tables that Wan's trainers write as a part of their module: `blocks.0.diff_m`, `head.diff_m`
_MODULATION = re.compile(r"(.+[._])diff_m")

#: parts that only a LoRA, or one of its relatives, has
_DISTINCTIVE_PARTS = frozenset(
    {
        *("up", "down", "hada_w1_a", "lokr_w1", "lokr_w1_a", "oft_blocks", "diff", "diff_b", "w_norm", "set_weight"),
        *("embedding_up", "vera_lambda_b", "oft_diag", "oft_R"),
    }
)
#: parts that identify an adapter only together: each name alone occurs in other models
_DISTINCTIVE_TOGETHER = frozenset({"a1", "a2", "b1", "b2"})

#: all endings, for one test that rejects most other keys
_ENDS = tuple(end for end, _ in PARTS)
#: PEFT writes the name of an adapter after its part: `lora_A.NAME.weight`, `hada_w1_a.NAME`
_ADAPTER = re.compile(
    r"(.+\.(?:lora_(?:A|B|magnitude_vector)|oft_R))\.([^.]+)(\.weight|\.bias)"
    r"|(.+\.(?:lora_(?:embedding_[AB]|magnitude_vector)|vera_lambda_[bd]|hada_(?:w[12]_[ab]|t[12])"
    r"|lokr_(?:w[12](?:_[ab])?|t2)))\.([^.]+)",
    re.DOTALL,
)

#: embeddings in a LoRA file
_BUNDLED = re.compile(r"bundle_emb\.(.+?)\.(string_to_param\.\*|[^.]+)", re.DOTALL)
#: first parts of keys that name no module of the model
_WRAPPER = re.compile(r"^(_orig_mod|module|state_dict)\.")

#: keys that identify a published naming of complete files
_BFL_CONTROL = ("img_in.lora_A.weight", "single_blocks.0.norm.key_norm.scale")
#: XLabs' LoRAs for Flux, and USO's
_PROCESSORS = re.compile(r"(double|single)_blocks\.\d+\.processor\.(qkv|proj)_lora[12]?\.(up|down)\.weight")
_WAN_FUN = ("lora_unet__blocks_0_cross_attn_k.lora_down.weight",)

#: parts of names of attention processors, as XLabs and USO use them, and of the corresponding model names
_PROCESSOR_PIECES: tuple[tuple[str, str], ...] = (
    (".processor.proj_lora1.", ".img_attn.proj.lora_"),
    (".processor.proj_lora2.", ".txt_attn.proj.lora_"),
    (".processor.qkv_lora1.", ".img_attn.qkv.lora_"),
    (".processor.qkv_lora2.", ".txt_attn.qkv.lora_"),
    (".processor.proj_lora.", ".linear2.lora_"),
    (".processor.qkv_lora.", ".linear1_qkv.lora_"),
)


@dataclass(frozen=True, slots=True)
class AdapterKeys:
    """The keys of a LoRA file in the naming that `split_key` knows.

    original  for each of them, the key in the file
    reshaped  for a base name, the shape that its weight is padded to first, where only the factors of the file imply it
    """

    original: Mapping[str, str]
    reshaped: Mapping[str, Shape]


def split_key(key: str) -> tuple[str, str] | None:
    """Split a key of a LoRA file into base name and part; None for a key that is no part of a LoRA.

    `split_key("lora_unet_mid_block_resnets_0_conv1.lora_up.weight") == ("lora_unet_mid_block_resnets_0_conv1", "up")`
    """
    plain = _without_adapter(key)[0]
    if (table := _MODULATION.fullmatch(plain)) is not None:
        return f"{table[1]}modulation", "diff"
    if not plain.endswith(_ENDS):
        return None
    fitting = [(len(end), end, part) for end, part in PARTS if plain.endswith(end) and len(plain) > len(end)]
    if not fitting:
        return None
    length, _, part = max(fitting)
    return plain[:-length], part


def adapter_of(key: str) -> str:
    """Return the name of the PEFT adapter that `key` is of, "default_0" in "to_q.lora_A.default_0.weight"; "" for a
    key without one."""
    return _without_adapter(key)[1]


def _without_adapter(key: str) -> tuple[str, str]:
    """Return `key` without the name of an adapter, and that name."""
    if key.endswith(_ENDS):
        return key, ""
    found = _ADAPTER.fullmatch(key)
    if found is None:
        return key, ""
    return (found[1] + found[3], found[2]) if found[1] else (found[4], found[5])


def bundled_name(key: str) -> tuple[str, str] | None:
    """Return the name and the text encoder of an embedding that a LoRA file bundles; None for another key.

    The encoder is "clip_l", "clip_g" and so on, or "string_to_param.*" if it is not named:
    `bundled_name("bundle_emb.worn.clip_l") == ("worn", "clip_l")`.
    """
    found = _BUNDLED.fullmatch(key)
    return None if found is None else (found[1], found[2])


def looks_like_lora(keys: Iterable[str]) -> bool:
    """Whether a file with `keys` is a LoRA or one of its relatives."""
    together: dict[str, set[str]] = {}
    for key in keys:
        split = split_key(key)
        if split is None:
            continue
        if split[1] in _DISTINCTIVE_PARTS:
            return True
        if split[1] in _DISTINCTIVE_TOGETHER:
            together.setdefault(split[0], set()).add(split[1])
    return any(parts == _DISTINCTIVE_TOGETHER for parts in together.values())


def normalized_keys(shapes: Mapping[str, Shape]) -> AdapterKeys:
    """Return the keys of a file with tensors of `shapes`, with published namings converted to the common one.

    BFL's control LoRAs use the model's keys without a prefix, keep norms as they are and widen a weight; XLabs' and
    USO's use the names of attention processors; Wan-Fun's have an extra underscore. Removed are the
    wrappers in which some trainers save a module: torch's (`_orig_mod.`, `module.`) and a checkpoint's (`state_dict.`).
    """
    unwrapped = {_unwrapped(key): key for key in shapes}
    if len(unwrapped) < len(shapes):  # two keys of one name: reported with their own
        unwrapped = {key: key for key in shapes}
    if all(key == original for key, original in unwrapped.items()):
        return _normalized(shapes)
    found = _normalized({key: shapes[original] for key, original in unwrapped.items()})
    return AdapterKeys({key: unwrapped[original] for key, original in found.original.items()}, found.reshaped)


def _unwrapped(key: str) -> str:
    """Return `key` without the names of wrappers."""
    while (bare := _WRAPPER.sub("", key)) != key:
        key = bare
    return key.replace("._orig_mod.", ".").replace("__orig_mod_", "_")


def _normalized(shapes: Mapping[str, Shape]) -> AdapterKeys:
    if all(key in shapes for key in _BFL_CONTROL):
        return _from_bfl_control(shapes)
    if any(_PROCESSORS.fullmatch(key) for key in shapes):
        return AdapterKeys({_from_processor(key): key for key in shapes}, {})
    if all(key in shapes for key in _WAN_FUN):
        return AdapterKeys({key.replace("lora_unet__", "lora_unet_", 1): key for key in shapes}, {})
    return AdapterKeys({key: key for key in shapes}, {})


def _from_bfl_control(shapes: Mapping[str, Shape]) -> AdapterKeys:
    original = {}
    for key in shapes:
        name = f"diffusion_model.{key}"
        if name.endswith("_norm.scale"):
            name = f"{name}.set_weight"
        original[name.replace(".lora_B.bias", ".diff_b")] = key
    rows, columns = shapes["img_in.lora_B.weight"][0], shapes["img_in.lora_A.weight"][1]
    return AdapterKeys(original, {"diffusion_model.img_in": (rows, columns)})


def _from_processor(key: str) -> str:
    for found, meant in _PROCESSOR_PIECES:
        key = key.replace(found, meant)
    return f"diffusion_model.{key}"
