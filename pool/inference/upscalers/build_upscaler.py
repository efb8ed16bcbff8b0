"""Builds an upscaler from the tensors of its file, in any of the published key layouts.

Three layouts of `RRDBNet` are in circulation: the first ESRGAN's (`model.1.sub.0.RDB1.conv1.0.weight`), the layout of
its later code, BSRGAN and RealSR (`RRDB_trunk.0.RDB1.conv1.weight`), and Real-ESRGAN's
(`body.0.rdb1.conv1.weight`). Nothing is copied: the module uses the mapped bytes of the file.

`CompactNet` has the small networks of Real-ESRGAN for videos and drawings (SRVGGNetCompact). Source: the published
networks: convolutions with activations in a row, in the size of the input, then a pixel shuffle, added to the enlarged
input.

Shape legend: B batch, C channels, H W height and width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from modelpool.pool.families.detection.recognize import mistaken
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.inference.upscalers.rrdbnet import RRDBNet
from modelpool.pool.models.components.diffusion.meta_module import empty_module
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.ops.fill_parameters import assert_filled, fill


class CompactNet(nn.Module):
    """Enlarges RGB images by `scale`.

    channels  features of the convolutions
    hidden    convolutions between the first and the last one
    """

    def __init__(self, channels: int, hidden: int, scale: int) -> None:
        super().__init__()
        self.scale = scale
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.PReLU(channels)]
        for _ in range(hidden):
            layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.PReLU(channels)]
        self.body = nn.Sequential(*layers, nn.Conv2d(channels, 3 * scale**2, 3, padding=1))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Enlarge images with values from 0 to 1."""
        details_BCHW = functional.pixel_shuffle(self.body(x_BCHW), self.scale)
        return details_BCHW + functional.interpolate(x_BCHW, scale_factor=float(self.scale), mode="nearest")


#: prefixes of all keys in some files: a network that was trained on several devices
PREFIXES = ("module.",)
#: keys of the layouts of `RRDBNet`, and the name of the parameter; the weight or bias follows. Keys of the first
#: layout have numbers that depend on the number of blocks and doublings (`_old_ends`)
_RENAMED = (
    (re.compile(r"model\.1\.sub\.(\d+)\.RDB(\d)\.conv(\d)\.0"), r"body.\1.rdb\2.conv\3"),
    (re.compile(r"model\.1\.sub\.(\d+)\.RDB(\d)\.conv1x1"), r"body.\1.rdb\2.conv1x1"),
    (re.compile(r"RRDB_trunk\.(\d+)\.RDB(\d)\.conv(\d|1x1)"), r"body.\1.rdb\2.conv\3"),
    (re.compile(r"body\.(\d+)\.rdb(\d)\.conv(\d|1x1)"), r"body.\1.rdb\2.conv\3"),
    (re.compile(r"trunk_conv|conv_body"), "conv_body"),
    (re.compile(r"HRconv|conv_hr"), "conv_hr"),
    (re.compile(r"conv_first"), "conv_first"),
    (re.compile(r"conv_last"), "conv_last"),
)
_UP = re.compile(r"(?:upconv|conv_up)(\d)")
_OLD = re.compile(r"model\.(\d+)")
_OLD_TRUNK = re.compile(r"model\.1\.sub\.(\d+)")


