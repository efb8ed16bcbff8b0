"""How much faster batches are than single images, as measured, and the batch size that follows from it. Pure.

The measurements are in `pool.families.batch_gain_table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

#: a larger batch is taken if it makes at least so many times the images of the next smaller one: less is within the
#: noise of measurements, and a larger pass has more padding and takes more memory
PAYS_FROM = 1.1
#: a measurement holds for models with up to so many times the weights of the measured one: more work fills a device
#: sooner
WEIGHTS_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class MeasuredGain:
    """Images per second of batches, as multiples of the rate of single images, for one model on one device.

    families      of the model, and others of the same architecture
    kinds         device kinds for which it holds
    device        the measured device, for users
    side          of the square images, in pixels
    weight_bytes  of the diffusion model, as it was computed
    gains         by batch size, in ascending order, without 1
    source        where the figures are from
    """

    families: frozenset[str]
    kinds: frozenset[str]
    device: str
    side: int
    weight_bytes: int
    gains: Mapping[int, float]
    source: str

    @property
    def pixels(self) -> int:
        """Pixels of an image."""
        return self.side * self.side


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """A batch size, and why it is that, for users; `gain`: as in `MeasuredGain`, 0 if that was not measured."""

    size: int
    reason: str
    gain: float = 0.0


@dataclass(frozen=True, slots=True)
class BatchedWork:
    """What the gain of a batch depends on.

    family        of the model, as users call it
    kind          of the device
    weight_bytes  of the diffusion model, as it is computed
    measured      the measurements of this family on this kind of device
    device_bytes  memory of the weakest of these devices on the catalog's node; 0 if it is not known, and None where the
                  host computes in its own
    """

    family: str
    kind: str
    weight_bytes: int
    measured: Sequence[MeasuredGain] = ()
    device_bytes: int | None = None

    def usual_size(self, width: int, height: int, frames: int = 0, expected: int = 0, workers: int = 1) -> BatchChoice:
        """Return the batch size for images of this size. A measurement holds for smaller images and models, too: they
        fill a device later.

        Of several devices the median counts, as the devices of a pool are not known when a request is submitted.
        `expected` images in all (0: not known) on so many workers have the size with which they end first, with
        padding, and with workers that have nothing left."""
        what = f"{self.family} at {width}x{height} on {self.kind}"
        if frames > 1:
            return BatchChoice(1, f"no gain of batches is measured for videos of {self.family}")
        fitting = [each for each in self.measured if self.weight_bytes <= WEIGHTS_MARGIN * each.weight_bytes]
        sides = [each.side for each in fitting if width * height <= each.pixels]
        if not sides:
            if not fitting:
                return BatchChoice(1, f"no gain of batches is measured for {self.family} of this size on {self.kind}")
            return BatchChoice(1, f"no gain of batches is measured for {what}, nor for larger images")
        rows = [each for each in fitting if each.side == min(sides)]
        gains = _typical(rows)
        size = _paying_size(gains)
        at = f"{rows[0].side}x{rows[0].side}"
        if size == 1:
            best = max(gains.values())
            return BatchChoice(1, f"batches of {what} make {best:.2f} times the images at most, measured at {at}")
        less = _size_for(expected, workers, gains, size) if expected else size
        if less == 1:
            return BatchChoice(1, f"{expected} in all would end later with more per pass")
        devices = ", ".join(dict.fromkeys(row.device for row in rows))
        gained = f"{gains[less]:.1f} times the images of single passes, measured for {self.family} at {at}"
        gained += f" on {self.kind} ({devices})"
        return BatchChoice(less, gained, gains[less])


def _typical(rows: Sequence[MeasuredGain]) -> dict[int, float]:
    """Return the median of the devices for each size that at least half of them have, in ascending order."""
    found = {size: [row.gains[size] for row in rows if size in row.gains] for row in rows for size in row.gains}
    return {size: median(gains) for size, gains in sorted(found.items()) if 2 * len(gains) >= len(rows)}


def _paying_size(gains: Mapping[int, float]) -> int:
    """Return the largest size up to which each makes enough more images than the one before."""
    chosen, gained = 1, 1.0
    for size, gain in gains.items():
        if gain < PAYS_FROM * gained:
            break
        chosen, gained = size, gain
    return chosen


def _size_for(expected: int, workers: int, gains: Mapping[int, float], most: int) -> int:
    """Return the size up to `most` with which so many images end first on so many workers; of equal ones the
    smallest."""
    sizes = {1: 1.0, **{size: gain for size, gain in gains.items() if size <= most}}

    def ends_after(size: int) -> float:
        """Return the time of the passes of one worker, in times of a single image."""
        passes = -(-expected // size)
        return -(-passes // workers) * size / sizes[size]

    return min(sizes, key=lambda size: (ends_after(size), size))
