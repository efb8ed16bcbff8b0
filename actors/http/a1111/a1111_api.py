"""The interface of the Stable Diffusion web UI of AUTOMATIC1111, below /sdapi/v1."""

from __future__ import annotations

import asyncio
import base64
import html
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from modelpool.actors.http.a1111.a1111_extras import (
    check_results,
    decoded,
    enlarging,
    finished,
    parse_extras,
    resized,
    several_images,
    single_image,
    unread_extras,
)
from modelpool.actors.http.a1111.a1111_requests import (
    CLIP_OPTION,
    MODEL_OPTION,
    ImageCall,
    Options,
    fitting_warnings,
    in_its_words,
    not_read,
    parse_call,
    requests_of,
    settings_warning,
    unread_settings,
)
from modelpool.actors.http.a1111.a1111_upscalers import PLAIN_NAMES
from modelpool.actors.http.service.access import Caller
from modelpool.actors.http.service.answers import json_answer
from modelpool.actors.http.service.bodies import json_object
from modelpool.actors.http.service.caller_images import CallerImages
from modelpool.actors.http.service.encoded_images import image_text, png_text
from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.http.service.services import Services, caller_of
from modelpool.actors.http.service.submissions import HttpSubmission, JobEnd, warnings_of
from modelpool.actors.http.service.upscaling import ImageToEnlarge, Upscaling
from modelpool.actors.outputs.image_metadata import PARAMETERS_KEY, texts_in
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.upscale_fields import Upscale
from modelpool.pool.families.supported import running_families
from modelpool.pool.inference.sampling.sampler_names import SAMPLERS, SCHEDULES
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.sampling_facts import SamplingFacts

INTERFACE = "a1111"
_PATH = "/sdapi/v1"
#: largest body of a call without images
MAX_OPTIONS_BYTES = 1 << 20
#: lists of what the pool does not have
_EMPTY_LISTS = ("hypernetworks", "face-restorers", "realesrgan-models", "prompt-styles", "sd-vae")
_LATENT_MODES = ("Latent",)


async def family_title(services: Services, model: str) -> str:
    """Return the title of the family of a model; "" if it is not known. `model` may be any name that the pool
    accepts."""
    listed = {each.name: each.family for each in (await services.listings()).models}
    if model not in listed:  # in other letters, with its folder, an alias or a hash, say
        (found,) = await asyncio.to_thread(services.pool.recipes, [GenerateRequest(model=model, prompt="")])
        if isinstance(found, UserError):
            return ""
        model = found.model
    return listed.get(model, "")


async def sampling_facts(services: Services, model: str) -> SamplingFacts | None:
    """Return how a model is sampled; None if it is not known. `model` may be any name that the pool accepts."""
    title = await family_title(services, model)
    return next((each.sampling for each in running_families().values() if each.title == title), None)


def a1111_router(services: Services) -> APIRouter:
    """Return the routes below /sdapi/v1."""
    router = APIRouter(prefix=_PATH, tags=["a1111"])
    upscaling = Upscaling(services)
    #: by owner: the users of the keys, so that their number is bounded
    options: dict[str, Options] = {}
    _add_generation(router, services, options)
    _add_options(router, services, options)
    _add_running_calls(router, services, upscaling)
    _add_enlarging(router, services, upscaling)
    _add_lists(router, services)
    _add_what_others_have(router)
    return router


