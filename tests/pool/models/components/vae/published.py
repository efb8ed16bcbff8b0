"""The single-file layouts of published VAEs, the other way: a diffusers module's state under the names of its file.

Written from the key lists of the published files (tests/golden/vae_keys.json.gz), apart from the product's converters,
which go the other way; `test_layouts.py` holds these names against the lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]
File = dict[str, Tensor]


def _after(key: str, *rules: tuple[str, str]) -> str:
    for pattern, replacement in rules:
        key = re.sub(pattern, replacement, key)
    return key


def _levels(state: State, blocks: str) -> int:
    return 1 + max(int(m[1]) for key in state if (m := re.match(rf"{re.escape(blocks)}\.(\d+)\.", key)))


_LDM = (
    (r"resnets\.(\d+)\.", r"block.\1."),
    (r"mid_block\.block\.0\.", "mid.block_1."),
    (r"mid_block\.block\.1\.", "mid.block_2."),
    (r"conv_shortcut", "nin_shortcut"),
    (r"downsamplers\.0\.", "downsample."),
    (r"upsamplers\.0\.", "upsample."),
    (r"mid_block\.attentions\.0\.(group_norm|norm)\.", "mid.attn_1.norm."),
    (r"mid_block\.attentions\.0\.to_([qkv])\.", r"mid.attn_1.\1."),
    (r"mid_block\.attentions\.0\.(to_out\.0|proj_out|proj)\.", "mid.attn_1.proj_out."),
    (r"conv_norm_out", "norm_out"),
)


def ldm(state: State, *, dimensions: int = 2, going_up_backwards: bool = True) -> File:
    """KL, Flux 2, HunyuanVideo (`dimensions=3`), HunyuanVideo 1.5 (levels up as they are used)."""
    top = _levels(state, "decoder.up_blocks") - 1
    file = {}
    for key, tensor in state.items():
        name = re.sub(r"encoder\.down_blocks\.", "encoder.down.", key)
        if (m := re.match(r"decoder\.up_blocks\.(\d+)\.(.+)", key)) is not None:
            name = f"decoder.up.{top - int(m[1]) if going_up_backwards else m[1]}.{m[2]}"
        name = _after(name, *_LDM)
        convolution = ".attn_1." in name and name.endswith("weight") and tensor.dim() == 2
        file[name] = tensor.reshape(*tensor.shape, *[1] * dimensions) if convolution else tensor
    return file


def flux2_with_convolutions_in_halves(state: State) -> File:
    """The other published spelling of Flux 2."""
    return {
        _after(key, ("^quant_conv", "encoder.quant_conv"), ("^post_quant_conv", "decoder.post_quant_conv")): tensor
        for key, tensor in ldm(state).items()
    }


def temporal(state: State) -> File:
    """Stable Video Diffusion."""
    return {
        _after(
            key,
            (r"spatial_res_block\.", ""),
            (r"temporal_res_block\.norm1", "time_stack.in_layers.0"),
            (r"temporal_res_block\.conv1", "time_stack.in_layers.2"),
            (r"temporal_res_block\.norm2", "time_stack.out_layers.0"),
            (r"temporal_res_block\.conv2", "time_stack.out_layers.3"),
            (r"time_mixer\.mix_factor", "mix_factor"),
            (r"decoder\.time_conv_out", "decoder.conv_out.time_mix_conv"),
        ): tensor
        for key, tensor in ldm(state).items()
    }


def temporal_without_convolution(state: State) -> File:
    """Stable Video Diffusion as its training code builds it: nothing between encoder and latent."""
    return {key: tensor for key, tensor in temporal(state).items() if not key.startswith("quant_conv.")}


def hunyuan_image(state: State) -> File:
    """HunyuanImage 2.1, whose lists of blocks and folds are levels in the file."""
    file = {}
    for key, tensor in state.items():
        m = re.match(r"(encoder\.down|decoder\.up)_blocks\.(\d+)\.(.+)", key)
        if m is None:
            file[_after(key, *_LDM)] = tensor
            continue
        half, number, rest = m[1], int(m[2]), m[3]
        folds = sorted({int(f[1]) for k in state if (f := re.match(rf"{half}_blocks\.(\d+)\.conv\.", k))})
        level = sum(fold < number for fold in folds)
        first = folds[level - 1] + 1 if level else 0
        fold = "downsample" if half == "encoder.down" else "upsample"
        place = f"{fold}.{rest}" if number in folds else f"block.{number - first}.{rest}"
        file[f"{half}.{level}.{place}"] = tensor
    return file


def cosmos(state: State) -> File:
    """Cosmos: every convolution is wrapped, and the two of a pair are numbered."""
    top = _levels(state, "decoder.up_blocks") - 1
    file = {"latent_mean": torch.arange(16.0), "latent_std": torch.arange(16.0) + 1,
            "decoder.unpatcher3d.wavelets": torch.full((2,), 0.5**0.5)}  # fmt: skip
    for key, tensor in state.items():
        name = re.sub(r"encoder\.down_blocks\.", "encoder.down.", key)
        if (m := re.match(r"decoder\.up_blocks\.(\d+)\.(.+)", key)) is not None:
            name = f"decoder.up.{top - int(m[1])}.{m[2]}"
        name = _after(
            name,
            (r"resnets\.(\d+)\.", r"block.\1."),
            (r"mid_block\.block\.0\.", "mid.block_1."),
            (r"mid_block\.block\.1\.", "mid.block_2."),
            (r"mid_block\.attentions\.0\.", "mid.attn_1.0."),
            (r"mid_block\.temp_attentions\.0\.", "mid.attn_1.1."),
            (r"to_([qkv])\.", r"\1."),
            (r"to_out\.0\.", "proj_out."),
            (r"conv_shortcut", "nin_shortcut"),
            (r"(down|up)samplers\.0\.", r"\1sample."),
            (r"conv_s\.", "0."),
            (r"conv_t\.", "1."),
        )
        wrapped = name if ".norm." in name else re.sub(r"\.(weight|bias)$", r".conv3d.\1", name)
        file[wrapped] = tensor
    return file


_DC = (
    (r"^encoder\.conv_in\.", "encoder.project_in.conv."),
    (r"^encoder\.conv_out\.", "encoder.project_out.main.op_list.0.conv."),
    (r"^decoder\.conv_in\.", "decoder.project_in.main.conv."),
    (r"^decoder\.norm_out\.", "decoder.project_out.op_list.0."),
    (r"^decoder\.conv_out\.", "decoder.project_out.op_list.2.conv."),
    (r"_blocks\.(\d+)\.(\d+)\.(conv1|conv2)\.", r"_blocks.\1.\2.main.\3.conv."),
    (r"_blocks\.(\d+)\.(\d+)\.norm\.", r"_blocks.\1.\2.main.conv2.norm."),
    (r"\.up_blocks\.(\d+)\.(\d+)\.conv\.", r".up_blocks.\1.\2.main.conv.conv."),
    (r"\.down_blocks\.(\d+)\.(\d+)\.conv\.", r".down_blocks.\1.\2.main.conv."),
    (r"\.attn\.to_q\.", ".context_module.main.qkv.conv."),
    (r"\.attn\.to_out\.", ".context_module.main.proj.conv."),
    (r"\.attn\.norm_out\.", ".context_module.main.proj.norm."),
    (r"\.attn\.to_qkv_multiscale\.(\d+)\.proj_in\.", r".context_module.main.aggreg.\1.0."),
    (r"\.attn\.to_qkv_multiscale\.(\d+)\.proj_out\.", r".context_module.main.aggreg.\1.1."),
    (r"\.conv_out\.conv_(inverted|depth|point)\.", r".local_module.main.\1_conv.conv."),
    (r"\.conv_out\.norm\.", ".local_module.main.point_conv.norm."),
    (r"\.(?:down|up)_blocks\.(\d+)\.(\d+)\.", r".stages.\1.op_list.\2."),
)


def dc(state: State, *, folds: bool = False) -> File:
    """Sana: queries, keys and values are one convolution with a kernel of one. Convolutions of folds have one more
    level."""
    names = (*_DC, (r"^(encoder\..+\.main\.conv)\.(weight|bias)$", r"\1.conv.\2")) if folds else _DC
    file = {}
    for key, tensor in state.items():
        if ".attn.to_q." in key:
            tensor = torch.cat([state[key.replace("to_q", part)] for part in ("to_q", "to_k", "to_v")])
        if ".attn.to_k." not in key and ".attn.to_v." not in key:
            is_matrix = tensor.dim() == 2
            file[_after(key, *names)] = tensor[..., None, None] if is_matrix else tensor
    return file


def taesd(state: State) -> File:
    """TAESD, with the two numbers that one program stores beside it."""
    file = {"vae_scale": torch.tensor(1.0), "vae_shift": torch.tensor(0.0)}
    for key, tensor in state.items():
        half, _, number, name = key.split(".", 3)
        file[f"taesd_{half}.{int(number) + (half == 'decoder')}.{name}"] = tensor
    return file


def cascade_a(state: State) -> File:
    """Stable Cascade's stage A."""
    return {key.replace("vquantizer.embedding", "vquantizer.codebook"): tensor for key, tensor in state.items()}


