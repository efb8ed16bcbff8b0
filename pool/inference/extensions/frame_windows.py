"""Windows of frames: a model of videos predicts overlapping windows of latent frames one after the other, and the
predictions are averaged, so that a video is longer than those that the model was trained on.

Sources: MultiDiffusion (Bar-Tal et al. 2023) along time; animatediff-cli (Apache-2.0) for the looped uniform windows;
diffusers' FreeNoise for the pyramid; Qiu et al. 2023 ("FreeNoise"), section 3.2, for noise that repeats. Shape legend:
B batch, C channels, T latent frames, H W cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from modelpool.pool.families.parts.forward import config_of, sample_of
from modelpool.pool.inference.sampling.noise import checked_seed
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.run_options import FrameWindows

#: the latent frames of a window, in order
Window: TypeAlias = tuple[int, ...]
#: bits by which the windows of a step are shifted
_BITS = 64
#: weight of frames at the end of a ramp, and at the ends of relative weights, which other windows predict
_RAMP_END, _LEAST = 1e-37, 0.01


@dataclass(frozen=True, slots=True, eq=False)
class WindowedCalls:
    """Calls a model of videos for each window of the step."""

    option: FrameWindows
    clock: StepClock
    channels: int

    @classmethod
    def of(cls, option: FrameWindows, clock: StepClock, module: nn.Module) -> WindowedCalls:
        """Return the calls of `module`."""
        return cls(option, clock, int(config_of(module).out_channels))

    def around_call(self, forward: Callable[..., Any], **kwargs: Any) -> Any:
        """Call the model; a wrapper of the diffusion model, which is called with names."""
        x_BCTHW: Tensor = kwargs["hidden_states"]
        cells = x_BCTHW.shape[2]
        windows = windows_of(self.option, cells, self.clock.now)
        if len(windows) == 1:
            return forward(**kwargs)
        total_BCTHW, weights_T = None, torch.zeros(cells, dtype=torch.float32, device=x_BCTHW.device)
        for window in windows:
            made_BCTHW = self._predicted(forward, kwargs, window)
            weight_T = torch.tensor(window_weights(self.option, window, cells), dtype=torch.float32)
            weight_T, places = weight_T.to(x_BCTHW.device), torch.tensor(window, device=x_BCTHW.device)
            if total_BCTHW is None:
                shape = (*made_BCTHW.shape[:2], cells, *made_BCTHW.shape[3:])
                total_BCTHW = torch.zeros(shape, dtype=torch.float32, device=x_BCTHW.device)
            weighted_BCTHW = made_BCTHW.to(torch.float32) * weight_T[:, None, None]
            total_BCTHW.index_add_(2, places, weighted_BCTHW)
            weights_T.index_add_(0, places, weight_T)
        assert total_BCTHW is not None, "there are windows"
        return ((total_BCTHW / weights_T[:, None, None]).to(made_BCTHW.dtype),)

    def _predicted(self, forward: Callable[..., Any], kwargs: dict[str, Any], window: Window) -> Tensor:
        """Return the prediction for the frames of `window`. The first latent frame of a video is of one frame, and the
        others of several: a window behind it is predicted with the frame before it, which has this place."""
        before = 1 if self.option.anchor and window[0] > 0 else 0
        places = (window[0] - 1, *window) if before else window
        x_BCTHW = kwargs["hidden_states"][:, :, list(places)]  # a copy
        if self.option.retain and x_BCTHW.shape[1] > self.channels:
            x_BCTHW[:, self.channels :, 0] = kwargs["hidden_states"][:, self.channels :, 0]
        return sample_of(forward(**{**kwargs, "hidden_states": x_BCTHW}))[:, :, before:]


def windows_of(option: FrameWindows, cells: int, step: int) -> list[Window]:
    """Return the windows of `step` of a video of `cells` latent frames; each frame is in one at least."""
    length, advance = option.length, option.length - option.overlap
    if cells <= length:
        return [tuple(range(cells))]
    match option.schedule:
        case "batched":
            return [tuple(range(start, min(start + length, cells))) for start in range(0, cells, length)]
        case "standard_static":
            starts = [*range(0, cells - length, advance), cells - length]
            return [tuple(range(start, start + length)) for start in starts]
        case "looped_uniform":
            return _looped(option, cells, step)
    return _moved_inside(_looped(option, cells, step), cells, length)


def _looped(option: FrameWindows, cells: int, step: int) -> list[Window]:
    """Return windows that go on behind the end of the video at its beginning, of frames side by side, and, with a
    stride above 1, of each second frame, fourth frame and so on. They are shifted in each step."""
    length, overlap = option.length, option.overlap
    share = halved(step)
    shift = round(cells * share)
    strides = min(option.stride, math.ceil(math.log2(cells / length)) + 1)
    found: list[Window] = []
    for distance in (1 << power for power in range(strides)):
        end = cells + shift - (0 if option.closed else overlap)
        starts = range(int(share * distance) + shift, end, length * distance - overlap)
        spans = (range(start, start + length * distance, distance) for start in starts)
        found.extend(tuple(place % cells for place in span) for span in spans)
    return found


def _moved_inside(windows: Sequence[Window], cells: int, length: int) -> list[Window]:
    """Return `windows`, of which those that cross the end of the video end there; another one begins with it where no
    other does. Those that are longer than the video are left out."""
    found: dict[Window, None] = {}
    distances = [(window[1] - window[0]) % cells if length > 1 else 1 for window in windows]
    if all(window[0] for window, distance in zip(windows, distances, strict=True) if distance == 1):
        found[tuple(range(length))] = None
    for window, distance in zip(windows, distances, strict=True):
        span = distance * (length - 1)
        if span < cells and distance:
            first = min(window[0], cells - 1 - span)
            found[tuple(range(first, first + span + 1, distance))] = None
    return list(found)


def halved(step: int) -> float:
    """Return the share of the video by which the windows of `step` are shifted: 0, 1/2, 1/4, 3/4, 1/8 and so on, the
    bits of its number behind the point, last one first."""
    return int(f"{step:0{_BITS}b}"[::-1], 2) / (1 << _BITS)


def window_weights(option: FrameWindows, window: Window, cells: int) -> list[float]:
    """Return the weight of each frame of `window` in the average."""
    count = len(window)
    match option.fuse:
        case "pyramid":
            return [float(min(place + 1, count - place)) for place in range(count)]
        case "relative":
            middle, half = (count - 1) / 2, (count - 1 + _LEAST) / 2
            return [max(_LEAST, 1 - abs(place - middle) / half) for place in range(count)]
        case "overlap-linear":
            weights, ramp = [1.0] * count, min(option.overlap, count)
            rising = torch.linspace(_RAMP_END, 1.0, ramp, dtype=torch.float64).tolist() if ramp else []
            if window[0] > 0:
                weights[:ramp] = rising
            if window[-1] < cells - 1:
                weights[count - ramp :] = [a * b for a, b in zip(weights[count - ramp :], rising[::-1], strict=True)]
            return [max(_RAMP_END, weight) for weight in weights]
    return [1.0] * count


def repeated_noise(option: FrameWindows, seeds: Sequence[int]) -> Callable[..., Any]:
    """Return the wrapper around a run that repeats the noise of the first window in another order: the frames behind a
    window have the noise of those that leave it. `seeds` are of the images, for their orders."""

    def run(sample: Callable[..., Any], noise: Callable[[], Tensor], sigmas: Tensor) -> Any:
        drawn = 0

        def draw() -> Tensor:
            nonlocal drawn
            drawn += 1
            return noise() if drawn > 1 else repeated(option, noise(), seeds)

        return sample(draw, sigmas)

    return run


def repeated(option: FrameWindows, noise_BCTHW: Tensor, seeds: Sequence[int]) -> Tensor:
    """Return the noise of videos: the new frames of each window get the noise of the frames that leave it."""
    cells, advance = noise_BCTHW.shape[2], option.length - option.overlap
    found_BCTHW = noise_BCTHW.clone()
    for row, seed in enumerate(seeds[: len(noise_BCTHW)]):
        generator = torch.Generator().manual_seed(checked_seed(seed))
        for start in range(option.length, cells, advance):
            count, before = min(advance, cells - start), start - option.length
            order = before + torch.randperm(count, generator=generator)
            found_BCTHW[row, :, start : start + count] = found_BCTHW[row, :, order]
    return found_BCTHW
