"""The lists of the ControlNet extension of the A1111 web UI, below /controlnet."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from modelpool.actors.http.service.services import Services
from modelpool.actors.request.image_fields import MAX_PARTS

#: of the extension's API, with units in `alwayson_scripts`
_VERSION = 2
#: the only preprocessor: control images come preprocessed
_NO_MODULE = "none"


def controlnet_router(services: Services) -> APIRouter:
    """Return the routes below /controlnet."""
    router = APIRouter(prefix="/controlnet", tags=["a1111"])

    @router.get("/version", summary="Show the version of the extension's API")
    async def version() -> dict[str, int]:
        return {"version": _VERSION}

    @router.get("/settings", summary="Show the largest number of units")
    async def settings() -> dict[str, int]:
        return {"control_net_unit_count": MAX_PARTS}

    @router.get("/model_list", summary="List the ControlNets")
    async def model_list() -> dict[str, Any]:
        return {"model_list": list((await services.listings()).files.controlnets)}

    @router.get("/module_list", summary="List the preprocessors: none")
    async def module_list() -> dict[str, Any]:
        return {"module_list": [_NO_MODULE], "module_detail": {_NO_MODULE: {"model_free": False, "sliders": []}}}

    @router.get("/control_types", summary="List the kinds of ControlNets: all together")
    async def control_types() -> dict[str, Any]:
        names = ["None", *(await services.listings()).files.controlnets]
        every = {"module_list": [_NO_MODULE], "model_list": names, "default_option": _NO_MODULE}
        return {"control_types": {"All": {**every, "default_model": "None"}}}

    return router
