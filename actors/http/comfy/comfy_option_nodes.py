"""ComfyUI nodes that change how a model samples: options of a run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeAlias

from modelpool.actors.http.comfy.comfy_node_types import (
    MAX_SIDE,
    NodeInput,
    NodeType,
    NodeUnsupported,
    combo,
    flag,
    link,
    number,
    text,
    warn,
    warn_unread,
    whole,
)
from modelpool.actors.request.number_fields import number_text

#: an option of a run and its settings, from the inputs of a node
_Option: TypeAlias = Callable[[Mapping[str, Any]], tuple[str, Mapping[str, Any]]]

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_FREEU = ("b1", "b2", "s1", "s2")


def _option(name: str, fixed: Mapping[str, Any] = _NOTHING, **sources: str) -> _Option:
    """Return the option `name` with its `fixed` settings, and settings from inputs of a node."""
    return lambda given: (name, {**{setting: given[source] for setting, source in sources.items()}, **fixed})


def _freeu(version: int) -> _Option:
    return _option("freeu", {"version": version}, **{name: name for name in _FREEU})


def _skipped_layers(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    layers = given.get("layers", given.get("double_layers", ""))
    settings = {"layers": _numbers(layers), "single": _numbers(given.get("single_layers", ""))}
    span = {"start": given["start_percent"], "end": given["end_percent"]}
    return "slg", {**settings, **span, "scale": given["scale"], "rescale": given.get("rescaling_scale", 0.0)}


def _numbers(listed: str) -> tuple[int, ...]:
    parts = [part.strip() for part in listed.split(",") if part.strip()]
    if not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise NodeUnsupported(f"layers: found {listed[:100]!r}, expected whole numbers with commas")
    return tuple(map(int, parts))


def _tiled_attention(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Tiles have the same size in each call, as with a swap size of 1; above that, ComfyUI draws one of so many."""
    warn_unread(given, "swap_size", "tiles have one size, as with 1", own=1)
    if given["scale_depth"] and given["max_depth"]:
        raise NodeUnsupported("scale_depth: expected false, or max_depth 0, with which it has no effect")
    return "hypertile", {"tile": given["tile_size"], "depth": given["max_depth"]}


#: of a batch of videos [B, C, T, H, W], and frames of a latent frame of Wan
_FRAMES_DIM, _WAN_FRAMES = 2, 4
#: frames that windows of Wan share by default, which are 7 latent frames
_WAN_OVERLAP = 30
_SCHEDULES = ("standard_static", "standard_uniform", "looped_uniform", "batched")
_ROPE = tuple(f"{how}_{axis}" for axis in "xyt" for how in ("scale", "shift"))


def _row(name: str, option: _Option, *inputs: NodeInput) -> NodeType:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        model = given["model"]
        found = option(given)
        if found[0] in dict(model.options):
            raise NodeUnsupported(f"model: {found[0]} is set by a node before this one")
        return (replace(model, options=(*model.options, found)),)

    return NodeType(name, "model", (link("model", "MODEL"), *inputs), ("MODEL",), build)


def _freeu_inputs(*defaults: float) -> tuple[NodeInput, ...]:
    return tuple(number(name, value, 0.0, 10.0) for name, value in zip(_FREEU, defaults, strict=True))


def _sigmas(most: float, least: float) -> tuple[NodeInput, ...]:
    return number("sigma_max", most, 0.0, 1000.0), number("sigma_min", least, 0.0, 1000.0)