def oobleck(state: State) -> File:
    """Stable Audio's autoencoder: `weight_g` and `weight_v` of its published checkpoint."""
    file = {}
    for key, tensor in state.items():
        half, rest = key.split(".", 1)
        last = _levels(state, f"{half}.block") + 2
        name = _after(
            rest,
            (r"^conv1\.", "layers.0."),
            (r"^conv2\.", f"layers.{last}."),
            (r"^snake1\.", f"layers.{last - 1}."),
            (r"(res_unit\d)\.snake1", r"\1.layers.0"),
            (r"(res_unit\d)\.conv1", r"\1.layers.1"),
            (r"(res_unit\d)\.snake2", r"\1.layers.2"),
            (r"(res_unit\d)\.conv2", r"\1.layers.3"),
        )
        if (m := re.match(r"block\.(\d+)\.(\w+)\.(.+)", name)) is not None:
            parts = ["res_unit1", "res_unit2", "res_unit3", "snake1", "conv1"]
            order = parts if half == "encoder" else ["snake1", "conv_t1", *parts[:3]]
            name = f"layers.{int(m[1]) + 1}.layers.{order.index(m[2])}.{m[3]}"
        file[f"{half}.{name}"] = tensor.flatten() if name.endswith(("alpha", "beta")) else tensor
    return file


