"""`EmbeddingIndex`: the textual inversions that prompts name, found in the registry. Reads headers; needs no device.

`pool.text.embeddings` reads them, `pool.text.chunks` inserts them into a prompt.
"""

from __future__ import annotations

from modelpool.pool.core.errors import UnknownName, unknown_name
from modelpool.pool.core.stage_params import EmbeddingRef
from modelpool.pool.registry.kinds import FileKind
from modelpool.pool.registry.names import without_suffix
from modelpool.pool.registry.registry import Registry
from modelpool.pool.text.chunks import embeddings_in
from modelpool.pool.text.embeddings import read_embedding

_KINDS = frozenset({FileKind.EMBEDDING})


class EmbeddingIndex:
    """The embeddings of a registry. Not thread safe."""

    def __init__(self, registry: Registry, allow_pickle: bool = False) -> None:
        self._registry, self._allow_pickle = registry, allow_pickle
        self._rows: dict[str, int] = {}

    def of(self, text: str) -> tuple[EmbeddingRef, ...]:
        """Return those that a prompt names, each once, under the prompt's names.

        Raises UnknownName, AmbiguousName or CorruptFile.
        """
        return tuple(self._find(name) for name in embeddings_in(text))

    def _find(self, name: str) -> EmbeddingRef:
        try:
            file = self._registry.find(name, _KINDS, "embedding")
        except UnknownName:
            known = [without_suffix(found.path.name) for _, found in self._registry.files(_KINDS)]
            raise unknown_name("embedding", name, known) from None
        sha256 = self._registry.hashes(file).sha256
        path, files = self._registry.locate(file)
        if sha256 not in self._rows:
            self._registry.bring(files)
            vectors = read_embedding(path, name, allow_pickle=self._allow_pickle).vectors.values()
            self._rows[sha256] = max(len(rows) for rows in vectors)
        return EmbeddingRef(name, path, sha256, self._rows[sha256], files)
