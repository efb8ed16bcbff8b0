"""The texts that models of music read: a caption with facts about the music, and lyrics. Torch-free.

Source: diffusers' AceStepPipeline.
"""

from __future__ import annotations

#: stands for a fact that the model chooses
_UNSAID = "N/A"
#: language of lyrics that name none
DEFAULT_LANGUAGE = "en"


def caption_text(
    prompt: str, seconds: float, bpm: int | None, key_scale: str | None, time_signature: str | None
) -> str:
    """Return the text of `prompt` with the facts of the music; None for those that the model chooses."""
    facts = {
        "bpm": bpm or _UNSAID,
        "timesignature": time_signature or _UNSAID,
        "keyscale": key_scale or _UNSAID,
        "duration": f"{int(seconds)} seconds",
    }
    lines = "".join(f"- {name}: {value}\n" for name, value in facts.items())
    return f"{prompt}\n\n# Metas\n{lines}"


def lyrics_text(lyrics: str, language: str) -> str:
    """Return the text of lyrics in a language."""
    return f"# Languages\n{language}\n\n# Lyric\n{lyrics}"