def oobleck_parametrized(state: State) -> File:
    """The same with the names of newer weight norms."""
    newer = (
        (r"weight_g$", "parametrizations.weight.original0"),
        (r"weight_v$", "parametrizations.weight.original1"),
    )
    return {_after(key, *newer): tensor for key, tensor in oobleck(state).items()}


def same(state: State) -> File:
    """Stable Audio 3's autoencoder: of a differential attention, the second query and key are last."""
    levels = _levels(state, "encoder.blocks")
    file = {}
    for key, tensor in state.items():
        name = _after(
            key,
            (r"^encoder\.proj\.", f"encoder.layers.{levels + 1}."),
            (r"^decoder\.proj\.", "decoder.layers.1."),
            (r"^encoder\.blocks\.(\d+)\.", r"encoder.layers.\1."),
            (r"\.norm_attn\.", ".pre_norm."),
            (r"\.norm_ff\.", ".ff_norm."),
            (r"\.attn\.", ".self_attn."),
            (r"\.ff\.proj_in\.", ".ff.ff.0.proj."),
            (r"\.ff\.proj_out\.", ".ff.ff.2."),
            (r"^bottleneck\.scale$", "bottleneck.scaling_factor"),
        )
        if (m := re.match(r"decoder\.blocks\.(\d+)\.(.+)", name)) is not None:
            name = f"decoder.layers.{int(m[1]) + 3}.{m[2]}"
        if name.endswith(".self_attn.to_qkv.weight") and len(tensor) == 5 * tensor.shape[1]:
            query, other_query, keys, other_keys, value = tensor.chunk(5)
            tensor = torch.cat((query, keys, value, other_query, other_keys))
        file[name] = tensor
    return file