@dataclass(frozen=True, slots=True)
class UpscalerPlan:
    """How the upscaler of a file is built.

    title    for users
    network  its class
    sizes    the arguments of the class
    names    parameter -> key in the file
    scale    factor of both sides of an image
    unused   keys of the file that the network does not have
    latent_channels  of the latents that it enlarges; 0 for images
    """

    title: str
    network: type[nn.Module]
    sizes: Mapping[str, Any]
    names: Mapping[str, str]
    scale: int
    unused: tuple[str, ...] = ()
    latent_channels: int = 0

    def build(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the module over `tensors`, in evaluation mode, without gradients. Raises UnknownArchitecture if their
        shapes do not fit."""
        module = empty_module(self.network, dict(self.sizes))
        for name, parameter in module.state_dict().items():
            found = tuple(tensors[self.names[name]].shape) if name in self.names else "nothing"
            if found != tuple(parameter.shape):
                expected = f"expected {tuple(parameter.shape)} for {name} of {self.title}"
                raise UnknownArchitecture(f"{self.names.get(name, name)}: found {found}, {expected}")
        fill(module, {name: tensors[key] for name, key in self.names.items()})
        assert_filled(module)
        return module


def plan_upscaler(shapes: Mapping[str, Shape]) -> UpscalerPlan:
    """Return how to build the upscaler with tensors of `shapes`. Raises UnknownArchitecture if it is none of the
    networks that this version runs, or one for images that are not RGB."""
    prefix = next((each for each in PREFIXES if shapes and all(key.startswith(each) for key in shapes)), "")
    own = {key.removeprefix(prefix): tuple(shape) for key, shape in shapes.items()}
    if "conv_first.weight" in own or "model.0.weight" in own:
        return _rrdbnet(own, prefix)
    if "body.0.weight" in own and "body.1.weight" in own:
        return _compact(own, prefix)
    if "initial_conv.weight" in own and "final_conv.weight" in own:
        return _of_latents(own, prefix)
    names = "ESRGAN, ESRGAN+, BSRGAN, Real-ESRGAN, its compact networks, or an upscaler of the latents of LTX"
    unknown = f"no upscaler that this version runs, expected {names}"
    raise UnknownArchitecture(mistaken(shapes, f"an upscaler that this version runs: {names}", unknown))


def _rrdbnet(shapes: Mapping[str, Shape], prefix: str) -> UpscalerPlan:
    ends = _old_ends(shapes) if "model.0.weight" in shapes else {}
    names: dict[str, str] = {}
    for key in shapes:
        stem, _, kind = key.rpartition(".")
        if (name := _parameter(stem, ends)) and kind in ("weight", "bias"):
            names[f"{name}.{kind}"] = key
    blocks = [int(name.split(".")[1]) for name in names if name.startswith("body.")]
    doublings = [int(name.split(".")[1]) for name in names if name.startswith("conv_up.")]
    first, growth = names.get("conv_first.weight"), names.get("body.0.rdb1.conv1.weight")
    if first is None or growth is None or len(shapes[first]) != 4 or not shapes[growth]:
        raise UnknownArchitecture("an upscaler without residual dense blocks, which this version does not run")
    count = 1 + max(doublings, default=-1)
    channels, read = shapes[first][:2]
    unshuffle = math.isqrt(read // 3)
    if unshuffle < 1 or 3 * unshuffle**2 != read or 2**count % unshuffle:
        raise UnknownArchitecture(f"{first}: found {read} input channels, expected 3 (RGB), 12 or 48 (unshuffled RGB)")
    sizes = {"channels": channels, "growth": shapes[growth][0], "blocks": 1 + max(blocks), "doublings": count}
    sizes |= {"unshuffle": unshuffle, "plus": int(any(".conv1x1." in name for name in names))}
    if count > _MOST_DOUBLINGS or sizes["blocks"] > _MOST_BLOCKS:
        raise UnknownArchitecture(f"an ESRGAN of impossible sizes: {sizes}")
    title = "ESRGAN+" if sizes["plus"] else "Real-ESRGAN" if unshuffle > 1 else "ESRGAN"
    scale = 2**count // unshuffle
    return _plan(f"{title} {scale}x", RRDBNet, sizes, names, scale, shapes, prefix)


_MOST_DOUBLINGS, _MOST_BLOCKS = 4, 256


def _old_ends(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Return the parameters at the ends of the first layout, by key: its numbers count the layers without weights."""
    numbers = sorted({int(found[1]) for key in shapes if (found := _OLD.match(key))})
    trunk = max((int(found[1]) for key in shapes if (found := _OLD_TRUNK.match(key))), default=0)
    *ups, hr, last = numbers[2:] if len(numbers) > 3 else (0, 0)
    ends = {"model.0": "conv_first", f"model.1.sub.{trunk}": "conv_body"}
    ends |= {f"model.{number}": f"conv_up.{place}" for place, number in enumerate(ups)}
    return ends | {f"model.{hr}": "conv_hr", f"model.{last}": "conv_last"}


def _parameter(stem: str, ends: Mapping[str, str]) -> str | None:
    if stem in ends:
        return ends[stem]
    if found := _UP.fullmatch(stem):
        return f"conv_up.{int(found[1]) - 1}"
    return next((pattern.sub(name, stem) for pattern, name in _RENAMED if pattern.fullmatch(stem)), None)


def _compact(shapes: Mapping[str, Shape], prefix: str) -> UpscalerPlan:
    last = max(int(key.split(".")[1]) for key in shapes if re.match(r"body\.\d+\.", key))
    channels, read = shapes["body.0.weight"][:2]
    made = shapes.get(f"body.{last}.weight", (0,))[0]
    scale = math.isqrt(made // 3)
    if read != 3 or scale < 1 or 3 * scale**2 != made or last % 2:
        found = f"{read} channels to {made} in {last + 1} layers"
        raise UnknownArchitecture(f"an upscaler of unknown form: found {found}, expected 3 to 3 times a square")
    sizes = {"channels": channels, "hidden": (last - 2) // 2, "scale": scale}
    names = {key: key for key in shapes if re.fullmatch(r"body\.\d+\.(weight|bias)", key)}
    return _plan(f"Real-ESRGAN compact {scale}x", CompactNet, sizes, names, scale, shapes, prefix)


def _of_latents(shapes: Mapping[str, Shape], prefix: str) -> UpscalerPlan:
    from modelpool.pool.inference.upscalers.latent_upsampler import FIRST, KERNEL, LatentUpsampler, upsampler_sizes

    sizes, scale = upsampler_sizes(shapes)
    known = empty_module(LatentUpsampler, sizes).state_dict()
    names = {key: key for key in shapes if key in known}
    plan = _plan(f"LTX latents {scale}x", LatentUpsampler, sizes, names, scale, shapes, prefix)
    unused = tuple(key for key in plan.unused if key != prefix + KERNEL)
    return replace(plan, unused=unused, latent_channels=shapes[FIRST][1])


def _plan(
    title: str,
    network: type[nn.Module],
    sizes: Mapping[str, Any],
    names: Mapping[str, str],
    scale: int,
    shapes: Mapping[str, Shape],
    prefix: str,
) -> UpscalerPlan:
    unused = tuple(prefix + key for key in sorted(shapes.keys() - set(names.values())))
    return UpscalerPlan(title, network, sizes, {name: prefix + key for name, key in names.items()}, scale, unused)
