"""`application`: the ASGI application of all HTTP interfaces over a pool. Opens no port and starts no pool."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.a1111.a1111_api import a1111_router
from modelpool.actors.http.a1111.a1111_controls import controlnet_router
from modelpool.actors.http.comfy.comfy_api import comfy_router
from modelpool.actors.http.comfy.comfy_prompts import ComfyPrompts
from modelpool.actors.http.native.health import health_router
from modelpool.actors.http.native.native_api import native_router, request_schemas
from modelpool.actors.http.openai.openai_api import openai_router
from modelpool.actors.http.page.live_view import LiveView
from modelpool.actors.http.page.page_api import page_router
from modelpool.actors.http.service.bodies import (
    MOST_PARSED,
    MOST_PARSED_IN_MEMORY,
    MOST_PARSED_IN_MEMORY_OF_OWNER,
    MOST_PARSED_OF_OWNER,
    shares_of_bodies,
)
from modelpool.actors.http.service.docs_page import DOCS_HEADERS, docs_page
from modelpool.actors.http.service.gate import Gate
from modelpool.actors.http.service.limit_log import LimitLog
from modelpool.actors.http.service.ports import HttpPool
from modelpool.actors.http.service.problems import (
    HttpProblem,
    no_route,
    not_stored,
    of_a_disk,
    problem_body,
    wrong_parameter,
)
from modelpool.actors.http.service.services import Services
from modelpool.actors.http.service.shown_messages import shown_message
from modelpool.actors.http.service.submission_inputs import SWEEP_SECONDS, sweep
from modelpool.actors.http.service.turns import Turns
from modelpool.actors.http.service.webhooks import Webhooks
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.actors.request.bounds import OverBound
from modelpool.pool.values.core.errors import OutputFailed, UserError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

logger = logging.getLogger(__name__)

TITLE = "modelpool"
#: calls to the pool at a time
POOL_THREADS = 32


def application(
    pool: HttpPool,
    settings: ServeSection,
    folder: Path,
    secret: bytes | None = None,
    has_siblings: bool = False,
    any_host: bool = False,
    limits: LimitLog | None = None,
) -> ASGIApp:
    """Return the application for `pool`, which the caller closes after it. Outputs are written to `folder`. Several
    applications may use one pool, each in its own event loop. Applications with the same `secret` serve each other's
    signed addresses of outputs; by default it is random. `has_siblings`: calls about a submission may reach another
    application than the one that accepted it, so the journal of the pool keeps the submissions, if it has one.
    `any_host`: without keys, permit calls under names that are not this machine's. `limits` counts what limits do.
    """
    from modelpool import __version__

    prompts = ComfyPrompts()
    limits = LimitLog() if limits is None else limits
    services = Services(pool, settings, folder, secret or secrets.token_bytes(32), has_siblings, limits)
    live = LiveView(services)
    background: set[asyncio.Task[None]] = set()

    def start(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        background.add(task)
        task.add_done_callback(background.discard)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # the loop's own has as many threads as a computation would use; these wait for answers of the pool
        asyncio.get_running_loop().set_default_executor(_PoolThreads(POOL_THREADS, "modelpool http"))
        start(_sweep(pool, folder))
        start(live.keep_sampling())
        yield
        for task in tuple(background):
            task.cancel()
        await live.close()
        await prompts.close()
        await services.submissions.close()

    app = FastAPI(title=TITLE, version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.parsing = Turns(MOST_PARSED, MOST_PARSED_OF_OWNER)
    app.state.making_parts = asyncio.Lock()
    app.state.parsing_in_memory = Turns(MOST_PARSED_IN_MEMORY, MOST_PARSED_IN_MEMORY_OF_OWNER)
    app.state.arriving = shares_of_bodies(settings.upload_bound_bytes)
    webhooks = Webhooks(settings.webhook_secret)
    app.include_router(page_router(services, live))
    app.include_router(health_router(pool))
    app.include_router(native_router(services, webhooks, start))
    app.include_router(openai_router(services))
    app.include_router(a1111_router(services))
    app.include_router(controlnet_router(services))
    app.include_router(comfy_router(services, prompts))
    _answer_problems(app, limits)
    _describe(app)
    return Gate(app, services.access, settings, any_host, limits)


class _PoolThreads(ThreadPoolExecutor):
    """Threads that the end of the event loop does not wait for: they wait for answers of the pool, which may take
    minutes, and end when the pool is closed after the loop."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no further calls, and drop the ones that wait."""
        super().shutdown(wait=False, cancel_futures=True)


async def _sweep(pool: HttpPool, folder: Path) -> None:
    """Remove images that no submission needs any more, at the start and every hour."""
    while True:
        try:
            if removed := await asyncio.to_thread(sweep, pool, folder):
                logger.info("removed the images of %d submissions that have succeeded", len(removed))
        except Exception:
            logger.exception(
                "the images of earlier submissions could not be looked through; the next try is in an hour"
            )
        await asyncio.sleep(SWEEP_SECONDS)


def _answer_problems(app: FastAPI, limits: LimitLog) -> None:
    """Turn errors of users and of the pool into answers; the gate answers all others."""

    @app.exception_handler(HttpProblem)
    async def refused(request: Request, problem: HttpProblem) -> JSONResponse:
        if problem.limit:
            limits.acted(problem.limit, f"refused a call with {problem.status}")
        body = problem_body(request.url.path, problem.status, shown_message(str(problem)))
        return JSONResponse(body, problem.status, problem.headers)

    @app.exception_handler(UserError)
    async def invalid(request: Request, problem: UserError) -> JSONResponse:
        if isinstance(problem, OverBound):
            limits.acted("request_fields", "refused a request whose field has too much")
        return JSONResponse(problem_body(request.url.path, 400, shown_message(str(problem))), 400)

    @app.exception_handler(OutputFailed)
    async def not_written(request: Request, problem: OutputFailed) -> JSONResponse:
        return await refused(request, not_stored(str(problem)))

    @app.exception_handler(OSError)
    async def broken(request: Request, problem: OSError) -> JSONResponse:
        if not of_a_disk(problem):
            raise problem
        logger.warning("a call of %s fails: %s", request.url.path, problem)
        return await refused(request, not_stored(f"the server cannot store this now ({problem.strerror})"))

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, problem: HTTPException) -> JSONResponse:
        path, status = request.url.path, problem.status_code
        message = no_route(request.method, path, status) if status in (404, 405) else str(problem.detail)
        return JSONResponse(problem_body(path, status, message), status, problem.headers)

    @app.exception_handler(RequestValidationError)
    async def wrong(request: Request, problem: RequestValidationError) -> JSONResponse:
        return JSONResponse(problem_body(request.url.path, 400, wrong_parameter(problem.errors()[0])), 400)

    @app.exception_handler(PoolLost)
    async def lost(request: Request, problem: PoolLost) -> JSONResponse:
        return JSONResponse(problem_body(request.url.path, 503, shown_message(str(problem))), 503)


def _describe(app: FastAPI) -> None:
    """Add the schemas of requests to the OpenAPI description, when it is first read, and the page that shows it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            known = schema.setdefault("components", {}).setdefault("schemas", {})
            known.update(request_schemas())
            app.openapi_schema = schema
        return app.openapi_schema

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(openapi()), headers=DOCS_HEADERS)

    app.openapi = openapi  # type: ignore[method-assign]