_STACK = (
    (r"norm1\.norm_layer", "stack.0"),
    (r"conv1\.conv", "stack.2"),
    (r"norm2\.norm_layer", "stack.3"),
    (r"conv2\.conv", "stack.5"),
)


def mochi(state: State) -> File:
    """Mochi, both halves in one file."""
    opening = _levels(state, "encoder.block_in.resnets")
    levels = _levels(state, "encoder.down_blocks")
    file: File = {}
    for key, tensor in state.items():
        name = _after(
            key,
            (r"^encoder\.proj_in\.", "encoder.layers.0."),
            (r"^encoder\.norm_out\.norm_layer\.", "encoder.output_norm."),
            (r"^(encoder|decoder)\.proj_out\.", r"\1.output_proj."),
            (r"^decoder\.conv_in\.", "decoder.blocks.0.0."),
            (r"norms\.(\d+)\.norm_layer\.", r"resnets.\1.attn_block.norm."),
            (r"attentions\.(\d+)\.to_out\.0\.", r"resnets.\1.attn_block.attn.out."),
            (r"attentions\.(\d+)\.to_([qkv])\.", r"resnets.\1.attn_block.attn.\2."),
        )
        if (m := re.match(r"(encoder|decoder)\.(\w+)(?:\.(\d+))?\.resnets\.(\d+)\.(.+)", name)) is not None:
            number = int(m[4])
            place = {
                ("encoder", "block_in"): f"encoder.layers.{number + 1}",
                ("encoder", "down_blocks"): f"encoder.layers.{opening + 1 + int(m[3] or 0)}.layers.{number + 1}",
                ("encoder", "block_out"): f"encoder.layers.{opening + 1 + levels + number}",
                ("decoder", "block_in"): f"decoder.blocks.0.{number + 1}",
                ("decoder", "up_blocks"): f"decoder.blocks.{int(m[3] or 0) + 1}.blocks.{number}",
                ("decoder", "block_out"): f"decoder.blocks.{levels + 1}.{number}",
            }[m[1], m[2]]
            name = f"{place}.{_after(m[5], *_STACK)}"
        if (m := re.match(r"decoder\.up_blocks\.(\d+)\.proj\.(.+)", name)) is not None:
            name = f"decoder.blocks.{int(m[1]) + 1}.proj.{m[2]}"
        if (m := re.match(r"encoder\.down_blocks\.(\d+)\.conv_in\.conv\.(.+)", name)) is not None:
            name = f"encoder.layers.{opening + 1 + int(m[1])}.layers.0.{m[2]}"
        file[name] = tensor
    for name in [name for name in file if name.endswith(".attn.q.weight")]:
        base = name.removesuffix("q.weight")
        file[f"{base}qkv.weight"] = torch.cat([file.pop(f"{base}{x}.weight") for x in "qkv"])
    return file


def mochi_half(half: str) -> Callable[[State], File]:
    """One half of Mochi as a file of its own."""
    return lambda state: {
        key.removeprefix(f"{half}."): tensor for key, tensor in mochi(state).items() if key.startswith(f"{half}.")
    }


def ltx(state: State) -> File:
    """LTX-Video: the levels' parts as one list, in the order of their use."""
    order: dict[str, list[str]] = {"encoder": [], "decoder": []}

    def has(beginning: str) -> bool:
        return any(key.startswith(beginning) for key in state)

    for level in range(_levels(state, "encoder.down_blocks")):
        for part in ("resnets.", "downsamplers.0.", "conv_out."):
            if has(f"encoder.down_blocks.{level}.{part}"):
                order["encoder"].append(f"down_blocks.{level}.{part}")
    order["encoder"].append("mid_block.resnets.")
    order["decoder"].append("mid_block.resnets.")
    for level in range(_levels(state, "decoder.up_blocks")):
        for part in ("conv_in.", "upsamplers.0.", "resnets."):
            if has(f"decoder.up_blocks.{level}.{part}"):
                order["decoder"].append(f"up_blocks.{level}.{part}")
    file = {
        "per_channel_statistics.mean-of-means": state["latents_mean"],
        "per_channel_statistics.std-of-means": state["latents_std"],
        "per_channel_statistics.channel": torch.arange(len(state["latents_mean"])),
    }
    for key, tensor in state.items():
        half, _, rest = key.partition(".")
        if half in order:
            file[f"{half}.{_ltx_name(half, rest, order[half])}"] = tensor
    return file


