"""Audio that is written and read back by another reader: every sample, the rate, the comment."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.actors.outputs.audio import AudioKind, as_16_bits, audio_kind, encode_audio, write_audio
from modelpool.pool.values.core.errors import OutputFailed, UnknownName, UnusableField
from tests.each_case import each_case

KINDS = pytest.mark.parametrize("kind", [kind for kind in AudioKind if kind.is_lossless], ids=lambda kind: kind.value)
LOSSY = [kind for kind in AudioKind if not kind.is_lossless]
Samples = npt.NDArray[np.int16]


def samples(channels: int = 2, length: int = 10_007) -> Samples:
    """Noise, with the loudest and the quietest samples that there are."""
    generator = np.random.default_rng(5)
    noise = generator.integers(-32768, 32768, (channels, length)).astype(np.int16)
    noise[:, 0], noise[:, -1] = -32768, 32767
    return noise


def read(content: bytes) -> tuple[Samples, int, dict[str, str]]:
    """Channels and samples, the rate, and further facts."""
    with av.open(io.BytesIO(content), "r") as container:
        stream = container.streams.audio[0]
        channels = stream.codec_context.layout.nb_channels
        parts = []
        for frame in container.decode(audio=0):
            found = frame.to_ndarray()
            parts.append(found if frame.format.is_planar else found.reshape(-1, channels).T)
        return np.concatenate(parts, axis=1), stream.rate, {**stream.metadata, **container.metadata}


@KINDS
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(("length", "rate"), [(1, 8000), (4096, 44100), (10_007, 48000)])
def test_every_sample_is_kept(kind: AudioKind, channels: int, length: int, rate: int) -> None:
    audio = samples(channels, length)
    found, told, _ = read(encode_audio(audio, rate, kind))
    assert found.dtype == np.int16
    assert told == rate
    assert np.array_equal(found, audio)


def test_a_wav_is_what_python_reads() -> None:
    audio = samples()
    with wave.open(io.BytesIO(encode_audio(audio, 44100, AudioKind.WAV))) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (2, 2, 44100)
        found = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").reshape(-1, 2).T
    assert np.array_equal(found, audio)


@KINDS
def test_a_comment_is_kept(kind: AudioKind) -> None:
    _, _, told = read(encode_audio(samples(), 44100, kind, comment="a drum, loud"))
    assert {key.lower(): value for key, value in told.items()}["comment"] == "a drum, loud"


@each_case("kind", LOSSY)
def test_a_lossy_file_sounds_alike_and_is_small_and_equal_each_time(kind: AudioKind) -> None:
    wave_CL = np.stack([np.sin(np.arange(44100) / 20), np.sin(np.arange(44100) / 33)]) * 0.5
    audio = as_16_bits(wave_CL)
    content = encode_audio(audio, 44100, kind, comment="a drum, loud")
    assert content == encode_audio(audio, 44100, kind, comment="a drum, loud")
    assert len(content) < audio.nbytes / 3
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.audio[0]
        assert {**stream.metadata, **container.metadata}["comment"] == "a drum, loud"
        resampler = av.AudioResampler("s16p", "stereo", 44100)
        frames = [one for frame in container.decode(audio=0) for one in resampler.resample(frame)]
        found = np.concatenate([frame.to_ndarray() for frame in frames], axis=1)
    lag = 4000
    length = min(found.shape[1], audio.shape[1]) - 2 * lag
    wanted = audio[:, lag : lag + length].astype(float)
    away = min(np.abs(found[:, lag + shift : lag + shift + length] - wanted).mean() for shift in range(-700, 700))
    assert away < 300, "within a delay of the codec"
    odd = encode_audio(audio[:, :4000], 11000, kind)
    with av.open(io.BytesIO(odd)) as container:
        assert container.streams.audio[0].rate in (44100, 48000)


def test_flac_is_smaller_than_wav() -> None:
    wave_CL = np.sin(np.arange(44100) / 20)[None] * 0.5
    audio = as_16_bits(wave_CL)
    assert len(encode_audio(audio, 44100, AudioKind.FLAC)) < 0.8 * len(encode_audio(audio, 44100, AudioKind.WAV))


@settings(deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=50))
def test_a_wave_becomes_its_nearest_samples(numbers: list[float]) -> None:
    wave_CL = np.array([numbers])
    found = as_16_bits(wave_CL)
    assert found.dtype == np.int16
    assert np.abs(found / 32767 - np.clip(wave_CL, -1, 1)).max() <= 0.5 / 32767 + 1e-12


@KINDS
def test_a_audio_is_written_whole_under_its_name(kind: AudioKind, tmp_path: Path) -> None:
    path = tmp_path / f"sound{kind.value}"
    path.write_bytes(b"what was there before")
    assert write_audio(path, samples(), 44100) == path
    assert np.array_equal(read(path.read_bytes())[0], samples())
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "nothing is left over"


def test_what_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"unknown audio format '\.aiff'.*Known: \.flac, \.mp3, \.opus, \.wav"):
        write_audio(tmp_path / "audio.aiff", samples(), 44100)
    with pytest.raises(UnknownName, match="unknown audio format"):
        audio_kind("audio")
    with pytest.raises(OutputFailed, match=r"missing/audio\.wav: cannot be written \(No such file or directory\)"):
        write_audio(tmp_path / "missing" / "audio.wav", samples(), 44100)
    with pytest.raises(UnusableField, match=r"samples: found 'float64 \(2, 3\)', expected int16 numbers"):
        encode_audio(np.zeros((2, 3)), 44100)  # type: ignore[arg-type]
    with pytest.raises(UnusableField, match="of one or two channels"):
        encode_audio(np.zeros((3, 3), np.int16), 44100)
    with pytest.raises(UnusableField, match="samples: found 0, expected at least one"):
        encode_audio(np.zeros((1, 0), np.int16), 44100)
    for rate in (0, -1, 10**9):
        with pytest.raises(UnusableField, match="samples per second: found"):
            encode_audio(samples(), rate)
    with pytest.raises(UnusableField, match="samples: found 'infinite or NaN'"):
        as_16_bits(np.array([[0.0, np.nan]]))