def _scaled_attention(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Factors of what the attention of all blocks of a UNet adds. Those of temporal attention act on models of videos
    with UNets alone, of which the pool scales no attention."""
    model = given["model"]
    factors = {"image": given["self_structural"], "text": given["cross_structural"]}
    texts = {name: number_text(x) for name, x in factors.items() if x != 1}
    settings = {name: f"IN*{x},MID*{x},OUT*{x}" for name, x in texts.items()}
    if given["self_temporal"] == given["cross_temporal"] == 1 and not settings:
        return (model,)
    if "attention_scale" in dict(model.options):
        raise NodeUnsupported("model: attention_scale is set by a node before this one")
    return (replace(model, options=(*model.options, ("attention_scale", settings))),)


def _normed(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    before = {"pre_cfg": True} if given["pre_cfg"] else {}
    return "cfg_norm", {"strength": given["strength"], **before}


def _projected(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    warn(given, "APG: guided by cfg - 1 times the projected difference, as published; another program may scale it "
                "otherwise")  # fmt: skip
    return "apg", {"eta": given["eta"], "norm": given["norm_threshold"], "momentum": given["momentum"]}


def _shrunk(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    factor = given["downscale_factor"]
    if factor < 1:
        raise NodeUnsupported(f"downscale_factor: found {factor:g}, expected 1 or more: features are made smaller")
    for name in ("downscale_method", "upscale_method"):
        if given[name] == "bislerp":
            raise NodeUnsupported(f"{name}: found bislerp, expected one of {', '.join(_FEATURE_SCALING)}")
    return "deep_shrink", {
        "block": given["block_number"],
        "factor": factor,
        "after_skip": int(given["downscale_after_skip"]),
        "down": given["downscale_method"],
        "up": given["upscale_method"],
        "shares_of": "noise",
        "start": given["start_percent"],
        "end": given["end_percent"],
    }


def _overridden(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    span = {"start": given["start_percent"], "end": given["end_percent"]}
    return "cfg_override", {"cfg": given["cfg"], "shares_of": "noise", **span}


def _windows(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Windows of latent frames."""
    if given["split_conds_to_windows"]:
        raise NodeUnsupported("split_conds_to_windows: found true; the pool has one text for all windows")
    if given.get("dim", _FRAMES_DIM) != _FRAMES_DIM:
        raise NodeUnsupported(f"dim: found {given['dim']}, expected {_FRAMES_DIM}, the frames of videos")
    if given.get("latent_retain_index_list", "").strip():
        raise NodeUnsupported("latent_retain_index_list: expected none; the pool keeps no latents in each window")
    kept = given.get("cond_retain_index_list", "").strip()
    if kept not in ("", "0"):
        raise NodeUnsupported(f"cond_retain_index_list: found {kept[:100]!r}, expected 0, the first frame, or none")
    schedule, stride, closed = given["context_schedule"], given["context_stride"], given["closed_loop"]
    if not schedule.endswith("uniform"):
        warn_unread(given, "context_stride", f"windows are {schedule}", own=1)
        stride = 1
    if schedule != "looped_uniform":
        warn_unread(given, "closed_loop", f"windows are {schedule}", own=False)
        closed = False
    if given["context_overlap"] >= given["context_length"] and schedule != "batched":
        found = f"{given['context_overlap']} latent frames"
        raise NodeUnsupported(
            f"context_overlap: found {found}, expected less than the window's {given['context_length']}"
        )
    if schedule == "batched":
        warn_unread(given, "context_overlap", "batched windows share no frames", own=0)
    if schedule == "standard_uniform":
        warn(given, "context_schedule: windows that cross the end of the video are moved inside of it; another program "
                    "may have other ones")  # fmt: skip
    return "windows", {
        "length": given["context_length"],
        "overlap": 0 if schedule == "batched" else given["context_overlap"],
        "schedule": schedule,
        "fuse": given["fuse_method"],
        "stride": stride,
        "closed": int(closed),
        "freenoise": int(given["freenoise"]),
        "retain": int(kept == "0" or given.get("retain_first_frame", False)),
        "anchor": int(given.get("causal_window_fix", True)),
    }


def _wan_windows(given: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The same with lengths in frames, which become latent frames of Wan."""
    length, overlap = given["context_length"], given["context_overlap"]
    if (length - 1) % _WAN_FRAMES:
        warn(given, f"context_length: found {length} frames, read as {1 + (length - 1) // _WAN_FRAMES * _WAN_FRAMES}")
    if overlap % _WAN_FRAMES and overlap != _WAN_OVERLAP:
        warn(given, f"context_overlap: found {overlap} frames, read as {overlap // _WAN_FRAMES * _WAN_FRAMES}")
    cells = {
        "context_length": max(1, (given["context_length"] - 1) // _WAN_FRAMES + 1),
        "context_overlap": given["context_overlap"] // _WAN_FRAMES,
    }
    return _windows({**given, **cells})


def _windows_inputs(length: int, overlap: int, schedule: str) -> tuple[NodeInput, ...]:
    """The inputs that both nodes begin with."""
    return (
        whole("context_length", length, 1, MAX_SIDE),
        whole("context_overlap", overlap, 0, MAX_SIDE),
        combo("context_schedule", (schedule, *(name for name in _SCHEDULES if name != schedule))),
        whole("context_stride", 1, 1, 16),
        flag("closed_loop"),
        combo("fuse_method", ("pyramid", "relative", "flat", "overlap-linear")),
    )


def _as_it_is(name: str, reason: str, *inputs: NodeInput) -> NodeType:
    """Return a node that changes how fast a model runs, or what the pool does by itself: the model stays as it is."""

    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        warn(given, reason)
        return (given["model"],)

    return NodeType(name, "model", (link("model", "MODEL"), *inputs), ("MODEL",), build)


def _sampled_as(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The kind of a model's prediction, which the pool reads from its file."""
    if given["sampling"] == "lcm":
        warn(given, "sampling: found lcm; the noise levels are the model's own, and not its fifty distilled ones")
    else:
        warn_unread(given, "sampling", "the model's file says what it predicts", own="eps")
    for name in ("sigma_max", "sigma_min"):
        warn_unread(given, name, "the noise levels are the model's own")
    if given.get("zsnr"):
        warn(given, "zsnr: found true, which is not read: the model's file says whether its first level is pure noise")
    return (given["model"],)


def _told(given: Mapping[str, Any]) -> tuple[Any, ...]:
    warn(given, "operation: it is not applied to the predictions of each step")
    return (given["model"],)


_NO_FASTER = "it changes how fast the model runs; the pool does not do that, and computes every step in full"
_OWN_ATTENTION = "the pool chooses the code of attention itself, and computes it without rounding to 8 bits"
_COMPILED = "the pool decides about compilation itself"
_NORMED_ITSELF = "the pool guides models as they were published; Lumina 2 and its relatives are normed by themselves"
_SPEED_NODES = (
    _as_it_is("TomePatchModel", _NO_FASTER, number("ratio", 0.3, 0.0, 1.0)),
    *(
        _as_it_is(
            name,
            _NO_FASTER,
            number("reuse_threshold", 0.2, 0.0, 3.0),
            number("start_percent", 0.15, 0.0, 1.0),
            number("end_percent", 0.95, 0.0, 1.0),
            flag("verbose"),
        )
        for name in ("EasyCache", "LazyCache")
    ),
    _as_it_is("TorchCompileModel", _COMPILED, text("backend", "inductor")),
    _as_it_is(
        "TorchCompileModelAdvanced",
        _COMPILED,
        text("backend", "inductor"),
        flag("fullgraph"),
        text("mode", "default"),
        flag("dynamic"),
        flag("compile_transformer_blocks_only", True, is_required=False),
        whole("dynamo_cache_size_limit", 64, 0, 1024, is_required=False),
        flag("debug_compile_keys", False, is_required=False),
    ),
    _as_it_is("ModelComputeDtype", "the pool decides about dtypes itself", text("dtype", "default")),
    _as_it_is("PathchSageAttentionKJ", _NO_FASTER, text("sage_attention", "disabled")),
    _as_it_is("ModelAttentionBackend", _OWN_ATTENTION, text("attention", "pytorch attention")),
    _as_it_is(
        "QwenImage21Cache",
        _NO_FASTER,
        combo("device", ("auto", "gpu", "cpu", "off")),
        combo("dtype", ("default", "int8", "int4")),
    ),
    _as_it_is("ModelPatchTorchSettings", _NO_FASTER, NodeInput("enable_fp16_accumulation", "BOOLEAN", False)),
    _as_it_is(
        "RenormCFG",
        _NORMED_ITSELF,
        number("cfg_trunc", 100.0, 0.0, 100.0),
        number("renorm_cfg", 1.0, 0.0, 100.0),
    ),
    NodeType(
        "LatentApplyOperationCFG",
        "model",
        (link("model", "MODEL"), link("operation", "LATENT_OPERATION")),
        ("MODEL",),
        _told,
    ),
    NodeType(
        "LatentOperationTonemapReinhard",
        "latent",
        (number("multiplier", 1.0, 0.0, 100.0),),
        ("LATENT_OPERATION",),
        lambda given: (None,),
    ),
    NodeType(
        "LatentOperationSharpen",
        "latent",
        (whole("sharpen_radius", 9, 1, 31), number("sigma", 1.0, 0.1, 10.0), number("alpha", 0.1, 0.0, 5.0)),
        ("LATENT_OPERATION",),
        lambda given: (None,),
    ),
)


_FEATURE_SCALING = ("bicubic", "nearest-exact", "bilinear", "area")
_SKIPPED_SPAN = (number("start_percent", 0.01, 0.0, 1.0), number("end_percent", 0.15, 0.0, 1.0))

OPTION_NODES = (
    _row("FreeU", _freeu(1), *_freeu_inputs(1.1, 1.2, 0.9, 0.2)),
    _row("FreeU_V2", _freeu(2), *_freeu_inputs(1.3, 1.4, 0.9, 0.2)),
    _row("PerturbedAttentionGuidance", _option("pag", scale="scale"), number("scale", 3.0, 0.0, 100.0)),
    _row(
        "SelfAttentionGuidance",
        _option("sag", scale="scale", blur="blur_sigma"),
        number("scale", 0.5, -2.0, 5.0),
        number("blur_sigma", 2.0, 0.01, 10.0),
    ),
    _row(
        "SkipLayerGuidanceSD3",
        _skipped_layers,
        text("layers", "7, 8, 9"),
        number("scale", 3.0, 0.0, 10.0),
        *_SKIPPED_SPAN,
    ),
    _row(
        "SkipLayerGuidanceDiT",
        _skipped_layers,
        text("double_layers", "7, 8, 9"),
        text("single_layers", "7, 8, 9"),
        number("scale", 3.0, 0.0, 10.0),
        *_SKIPPED_SPAN,
        number("rescaling_scale", 0.0, 0.0, 10.0),
    ),
    _row("CFGZeroStar", _option("cfg_zero", {"zero_steps": 0})),
    _row(
        "CFGNorm",
        _normed,
        number("strength", 1.0, 0.0, 100.0),
        flag("pre_cfg", False, is_required=False),
    ),
    NodeType(
        "UNetTemporalAttentionMultiply",
        "model",
        (
            link("model", "MODEL"),
            *(
                number(f"{which}_{kind}", 1.0, 0.0, 10.0, is_required=False)
                for which in ("self", "cross")
                for kind in ("structural", "temporal")
            ),
        ),
        ("MODEL",),
        _scaled_attention,
    ),
    _row(
        "FreSca",
        _option("fresca", low="scale_low", high="scale_high", cutoff="freq_cutoff"),
        number("scale_low", 1.0, 0.0, 10.0),
        number("scale_high", 1.25, 0.0, 10.0),
        whole("freq_cutoff", 20, 1, 10_000),
    ),
    _row(
        "APG",
        _projected,
        number("eta", 1.0, -10.0, 10.0),
        number("norm_threshold", 5.0, 0.0, 50.0),
        number("momentum", 0.0, -5.0, 1.0),
    ),
    _row(
        "ContextWindowsManual",
        _windows,
        *_windows_inputs(16, 4, "standard_static"),
        whole("dim", 0, 0, 5),
        flag("freenoise", is_required=False),
        text("cond_retain_index_list", "", is_required=False),
        flag("split_conds_to_windows", is_required=False),
        text("latent_retain_index_list", "", is_required=False),
        flag("causal_window_fix", True, is_required=False),
    ),
    _row(
        "WanContextWindowsManual",
        _wan_windows,
        *_windows_inputs(81, _WAN_OVERLAP, "standard_static"),
        flag("freenoise", True, is_required=False),
        flag("retain_first_frame", is_required=False),
        flag("split_conds_to_windows", is_required=False),
    ),
    _row("FluxKVCache", _option("kv_cache")),
    _row("TCFG", _option("tcfg", {"strength": 1.0})),
    _row(
        "CFGOverride",
        _overridden,
        number("cfg", 1.0, 0.0, 100.0),
        number("start_percent", 0.0, 0.0, 1.0),
        number("end_percent", 1.0, 0.0, 1.0),
    ),
    _row(
        "PatchModelAddDownscale",
        _shrunk,
        whole("block_number", 3, 1, 32),
        number("downscale_factor", 2.0, 0.1, 9.0),
        number("start_percent", 0.0, 0.0, 1.0),
        number("end_percent", 0.35, 0.0, 1.0),
        flag("downscale_after_skip", True),
        *(combo(name, (*_FEATURE_SCALING, "bislerp")) for name in ("downscale_method", "upscale_method")),
    ),
    *(
        _row(name, _option("epsilon_scaling", factor="scaling_factor"), number("scaling_factor", 1.005, 0.5, 1.5))
        for name in ("EpsilonScaling", "Epsilon Scaling")
    ),
    _row(
        "DifferentialDiffusion",
        _option("differential", strength="strength"),
        number("strength", 1.0, 0.0, 1.0, is_required=False),
    ),
    *_SPEED_NODES,
    *(
        NodeType(
            name,
            "model",
            (link("model", "MODEL"), text("sampling", own, choices=kinds), *more),
            ("MODEL",),
            _sampled_as,
        )
        for name, own, kinds, more in (
            ("ModelSamplingDiscrete", "eps", ("eps", "v_prediction", "lcm", "x0", "img_to_img"), (flag("zsnr"),)),
            (
                "ModelSamplingContinuousEDM",
                "v_prediction",
                ("v_prediction", "edm", "edm_playground_v2.5", "eps"),
                _sigmas(120.0, 0.002),
            ),
            ("ModelSamplingContinuousV", "v_prediction", ("v_prediction",), _sigmas(500.0, 0.03)),
        )
    ),
    _row("RescaleCFG", _option("rescale_cfg", factor="multiplier"), number("multiplier", 0.7, 0.0, 1.0)),
    _row(
        "HyperTile",
        _tiled_attention,
        whole("tile_size", 256, 32, MAX_SIDE),
        whole("swap_size", 2, 1, 128),
        whole("max_depth", 0, 0, 3),
        flag("scale_depth"),
    ),
    _row(
        "ScaleROPE",
        _option("rope", _NOTHING, **{name: name for name in _ROPE}),
        *(
            number(name, 1.0, 0.0, 100.0) if name.startswith("scale") else number(name, 0.0, -256.0, 256.0)
            for name in _ROPE
        ),
    ),
)