def _ltx_name(half: str, rest: str, order: list[str]) -> str:
    blocks = "down_blocks" if half == "encoder" else "up_blocks"
    embedder = re.match(r"(mid_block|up_blocks\.\d+)\.time_embedder\.(.+)", rest)
    if embedder is not None:
        return f"{blocks}.{order.index(embedder[1] + '.resnets.')}.time_embedder.{embedder[2]}"
    for number, part in enumerate(order):
        if rest.startswith(part):
            inside = rest.removeprefix(part)
            if part.endswith("resnets."):
                inside = f"res_blocks.{inside}"
            return _after(
                f"{blocks}.{number}.{inside}",
                (r"conv_shortcut\.conv\.", "conv_shortcut."),
                (r"norm3\.", "norm3.norm."),
            )
    return _after(rest, ("^time_embedder", "last_time_embedder"), ("^scale_shift_table", "last_scale_shift_table"))


_WAN = (
    (r"^quant_conv", "conv1"),
    (r"^post_quant_conv", "conv2"),
    (r"^(encoder|decoder)\.conv_in\.", r"\1.conv1."),
    (r"mid_block\.resnets\.0\.", "middle.0."),
    (r"mid_block\.attentions\.0\.", "middle.1."),
    (r"mid_block\.resnets\.1\.", "middle.2."),
    (r"norm_out\.", "head.0."),
    (r"conv_out\.", "head.2."),
    (r"\.norm1\.", ".residual.0."),
    (r"(?<!encoder)(?<!decoder)\.conv1\.", ".residual.2."),
    (r"\.norm2\.", ".residual.3."),
    (r"\.conv2\.", ".residual.6."),
    (r"conv_shortcut\.", "shortcut."),
)


def wan21(state: State) -> File:
    """Wan 2.1 and Qwen-Image: one list in each half."""
    per_level = 1 + max(int(m[1]) for k in state if (m := re.match(r"decoder\.up_blocks\.0\.resnets\.(\d+)", k)))
    file = {}
    for key, tensor in state.items():
        name = key.replace("encoder.down_blocks.", "encoder.downsamples.")
        if (m := re.match(r"decoder\.up_blocks\.(\d+)\.(resnets|upsamplers)\.(\d+)\.(.+)", key)) is not None:
            place = int(m[1]) * (per_level + 1) + (int(m[3]) if m[2] == "resnets" else per_level)
            name = f"decoder.upsamples.{place}.{m[4]}"
        file[_after(name, *_WAN)] = tensor
    return file


def wan22(state: State) -> File:
    """Wan 2.2: lists within lists."""
    down = 1 + max(int(m[1]) for k in state if (m := re.match(r"encoder\.down_blocks\.0\.resnets\.(\d+)", k)))
    return {
        _after(
            key,
            (r"^encoder\.down_blocks\.(\d+)\.resnets\.", r"encoder.downsamples.\1.downsamples."),
            (r"^encoder\.down_blocks\.(\d+)\.downsampler\.", rf"encoder.downsamples.\1.downsamples.{down}."),
            (r"^decoder\.up_blocks\.(\d+)\.resnets\.", r"decoder.upsamples.\1.upsamples."),
            (r"^decoder\.up_blocks\.(\d+)\.upsampler\.", rf"decoder.upsamples.\1.upsamples.{down + 1}."),
            *_WAN,
        ): tensor
        for key, tensor in state.items()
    }
