"""The reading of a text encoder for one text: with the images that it sees, or the image that it writes. Torch-free."""

from __future__ import annotations

from modelpool.pool.families.parts.text_reading import Reading
from modelpool.pool.families.parts.written_image import written_reading
from modelpool.pool.models.components.text.vision_prompt import reading_with_images
from modelpool.pool.values.core.stage_params import EncodeParams


def reading_of_work(reading: Reading, work: EncodeParams) -> Reading:
    """Return `reading` for the text of `work`."""
    if reading.quotes_apart:
        return reading
    if reading.writes_tokens:
        assert work.writes is not None, f"{reading.encoder} reads a text without an image to write"
        return written_reading(reading, work.writes, len(work.seen))
    return reading_with_images(reading, len(work.seen), work.numbered)