def _add_generation(router: APIRouter, services: Services, options: Mapping[str, Options]) -> None:
    """Add the calls that make images, and the one that reads their parameters."""
    max_bytes = services.settings.upload_bound_bytes

    async def generate(request: Request, is_img2img: bool) -> Response:
        body = await json_object(request, max_bytes)
        call = parse_call(body, is_img2img)
        caller = caller_of(request)
        chosen = options.get(caller.owner, Options()).changed(call.override_settings)
        model = await services.model_or_default(chosen.model)
        # what the scale means depends on the model
        facts = None if call.distilled_cfg_scale is None else await sampling_facts(services, model)
        family = await family_title(services, model) if chosen.clip_layers > 1 else ""

        unread = not_read(body, call)
        if chosen.unread:
            unread.append(settings_warning("options", chosen.unread))

        def build() -> Sequence[GenerateRequest]:
            requests = requests_of(call, model, chosen.clip_layers, services.images_of_call(caller), facts, family)
            unread.extend(fitting_warnings(call, requests))
            return requests

        try:
            submission = await services.submit(caller, build, INTERFACE, call.batch_size * call.n_iter)
        except HttpProblem:
            raise
        except UserError as problem:
            raise in_its_words(problem) from None
        await services.wait(request, submission)
        ends = _successes(submission)
        texts = []
        if call.send_images:
            paths = [end.path for end in ends if end.path is not None]
            texts = await asyncio.gather(*(asyncio.to_thread(image_text, path) for path in paths))
        shown = {name: value for name, value in body.items() if name not in ("init_images", "mask")}
        info = json.dumps(_info(call, model, ends, unread))
        return await json_answer({"images": list(texts), "parameters": shown, "info": info})

    @router.post("/txt2img", summary="Generate images")
    async def txt2img(request: Request) -> Response:
        return await generate(request, is_img2img=False)

    @router.post("/img2img", summary="Change an image")
    async def img2img(request: Request) -> Response:
        return await generate(request, is_img2img=True)

    @router.post("/png-info", summary="Read the generation parameters in an image")
    async def png_info(request: Request) -> dict[str, Any]:
        body = await json_object(request, max_bytes)
        caller = caller_of(request)
        with services.holding(caller):
            texts = await asyncio.to_thread(_texts_in, services.images_of_call(caller), body.get("image"))
        return {"info": texts.get(PARAMETERS_KEY, ""), "items": texts, "parameters": {}}


def _add_options(router: APIRouter, services: Services, options: dict[str, Options]) -> None:
    """Add the calls that show and choose what later calls use."""

    @router.get("/options", summary="Show the options that are used")
    async def show_options(request: Request) -> dict[str, Any]:
        chosen = options.get(caller_of(request).owner, Options())
        names = [each.name for each in (await services.listings()).models]
        model = chosen.model or (names[0] if len(names) == 1 else "")
        return {MODEL_OPTION: model, CLIP_OPTION: chosen.clip_layers}

    @router.post("/options", summary="Choose the model of later calls")
    async def set_options(request: Request) -> None:
        owner = caller_of(request).owner
        values = await json_object(request, MAX_OPTIONS_BYTES)
        chosen = replace(options.get(owner, Options()).changed(values), unread=unread_settings(values))
        names = [each.name for each in (await services.listings()).models]
        if chosen.model and chosen.model not in names:
            raise HttpProblem(400, f"{MODEL_OPTION}: found {chosen.model!r}, expected one of {', '.join(names)}")
        options[owner] = chosen


def _add_running_calls(router: APIRouter, services: Services, upscaling: Upscaling) -> None:
    """Add the calls about the calls of the same user that wait or run."""

    @router.get("/progress", summary="Show the progress of the latest call")
    async def progress(request: Request, skip_current_image: bool = False) -> dict[str, Any]:
        active = [s for s in services.submissions.of(caller_of(request).owner, INTERFACE) if not s.over]
        found = _progress(active)
        if not skip_current_image:
            found["current_image"] = await _current_image(active)
        return found

    @router.post("/interrupt", summary="Cancel the calls that wait or run")
    @router.post("/skip", summary="As interrupt")
    async def interrupt(request: Request) -> dict[str, Any]:
        for submission in services.submissions.of(caller_of(request).owner, INTERFACE):
            if not submission.over:
                await submission.cancel()
        await upscaling.cancel(caller_of(request).owner)
        return {}


