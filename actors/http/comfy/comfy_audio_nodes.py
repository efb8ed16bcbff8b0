"""ComfyUI nodes of audio: empty latents, texts of music, decoding, edits, and saving. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from modelpool.actors.http.comfy.comfy_image_nodes import decoded_latent
from modelpool.actors.http.comfy.comfy_made_nodes import MadeNodes
from modelpool.actors.http.comfy.comfy_node_types import (
    AUDIOS,
    MAX_BATCH,
    MAX_SEED,
    Builder,
    NodeInput,
    NodeType,
    NodeUnsupported,
    combo,
    flag,
    link,
    number,
    only_in_workflows,
    shown_with,
    text,
    warn,
    whole,
)
from modelpool.actors.http.comfy.comfy_text_nodes import with_unread, with_video
from modelpool.actors.http.comfy.comfy_values import (
    BlankLatent,
    DecodedImage,
    DecodedSound,
    NodeAudio,
    NodeImage,
    SavedAs,
    TextValue,
    VideoUse,
)

_CLIP, _VAE, _AUDIO = link("clip", "CLIP"), link("vae", "VAE"), link("audio", "AUDIO")
_PREFIX = text("filename_prefix", "audio/ComfyUI")
_POSITIVE, _NEGATIVE = link("positive", "CONDITIONING"), link("negative", "CONDITIONING")
_MOST_SECONDS = 3600.0


def _empty(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (BlankLatent(0, 0, given.get("batch_size") or 1, seconds=given["seconds"]),)


def _song(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Tags and lyrics of a song."""
    if given["lyrics_strength"] not in (1.0, 0.99):
        warn(given, f"lyrics_strength: found {given['lyrics_strength']:g}, which is not read: 1 is")
    return (_with_lyrics(given),)


def _with_lyrics(given: Mapping[str, Any], **more: Any) -> TextValue:
    value = TextValue(given["tags"], given["clip"])
    fields = {"lyrics": given["lyrics"], **more} if given["lyrics"] else more
    return with_video(value, VideoUse(others=tuple(fields.items()))) if fields else value


