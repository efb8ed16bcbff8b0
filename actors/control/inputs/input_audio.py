"""Reads and stores the audio of workflows, by the rules of `actors.control.inputs.input_images`."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable

from modelpool.actors.graph.common.input_ids import input_audio_id
from modelpool.actors.request.audio_fields import AudioSource, InputAudio, Sound, read_audio
from modelpool.actors.worker.wire.messages import ResultRef
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.stage_params import AudioSamples, Result
from modelpool.pool.values.specs.spec import TaskId

#: number of stored audio files that are remembered for later requests; an entry is only a reference
REMEMBERED = 64


class InputAudios:
    """The audio of one submission."""

    def __init__(self, put: Callable[[Result], ResultRef]) -> None:
        """`put` stores audio where workers find it."""
        self._put = put
        self._brought: LruCache[Hashable, tuple[InputAudio, ResultRef]] = LruCache(REMEMBERED)

    def bring(self, name: str, source: AudioSource, refs: dict[TaskId, ResultRef]) -> InputAudio:
        """Return the audio of a node of a workflow, stored; its reference is added to `refs`. Raises UserError naming
        the node."""
        if isinstance(source, InputAudio):
            return source

        def bring() -> tuple[InputAudio, ResultRef]:
            sound = source if isinstance(source, Sound) else read_audio(name, source)
            count, channels = sound.samples.shape
            file = os.path.basename(source) if isinstance(source, str) else ""
            audio = InputAudio(sound.sha256, count / sound.rate, sound.rate, channels, file)
            return audio, self._put(AudioSamples(sound.samples, sound.rate))

        audio, ref = self._brought.get(_identity(source), bring)
        refs[input_audio_id(audio)] = ref
        return audio


def _identity(source: str | Sound) -> Hashable:
    """Return a key that is equal for equal samples, as far as known without reading them."""
    if isinstance(source, Sound):
        return source.sha256
    try:
        found = os.stat(source)
    except OSError:
        return source  # reading the file raises the error
    return source, found.st_mtime_ns, found.st_size