def _add_enlarging(router: APIRouter, services: Services, upscaling: Upscaling) -> None:
    """Add the calls that enlarge images of callers."""
    max_bytes = services.settings.upload_bound_bytes

    async def enlarge(request: Request, body: dict[str, Any], encoded: Sequence[Any]) -> list[str]:
        caller = caller_of(request)
        with services.holding(caller):
            return await enlarged(request, caller, body, encoded)

    async def enlarged(request: Request, caller: Caller, body: dict[str, Any], encoded: Sequence[Any]) -> list[str]:
        call = parse_extras(body)
        # too many are refused before they are decoded
        services.access.admit_jobs(0, len(encoded))
        images = await asyncio.to_thread(decoded, encoded, services.images_of_call(caller))
        plans = [enlarging(call, *image.size) for image in images]
        check_results(plans)
        services.pixels_of_call(caller).take(sum(plan.size[0] * plan.size[1] for plan in plans))
        wanted = [
            ImageToEnlarge(image, by)
            for image, plan in zip(images, plans, strict=True)
            for by in plan.upscalers
            if isinstance(by, Upscale)
        ]
        made = iter(await upscaling.enlarge(request, caller, wanted))

        def finish() -> list[str]:
            results = []
            for image, plan in zip(images, plans, strict=True):
                by_each = [
                    next(made) if isinstance(by, Upscale) else resized(image, plan.size, by) for by in plan.upscalers
                ]
                results.append(png_text(finished(call, plan, by_each or [image])))
            return results

        return await asyncio.to_thread(finish)

    @router.post("/extra-single-image", summary="Enlarge an image")
    async def extra_single_image(request: Request) -> Response:
        body = await json_object(request, max_bytes)
        (image,) = await enlarge(request, body, single_image(body))
        return await json_answer({"html_info": _notes(body), "image": image})

    @router.post("/extra-batch-images", summary="Enlarge several images")
    async def extra_batch_images(request: Request) -> Response:
        body = await json_object(request, max_bytes)
        images = await enlarge(request, body, several_images(body))
        return await json_answer({"html_info": _notes(body), "images": images})


def _add_lists(router: APIRouter, services: Services) -> None:
    """Add the lists of what the pool has."""

    @router.get("/upscalers", summary="List the upscalers, and ways to scale without one")
    async def upscalers() -> list[dict[str, Any]]:
        unknown = dict.fromkeys(("model_name", "model_path", "model_url", "scale"))
        names = (*PLAIN_NAMES, *(await services.listings()).files.upscalers)
        return [{"name": name, **unknown} for name in names]

    @router.get("/sd-models", summary="List the models")
    async def sd_models() -> list[dict[str, Any]]:
        return [
            {"title": each.name, "model_name": each.name, "hash": None, "sha256": None, "filename": each.name}
            | {"config": None}
            for each in (await services.listings()).models
        ]

    @router.get("/loras", summary="List the LoRAs")
    async def loras() -> list[dict[str, Any]]:
        found = (await services.listings()).loras
        return [{"name": each.name, "alias": each.name, "path": each.name, "metadata": {}} for each in found]

    @router.get("/samplers", summary="List the samplers")
    async def samplers() -> list[dict[str, Any]]:
        return [
            {"name": each.display, "aliases": [name, *each.aliases], "options": {}} for name, each in SAMPLERS.items()
        ]

    @router.get("/schedulers", summary="List the schedules")
    async def schedulers() -> list[dict[str, Any]]:
        return [{"name": name, "label": label, "aliases": None} for name, label in SCHEDULES.items()]

    @router.get("/memory", summary="Show the memory of all GPUs together")
    async def memory() -> dict[str, Any]:
        workers = (await asyncio.to_thread(services.pool.status)).workers
        total, used = sum(each.capacity_bytes for each in workers), sum(each.used_bytes for each in workers)
        return {"ram": {}, "cuda": {"system": {"free": total - used, "used": used, "total": total}}}

    @router.get("/latent-upscale-modes", summary="List the ways to scale latents")
    async def latent_modes() -> list[dict[str, str]]:
        return [{"name": name} for name in _LATENT_MODES]