def _song_with_facts(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Tags, lyrics and facts of a song. The model of the pool plans nothing by a language model."""
    if given.get("generate_audio_codes"):
        warn(given, "generate_audio_codes: found true; the pool samples without codes of a language model: seed, "
             "cfg_scale, temperature, top_p, top_k and min_p are not read")  # fmt: skip
    facts = {"bpm": given["bpm"], "time_signature": given["timesignature"], "key_scale": given["keyscale"]}
    found = {name: value for name, value in facts.items() if value}
    if given["language"]:
        found["lyrics_language"] = given["language"]
    return (with_unread(_with_lyrics(given, **found), given, "duration"),)


def _timed(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The seconds that a text is about: the length of the latents."""
    if given["seconds_start"]:
        raise NodeUnsupported(f"seconds_start: found {given['seconds_start']:g}, expected 0")
    warn(given, f"seconds_total: {given['seconds_total']:g} is not read: the text has the seconds of the latents")
    return given["positive"], given["negative"]


def _decoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return (DecodedImage(decoded_latent(given)),)


def _decoded_in_tiles(given: Mapping[str, Any]) -> tuple[Any, ...]:
    _warn_of_tiles(given)
    return _decoded(given)


def _warn_of_tiles(given: Mapping[str, Any]) -> None:
    found = ", ".join(f"{name} {given[name]}" for name in ("tile_size", "overlap") if given.get(name) is not None)
    if found:
        warn(given, f"{found}: not read: audio is decoded in one piece, or in tiles of the pool where it is too long")


def _decoded_node(given: Mapping[str, Any]) -> tuple[Any, ...]:
    _warn_of_tiles(given)
    nodes: MadeNodes = given["nodes"]
    image = nodes.decode(given["node_id"], given["samples"], given["vae"].name)
    return (NodeAudio(image.node, image.count, image.sampler),)


def _saved(file_format: str) -> Builder:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        if given.get("quality") is not None:
            warn(given, f"quality: {given['quality']} is not read: the file has the quality of the pool")
        audio, saved = given["audio"], SavedAs(file_format)
        if isinstance(audio, DecodedSound):
            raise NodeUnsupported("audio: the audio of a video without its frames is a part of a workflow")
        if isinstance(audio, NodeAudio):
            return (NodeImage(audio.node, audio.count, audio.sampler, saved),)
        return (replace(audio, saved=saved),)

    return build


def _saved_in_format(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A file of audio in a format that the node chooses, and the quality of the pool."""
    qualities = _QUALITIES[given["format"]]
    if given["format.quality"] not in ("", *qualities):
        raise NodeUnsupported(
            f"format.quality: found {given['format.quality'][:100]}, expected {' or '.join(qualities) or 'none'}"
        )
    return _saved(given["format"])({**given, "quality": given["format.quality"] or None})


def _loaded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    return (nodes.audio_of_user(given["node_id"], given["audio"]),)


def _encoded(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    return (nodes.encode_audio(given["node_id"], given["audio"], given["vae"].name),)


def _edit(operation: str, reads: Mapping[str, str], settings: Mapping[str, str]) -> Builder:
    def build(given: Mapping[str, Any]) -> tuple[Any, ...]:
        nodes: MadeNodes = given["nodes"]
        values = {name: given[source] for name, source in reads.items()}
        found = {name: given[source] for name, source in settings.items()}
        return (nodes.operate(given["node_id"], operation, NodeAudio, values, found),)

    return build


def _joined(given: Mapping[str, Any]) -> tuple[Any, ...]:
    nodes: MadeNodes = given["nodes"]
    one, other = given["audio1"], given["audio2"]
    if given["direction"] == "before":
        one, other = other, one
    return (nodes.operate(given["node_id"], "audio_concat", NodeAudio, {"first": one, "second": other}, {}),)


def _merged(given: Mapping[str, Any]) -> tuple[Any, ...]:
    if given["merge_method"] != "add":
        raise NodeUnsupported(f"merge_method: found {given['merge_method']}, expected add")
    return _edit("audio_merge", {"first": "audio1", "second": "audio2"}, {})(given)


def _silence(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return _edit("audio_silence", {}, {"seconds": "duration", "rate": "sample_rate", "channels": "channels"})(given)


def _row(
    name: str,
    category: str,
    build: Builder,
    inputs: tuple[NodeInput, ...],
    *outputs: str,
    is_output: bool = False,
) -> NodeType:
    return NodeType(name, category, inputs, outputs, build, is_output)


_SECONDS = number("seconds", 47.6, 0.1, _MOST_SECONDS)
_BATCH = whole("batch_size", 1, 1, MAX_BATCH, is_required=False)
_TWO = (link("audio1", "AUDIO"), link("audio2", "AUDIO"))
_MP3 = text("quality", "V0", is_required=False, choices=("V0", "128k", "320k"))
_OPUS = text("quality", "128k", is_required=False, choices=("64k", "96k", "128k", "192k", "320k"))
#: formats of SaveAudioAdvanced, and the qualities of each
_QUALITIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"flac": (), "mp3": ("V0", "128k", "320k"), "opus": ("64k", "96k", "128k", "192k", "320k")}
)
AUDIO_NODES = (
    _row("EmptyLatentAudio", "audio", _empty, (_SECONDS, _BATCH), "LATENT"),
    _row(
        "EmptyAceStepLatentAudio",
        "audio",
        _empty,
        (number("seconds", 120.0, 1.0, _MOST_SECONDS), _BATCH),
        "LATENT",
    ),
    _row(
        "EmptyAceStep1.5LatentAudio",
        "audio",
        _empty,
        (number("seconds", 120.0, 1.0, _MOST_SECONDS), _BATCH),
        "LATENT",
    ),
    _row(
        "TextEncodeAceStepAudio",
        "audio",
        _song,
        (_CLIP, text("tags"), text("lyrics"), number("lyrics_strength", 1.0, 0.0, 10.0)),
        "CONDITIONING",
    ),
    _row(
        "TextEncodeAceStepAudio1.5",
        "audio",
        _song_with_facts,
        (
            _CLIP,
            text("tags"),
            text("lyrics"),
            whole("seed", 0, 0, MAX_SEED, is_required=False),
            whole("bpm", 120, 10, 300),
            number("duration", 120.0, 0.0, _MOST_SECONDS, is_required=False),
            text("timesignature", "4"),
            text("language", "en"),
            text("keyscale", "E minor"),
            flag("generate_audio_codes", True, is_required=False),
            number("cfg_scale", 2.0, 0.0, 100.0, is_required=False),
            number("temperature", 0.85, 0.0, 2.0, is_required=False),
            number("top_p", 0.9, 0.0, 1.0, is_required=False),
            whole("top_k", 0, 0, 100, is_required=False),
            number("min_p", 0.0, 0.0, 1.0, is_required=False),
        ),
        "CONDITIONING",
    ),
    _row(
        "ConditioningStableAudio",
        "audio",
        _timed,
        (
            _POSITIVE,
            _NEGATIVE,
            number("seconds_start", 0.0, 0.0, 1000.0),
            number("seconds_total", 47.0, 0.0, 1000.0),
        ),
        "CONDITIONING",
        "CONDITIONING",
    ),
    _row("VAEDecodeAudio", "audio", _decoded, (link("samples", "LATENT"), _VAE), "AUDIO"),
    _row(
        "VAEDecodeAudioTiled",
        "audio",
        _decoded_in_tiles,
        (
            link("samples", "LATENT"),
            _VAE,
            whole("tile_size", 512, 32, 8192, is_required=False),
            whole("overlap", 64, 0, 1024, is_required=False),
        ),
        "AUDIO",
    ),
    _row("LoadAudio", "audio", only_in_workflows, (text("audio", choices=AUDIOS),), "AUDIO"),
    _row("VAEEncodeAudio", "audio", only_in_workflows, (_AUDIO, _VAE), "LATENT"),
    _row(
        "TrimAudioDuration",
        "audio",
        only_in_workflows,
        (_AUDIO, number("start_index", 0.0, -_MOST_SECONDS, _MOST_SECONDS), number("duration", 60.0, 0.0, 3600.0)),
        "AUDIO",
    ),
    _row("AudioConcat", "audio", only_in_workflows, (*_TWO, combo("direction", ("after", "before"))), "AUDIO"),
    _row(
        "AudioMerge",
        "audio",
        only_in_workflows,
        (*_TWO, combo("merge_method", ("add", "mean", "subtract", "multiply"))),
        "AUDIO",
    ),
    _row("AudioAdjustVolume", "audio", only_in_workflows, (_AUDIO, whole("volume", 1, -100, 100)), "AUDIO"),
    _row(
        "EmptyAudio",
        "audio",
        only_in_workflows,
        (number("duration", 60.0, 0.001, 3600.0), whole("sample_rate", 44100, 1, 192000), whole("channels", 2, 1, 2)),
        "AUDIO",
    ),
    _row("SaveAudio", "audio", _saved("flac"), (_AUDIO, _PREFIX), "AUDIO", is_output=True),
    _row("SaveAudioMP3", "audio", _saved("mp3"), (_AUDIO, _PREFIX, _MP3), "AUDIO", is_output=True),
    _row("SaveAudioOpus", "audio", _saved("opus"), (_AUDIO, _PREFIX, _OPUS), "AUDIO", is_output=True),
    _row(
        "SaveAudioAdvanced",
        "audio",
        _saved_in_format,
        (
            _AUDIO,
            _PREFIX,
            combo("format", tuple(_QUALITIES)),
            shown_with("format", ("mp3", "opus"), text("format.quality", is_required=False)),
        ),
        "AUDIO",
        is_output=True,
    ),
    _row("PreviewAudio", "audio", _saved("flac"), (_AUDIO,), is_output=True),
)
#: what they become in workflows
AUDIO_BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "LoadAudio": _loaded,
        "VAEEncodeAudio": _encoded,
        "VAEDecodeAudio": _decoded_node,
        "VAEDecodeAudioTiled": _decoded_node,
        "TrimAudioDuration": _edit("audio_trim", {"audio": "audio"}, {"start": "start_index", "seconds": "duration"}),
        "AudioConcat": _joined,
        "AudioMerge": _merged,
        "AudioAdjustVolume": _edit("audio_volume", {"audio": "audio"}, {"decibels": "volume"}),
        "EmptyAudio": _silence,
    }
)
