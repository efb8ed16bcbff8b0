"""`FileListings`: the files that requests can name, as a catalog and a pool list them. Types only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from modelpool.pool.catalog.registry.listings import FileNames, LoraListing, ModelListing


class FileListings(Protocol):
    """Lists files by name. Everything that lists them derives from this protocol, or implements it."""

    def models(self) -> tuple[ModelListing, ...]:
        """Return every checkpoint."""

    def loras(self) -> tuple[LoraListing, ...]:
        """Return every LoRA."""

    def file_names(self) -> FileNames:
        """Return the names of ControlNets, upscalers, image prompt adapters and embeddings."""