def _add_what_others_have(router: APIRouter) -> None:
    """Add the calls that mean nothing here, with answers that clients expect."""

    @router.post("/refresh-checkpoints", summary="Accepted; the pool finds new files by itself")
    @router.post("/refresh-loras", summary="Accepted; the pool finds new files by itself")
    @router.post("/refresh-vae", summary="Accepted; the pool finds new files by itself")
    @router.post("/unload-checkpoint", summary="Accepted; the pool decides what is on its GPUs")
    @router.post("/reload-checkpoint", summary="Accepted; the pool decides what is on its GPUs")
    async def refresh() -> None:
        return None

    @router.get("/scripts", summary="List the extensions")
    async def scripts() -> dict[str, list[str]]:
        return {"txt2img": ["controlnet"], "img2img": ["controlnet"]}

    @router.get("/cmd-flags", summary="Empty: the pool has a configuration")
    async def cmd_flags() -> dict[str, Any]:
        return {}

    @router.get("/embeddings", summary="Empty: embeddings are found by their names in prompts")
    async def embeddings() -> dict[str, Any]:
        return {"loaded": {}, "skipped": {}}

    async def nothing() -> list[Any]:
        return []

    for name in _EMPTY_LISTS:
        router.get(f"/{name}", summary="Empty: the pool has none")(nothing)


def _notes(body: Mapping[str, Any]) -> str:
    """Return messages about fields that are not used, where the web UI shows notes about an image."""
    return html.escape("\n".join(unread_extras(body)), quote=False)


def _texts_in(images: CallerImages, value: Any) -> dict[str, str]:
    """Return the texts in an image of a caller. Raises UserError."""
    image = images.opened("image", value)
    try:
        image.load()  # texts may follow the pixels
        return texts_in(image)
    except Exception as error:  # decoders raise arbitrary exceptions for damaged files
        raise HttpProblem(400, f"image: it cannot be read ({error})") from None


def _successes(submission: HttpSubmission) -> list[JobEnd]:
    """Return the jobs that succeeded, in order. Raises HttpProblem for a job that failed; interrupted ones are left
    out.
    """
    ends = sorted(submission.ends, key=lambda end: end.index)
    for end in ends:
        if end.state == "failed":
            raise HttpProblem(400 if end.kind == "bad_input" else 500, f"{end.kind}: {end.message}")
    return [end for end in ends if end.path is not None]


def _info(call: ImageCall, model: str, ends: Sequence[JobEnd], unread: Sequence[str]) -> dict[str, Any]:
    """Return the facts about the images of a call; `unread` are messages about fields that are not used."""
    seeds = [end.seed for end in ends]
    return {
        "prompt": call.prompt,
        "all_prompts": [call.prompt] * len(ends),
        "negative_prompt": call.negative_prompt,
        "all_negative_prompts": [call.negative_prompt] * len(ends),
        "seed": seeds[0] if seeds else None,
        "all_seeds": seeds,
        "width": call.width,
        "height": call.height,
        "sampler_name": call.sampler_name or call.sampler_index,
        "cfg_scale": call.cfg_scale,
        "steps": call.steps,
        "batch_size": call.batch_size,
        "denoising_strength": call.denoising_strength,
        "sd_model_name": model,
        # clients have a negative prompt of their own for models of all kinds
        "warnings": [*unread, *warnings_of(ends, tells_unguided=False)],
    }


def _progress(active: Sequence[HttpSubmission]) -> dict[str, Any]:
    """Return the progress of all active calls together, without an image."""
    total = sum(each.total for each in active)
    running = [task for each in active for task in each.running if task.steps]
    done = sum(len(each.ends) for each in active) + sum(task.step / task.steps for task in running)
    share = min(done / total, 1.0) if total else 0.0
    began = min((each.began_at for each in active), default=0.0)
    left = (time.monotonic() - began) * (1 - share) / share if share else 0.0
    state = {
        "skipped": False,
        "interrupted": any(each.cancelled for each in active),
        "job": active[-1].id if active else "",
        "job_count": total,
        "job_no": sum(len(each.ends) for each in active),
        "sampling_step": running[0].step if running else 0,
        "sampling_steps": running[0].steps if running else 0,
    }
    return {"progress": share, "eta_relative": left, "state": state, "current_image": None, "textinfo": None}


async def _current_image(active: Sequence[HttpSubmission]) -> str | None:
    """Return the newest preview of the latest call that has one, as base64 of a PNG; None before there is one. Previews
    are made while a client asks."""
    for submission in active:
        submission.ask_for_previews()
    for submission in reversed(active):
        if submission.previews:
            newest = next(reversed(submission.previews.values()))
            return base64.b64encode(await asyncio.to_thread(newest.as_format, "PNG")).decode()
    return None
