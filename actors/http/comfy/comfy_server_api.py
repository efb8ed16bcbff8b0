"""Calls of ComfyUI about the server: folders of models, GPUs, features, users and settings of the editor."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from typing import Any

import psutil
from fastapi import APIRouter, Request
from fastapi.responses import Response

from modelpool.actors.control.status import WorkerStatus
from modelpool.actors.http.service.bodies import json_body, json_object
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.services import Listings, Services, caller_of

#: settings of one user, as JSON
MOST_SETTINGS_BYTES = 1 << 18
#: free memory is shown in these steps: the exact number is another one in each call
_MEMORY_STEP = 1 << 27
#: folders of ComfyUI for files that belong to a model of the pool, or that the pool does not have
_EMPTY_FOLDERS = (
    "configs", "vae", "text_encoders", "clip_vision", "diffusers", "vae_approx", "hypernetworks",
    "photomaker", "classifiers", "model_patches", "audio_encoders", "latent_upscale_models",
)  # fmt: skip
#: earlier names of folders, which are not listed
_EARLIER: Mapping[str, str] = {"unet": "diffusion_models", "clip": "text_encoders"}
#: folders without models
_NO_MODELS = ("configs",)


class UserSettings:
    """The settings that the editor keeps on the server, by owner: the users of the keys, so that their number is
    bounded. They end with the server, and have no effect on it. Belongs to one event loop."""

    def __init__(self, most_bytes: int = MOST_SETTINGS_BYTES) -> None:
        self._most_bytes = most_bytes
        self._of: dict[str, dict[str, Any]] = {}

    def of(self, owner: str) -> Mapping[str, Any]:
        """Return the settings of an owner, by name."""
        return self._of.get(owner, {})

    def change(self, owner: str, values: Mapping[str, Any]) -> None:
        """Set these settings of an owner; those that are null are removed. Raises HttpProblem (413)."""
        merged = {**self.of(owner), **values}
        changed = {name: value for name, value in merged.items() if value is not None}
        size_bytes = len(json.dumps(changed))
        if size_bytes > self._most_bytes:
            message = f"settings: found {size_bytes} bytes of a user, expected up to {self._most_bytes}"
            raise HttpProblem(413, message, limit="settings_bytes")
        self._of[owner] = changed


def add_server_routes(router: APIRouter, services: Services) -> None:
    """Add the routes to `router`."""
    _add_model_routes(router, services)
    _add_user_routes(router)

    @router.get("/system_stats", summary="Show the GPUs")
    async def system_stats() -> dict[str, Any]:
        status = await asyncio.to_thread(services.pool.status)
        return {"system": _system(), "devices": [_device(*each) for each in enumerate(status.workers)]}

    @router.get("/features", summary="Show what the server supports, and its largest upload")
    async def features() -> dict[str, Any]:
        return dict(socket_features(services))

    @router.get("/extensions", summary="Empty: the server has no extensions of the editor")
    async def extensions() -> list[str]:
        return []

    @router.post("/free", summary="Accepted, without effect: the pool decides what is on its GPUs, for all users")
    async def free(request: Request) -> Response:
        if await request.body():
            await json_object(request, MOST_SETTINGS_BYTES)
        return Response()


def socket_features(services: Services) -> Mapping[str, Any]:
    """Return what the server supports, as web sockets and calls tell it."""
    return {"supports_preview_metadata": True, "max_upload_size": services.settings.upload_bound_bytes}


def _add_model_routes(router: APIRouter, services: Services) -> None:
    async def found_in(folder: str) -> list[str]:
        found = _folders(await services.listings())
        name = _EARLIER.get(folder, folder)
        if name not in found:
            raise HttpProblem(404, f"folder: found {folder[:40]!r}, expected one of {', '.join(found)}")
        return found[name]

    @router.get("/models", summary="List the folders of models")
    async def folders() -> list[str]:
        return list(_folders(await services.listings()))

    @router.get("/models/{folder}", summary="List the models in a folder")
    async def in_folder(folder: str) -> list[str]:
        return await found_in(folder)

    @router.get("/experiment/models", summary="List the folders of models, with their places")
    async def places() -> list[dict[str, Any]]:
        names = _folders(await services.listings())
        return [{"name": name, "folders": [name]} for name in names if name not in _NO_MODELS]

    @router.get("/experiment/models/{folder}", summary="List the models in a folder, with their sizes")
    async def in_place(folder: str) -> list[dict[str, Any]]:
        names = await found_in(folder)
        listings = await services.listings()
        sizes = {each.name: each.file_bytes for each in listings.loras}
        sizes |= {each.name: each.file_bytes for each in listings.models}
        return [{"name": name, "pathIndex": 0, "size": sizes.get(name, 0)} for name in names]

    @router.get("/embeddings", summary="List the embeddings, which prompts name as embedding:NAME")
    async def embeddings() -> list[str]:
        return list((await services.listings()).files.embeddings)


def _add_user_routes(router: APIRouter) -> None:
    kept = UserSettings()

    @router.get("/users", summary="Show that the server keeps the settings of the editor")
    async def users() -> dict[str, Any]:
        return {"storage": "server", "migrated": True}

    @router.get("/settings", summary="List your settings of the editor")
    async def settings(request: Request) -> dict[str, Any]:
        return dict(kept.of(caller_of(request).owner))

    @router.get("/settings/{name}", summary="Show a setting of the editor; null if it is not set")
    async def setting(request: Request, name: str) -> Any:
        return kept.of(caller_of(request).owner).get(name)

    @router.post("/settings", summary="Change your settings of the editor")
    async def change(request: Request) -> Response:
        kept.change(caller_of(request).owner, await json_object(request, MOST_SETTINGS_BYTES))
        return Response()

    @router.post("/settings/{name}", summary="Change a setting of the editor")
    async def change_one(request: Request, name: str) -> Response:
        kept.change(caller_of(request).owner, {name: await json_body(request, MOST_SETTINGS_BYTES)})
        return Response()


def _folders(listings: Listings) -> dict[str, list[str]]:
    """Return the names of the pool's files by the folders in which ComfyUI has such files."""
    models, files = [each.name for each in listings.models], listings.files
    return {
        "checkpoints": models,
        "diffusion_models": models,
        "loras": [each.name for each in listings.loras],
        "controlnet": list(files.controlnets),
        "upscale_models": list(files.upscalers),
        "style_models": list(files.image_prompts),
        "gligen": list(files.gligens),
        "embeddings": list(files.embeddings),
        **{name: [] for name in _EMPTY_FOLDERS},
    }


def _system() -> dict[str, Any]:
    """Return the facts about the machine of the server that clients show."""
    from modelpool import __version__

    memory = psutil.virtual_memory()
    return {
        "os": os.name,
        "ram_total": memory.total,
        "ram_free": memory.available // _MEMORY_STEP * _MEMORY_STEP,
        "comfyui_version": "modelpool",
        "modelpool_version": __version__,
        "required_frontend_version": None,
        "installed_templates_version": None,
        "required_templates_version": None,
        "python_version": platform.python_version(),
        "pytorch_version": importlib.metadata.version("torch"),
        "embedded_python": False,
        "argv": [],
    }


def _device(index: int, worker: WorkerStatus) -> dict[str, Any]:
    """Return a GPU; all that the pool uses of it is torch's."""
    return {
        "name": f"{worker.id} {worker.device}",
        "type": "cuda",
        "index": index,
        "vram_total": worker.capacity_bytes,
        "vram_free": worker.capacity_bytes - worker.used_bytes,
        "torch_vram_total": worker.used_bytes,
        "torch_vram_free": 0,
    }
