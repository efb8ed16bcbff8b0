"""`EmbeddingIndex`: the textual inversions that prompts name, found in the registry and in LoRA files. Reads headers;
needs no device.

`pool.models.text.embeddings` reads them, `pool.models.text.chunks` inserts them into a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from modelpool.pool.catalog.registry.file_purpose import EMBEDDINGS
from modelpool.pool.catalog.registry.registry import Registry
from modelpool.pool.catalog.registry.weight_file_names import without_suffix
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.models.text.chunks import embeddings_in
from modelpool.pool.models.text.embeddings import read_embedding
from modelpool.pool.values.core.errors import UnknownName, unknown_name
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.stage_params import EmbeddingRef, LoraRef
from modelpool.pool.weights.keymaps.adapter_keys import bundled_name

#: embeddings and LoRA files that have their facts kept
_MOST_FILES = 65_536


class EmbeddingIndex:
    """The embeddings of a registry. Not thread safe."""

    def __init__(self, registry: Registry, allow_pickle: bool = False) -> None:
        self._registry, self._allow_pickle = registry, allow_pickle
        self._rows: LruCache[str, int] = LruCache(_MOST_FILES)
        #: names of the embeddings in LoRA files, by hash
        self._bundles: LruCache[str, frozenset[str]] = LruCache(_MOST_FILES)

    def of(self, text: str, loras: Sequence[LoraRef] = ()) -> tuple[EmbeddingRef, ...]:
        """Return those that a prompt names, each once, under the prompt's names. Those that the files of `loras` bundle
        come first.

        Raises UnknownName, AmbiguousName or CorruptFile.
        """
        return tuple(self._bundled(name, loras) or self._find(name) for name in embeddings_in(text))

    def _bundled(self, name: str, loras: Sequence[LoraRef]) -> EmbeddingRef | None:
        for lora in loras:
            names = self._bundles.get(lora.sha256, partial(self._names_in, lora.path))
            if name in names:
                rows = self._row_count(f"{lora.sha256} {name}", lora.path, name)
                return EmbeddingRef(name, lora.path, lora.sha256, rows, lora.files)
        return None

    def _names_in(self, path: str) -> frozenset[str]:
        header = read_weights_header(path, allow_pickle=self._allow_pickle)
        return frozenset(found[0] for key in header.tensors if (found := bundled_name(key)))

    def _find(self, name: str) -> EmbeddingRef:
        try:
            file = self._registry.find_embedding(name)
        except UnknownName:
            known = [without_suffix(found.path.name) for _, found in self._registry.files(EMBEDDINGS)]
            hint = "" if known else " Put its file in a folder `embeddings` among the models"
            raise UnknownName(f"{unknown_name('embedding', name, known)}{hint}") from None
        sha256 = self._registry.hashes(file).sha256
        path, files = self._registry.locate(file)
        self._registry.bring(files)
        return EmbeddingRef(name, path, sha256, self._row_count(sha256, path, name), files)

    def _row_count(self, key: str, path: str, name: str) -> int:
        def find() -> int:
            return max(map(len, read_embedding(path, name, allow_pickle=self._allow_pickle).vectors.values()))

        return self._rows.get(key, find)
