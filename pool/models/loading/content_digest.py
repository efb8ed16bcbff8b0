"""Computes a digest of each component from the names, dtypes, shapes and bytes of its tensors, to find equal components
in different files. Torch-free.

Names count without the prefix of the file, so that a VAE has one digest in a separate file and in a complete
checkpoint. The same weights in another dtype or key naming are another component. Reads no weights (`RangeDigests` gets
the bytes from a reader) and stores nothing (`pool.catalog.registry.contents`).
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise

from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.files.formats.safetensors_file import Header
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.quant.detect_layers import QuantizedLayer

#: truncated SHA-256: 128 bits distinguish tensors
DIGEST_BYTES = 16


class RangeDigests:
    """Digests of non-overlapping ranges of one file, updated while the file is read from start to end."""

    def __init__(self, ranges: Iterable[ByteRange]) -> None:
        self._ranges = sorted(set(ranges))
        self._ends = [end for _, end in self._ranges]
        self._hashes = [hashlib.sha256() for _ in self._ranges]

    @staticmethod
    def of(header: Header) -> RangeDigests | None:
        """Return the digests of all tensors of a single file; None if some of them share bytes, as in pickles."""
        found = sorted({(entry.begin, entry.end) for entry in header.tensors.values()})
        if any(end > begin for (_, end), (begin, _) in pairwise(found)):
            return None
        return RangeDigests(found)

    def update(self, chunk: memoryview, place: int) -> None:
        """Add the bytes of the file at offset `place`, which follow the last call's."""
        stop = place + len(chunk)
        for number in range(bisect_right(self._ends, place), len(self._ranges)):
            begin, end = self._ranges[number]
            if begin >= stop:
                return
            self._hashes[number].update(chunk[max(0, begin - place) : end - place])

    def digests(self) -> dict[ByteRange, bytes]:
        """Return the digest of each range."""
        return {r: h.digest()[:DIGEST_BYTES] for r, h in zip(self._ranges, self._hashes, strict=True)}


def component_digests(
    family: LocatedFamily,
    header: Header,
    layers: Mapping[str, QuantizedLayer],
    digests_of: Callable[[str], Mapping[ByteRange, bytes] | None],
) -> dict[Role, str]:
    """Return the digest of each component of a checkpoint, in hexadecimal; components with a tensor without a digest
    are left out. `digests_of` returns the digests of the file at a path, or None."""
    known: dict[str, Mapping[ByteRange, bytes]] = {}
    for path in header.files:
        known[path] = digests_of(path) or {}
    found = {}
    for role in family.prefixes:
        lines = list(_lines(family, role, header, layers, known))
        if None not in lines:
            text = "\n".join([_built_as(family, role), *sorted(line for line in lines if line is not None)])
            found[role] = hashlib.sha256(text.encode()).hexdigest()
    return found


def _lines(
    family: LocatedFamily,
    role: Role,
    header: Header,
    layers: Mapping[str, QuantizedLayer],
    known: Mapping[str, Mapping[ByteRange, bytes]],
) -> Iterator[str | None]:
    """Yield a description of each tensor of a component; None for one with an unknown digest."""
    for key in family.shapes_of(role, header.shapes):
        entry = header.tensors[key]
        digest = known[header.path_of(key)].get((entry.begin, entry.end))
        bare = family.bare_key(role, key)
        turned = f" {entry.heads} {entry.added}" if entry.heads or entry.added else ""
        yield None if digest is None else f"{bare} {entry.dtype} {entry.shape} {entry.strides}{turned} {digest.hex()}"
    for key in family.shapes_of(role, dict.fromkeys(layers, ())):
        yield f"{family.bare_key(role, key)} is {layers[key].marker}"


def _built_as(family: LocatedFamily, role: Role) -> str:
    """Return what else determines the results of a component."""
    config = dict(family.configs.get(role, {}))
    config |= family.sound_configs if role is Role.VAE else {}
    return f"{family.architectures[role].name} {json.dumps(config, sort_keys=True, default=str)}"
