"""Chooses the node of a pool's catalog: one that has the configured files, wherever the controller runs.

The catalog reads model files, so it must run where they are; the controller reads none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from modelpool.actors.config.config import ModelsSection
from modelpool.pool.values.core.errors import UserError, counted
from modelpool.pool.values.specs.spec import NodeId

#: nodes or paths that an error names
MOST_NAMED = 6


def paths_of(models: ModelsSection) -> tuple[Path, ...]:
    """Return the files and folders that a configuration names, all absolute: folders of models first."""
    separate = (Path(file) for assembly in models.assemblies for file in assembly.files)
    return tuple(dict.fromkeys((*models.folders, *models.loras, *separate)))


def added_paths(models: ModelsSection) -> tuple[Path, ...]:
    """Return the files and folders that were added to this machine's registry. Other machines do not know them."""
    from modelpool.pool.catalog.registry.registry_store import open_store

    try:
        return open_store(models.registry).locations()
    except UserError:  # reported when the registry is used
        return ()


def existing(paths: Iterable[Path]) -> frozenset[Path]:
    """Return the `paths` that exist on this machine; an empty folder does not count."""
    return frozenset(path for path in paths if _has_content(path))


def _has_content(path: Path) -> bool:
    try:
        return any(path.iterdir()) if path.is_dir() else path.exists()
    except OSError:  # not ours to read
        return False


def nodes_for_catalog(
    paths: Sequence[Path],
    found: Mapping[NodeId, Collection[Path]],
    preferred: Sequence[NodeId],
    names: Mapping[NodeId, str],
) -> tuple[NodeId, ...]:
    """Return the nodes on which the catalog can run, best first: those that have every path which exists anywhere;
    `preferred` ones first, then by name.

    `found` are the existing paths by node. A path that exists nowhere counts as an empty folder, as on a single
    machine. Raises UserError if none of the paths exists anywhere, and if no node has all that exist.
    """
    somewhere = {path for node_paths in found.values() for path in node_paths}
    if paths and not somewhere:
        raise UserError(
            f"[models] {_some(map(str, paths))}: found on none of the {counted(len(found), 'node')} "
            f"({_some_nodes(found, names)}); provide the files on at least one of them"
        )
    order = {node: place for place, node in enumerate(preferred)}
    complete = [node for node, node_paths in found.items() if somewhere <= set(node_paths)]
    if not complete:
        places = "; ".join(
            f"{path} is on {_some_nodes([n for n in found if path in found[n]], names)}"
            for path in paths
            if path in somewhere
        )
        raise UserError(f"[models] no node has all files: {places}. Provide all of them on one node")
    return tuple(sorted(complete, key=lambda node: (order.get(node, len(order)), names.get(node, ""), node)))


def _some_nodes(nodes: Collection[NodeId], names: Mapping[NodeId, str]) -> str:
    return _some(sorted(names.get(node, node) for node in nodes))


def _some(texts: Iterable[str]) -> str:
    """The first of some texts, with the number of the others."""
    texts = list(texts)
    more = len(texts) - MOST_NAMED
    return ", ".join(texts[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
