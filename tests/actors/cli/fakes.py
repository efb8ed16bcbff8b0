"""A pool without Ray, GPUs or models: images are a function of their recipe, problems come as ordered.

Follows the same protocol as `actors.client.client.ModelPool` where the command line uses it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from modelpool.actors.client.start_checks import NameCheck
from modelpool.actors.control.status import PoolStatus, WorkerStatus
from modelpool.actors.graph.features.recipe import Recipe, RecipeLora
from modelpool.actors.graph.features.recorded_batches import NO_BATCHES, SubmittedBatches
from modelpool.actors.outputs.folder import FinishedOutput, OutputFolder
from modelpool.actors.outputs.results.outcomes import ImageResult, JobFailure, Summary, TaskSummary
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.outputs.results.progress import Progress, RunningJob
from modelpool.actors.request.labels import labels_of
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.registry.listings import FileNames, LoraListing, ModelListing
from modelpool.pool.engine.preview_maker import encoded_preview
from modelpool.pool.inference.sampling.sampler_names import resolve_sampler
from modelpool.pool.values.core.errors import UserError, unknown_name
from modelpool.pool.values.core.stage_params import ImagePixels
from modelpool.pool.values.specs.spec import JobId, RunErrorKind, Stage, WorkerId
from modelpool.scheduler.model.placement_record import PlacementOption, PlacementRule, Why

MODELS = ("shapes", "portraits")
LORAS = ("light", "outline")


def task(worker: str, resident: bool, stage: Stage = Stage.SAMPLE, lost: tuple[str, ...] = ()) -> TaskSummary:
    """One task with round figures, and runs that were lost before."""
    uploaded = 0 if resident else 4 << 20
    chosen = PlacementOption(WorkerId(worker), 0.0, 0.0 if resident else 0.5, 1.0)
    waited_for = PlacementOption(WorkerId("gpu-9"), 2.1, 0.0, 1.0)
    switches = int(not resident)
    why = Why(PlacementRule.CHEAPEST, chosen, (waited_for,), 1, 1, upload_bytes=uploaded, switches=switches)
    return TaskSummary(stage, WorkerId(worker), 1.5, 0.5, resident, uploaded, 0, switches, False, why=why, lost=lost)


def recipe_for(request: GenerateRequest) -> Recipe:
    """What the fake pool makes of a request. Raises UserError as a real one does."""
    if request.model not in MODELS:
        raise unknown_name("model", request.model, MODELS)
    for lora in request.loras:
        if lora.name not in LORAS:
            raise unknown_name("LoRA", lora.name, LORAS)
    sampler, schedule = resolve_sampler(request.sampler)
    assert request.seed is not None
    return Recipe(
        model=request.model,
        model_sha256=hashlib.sha256(request.model.encode()).hexdigest(),
        prompt=request.prompt,
        negative=request.negative,
        loras=tuple(RecipeLora(x.name, hashlib.sha256(x.name.encode()).hexdigest(), x.strength) for x in request.loras),
        steps=request.steps,
        cfg=request.cfg,
        sampler=sampler,
        schedule=request.schedule or schedule,
        width=request.width or 64,
        height=request.height or 64,
        seed=request.seed,
        versions={"modelpool": "0.1.0"},
    )


def pixels_for(recipe: Recipe) -> np.ndarray:
    """The image of a recipe."""
    rng = np.random.default_rng(int(recipe.digest, 16))
    return rng.integers(0, 256, size=(recipe.height, recipe.width, 3), dtype=np.uint8)


class FakeJobs:
    """Takes the requests when its results are read, and ends one job after another, the last one first, as a pool of
    several workers might.
    """

    def __init__(
        self,
        take: Callable[[], Iterator[tuple[int, GenerateRequest]]],
        output: Path,
        fails: Callable[[GenerateRequest], RunErrorKind | None],
        before_each: Callable[[int], None],
        sampled: Callable[[int], TaskSummary],
    ) -> None:
        self._take = take
        self._requests: dict[int, GenerateRequest] = {}
        self._output = output
        self._fails = fails
        self._before_each = before_each
        self._sampled = sampled
        self._cancelled = threading.Event()
        self._ended: list[ImageResult | JobFailure] = []

    def results(self) -> Iterator[ImageResult | JobFailure]:
        """All, in another order than they were submitted."""
        self._requests.update(self._take())
        for index in sorted(self._requests, reverse=True):
            self._before_each(index)
            end = self._end(index)
            self._ended.append(end)
            yield end

    def cancel(self) -> None:
        """What has not ended ends as cancelled."""
        self._cancelled.set()

    def wait_cancelled(self, timeout: float) -> bool:
        """Whether someone cancelled in time."""
        return self._cancelled.wait(timeout)

    def progress(self) -> Progress:
        """One job runs."""
        failures = [e for e in self._ended if isinstance(e, JobFailure)]
        cancelled = sum(f.cancelled for f in failures)
        left = len(self._requests) - len(self._ended)
        index = sorted(self._requests)[left - 1] if left else 0
        running = (
            (RunningJob(JobId("j"), index, self._requests[index].prompt, WorkerId("gpu-0"), Stage.SAMPLE, 3, 20),)
            if left
            else ()
        )
        done = len(self._ended) - len(failures)
        return Progress(len(self._requests), done, len(failures) - cancelled, cancelled, running)

    def summary(self) -> Summary:
        """With the tasks of the images that were made."""
        images = [e for e in self._ended if isinstance(e, ImageResult)]
        cancelled = sum(isinstance(e, JobFailure) and e.cancelled for e in self._ended)
        failed = len(self._ended) - len(images) - cancelled
        tasks = tuple(t for image in images for t in image.tasks)
        return Summary(len(self._requests), len(images), failed, cancelled, 12.5, tasks)

    def _end(self, index: int) -> ImageResult | JobFailure:
        request, job_id = self._requests[index], JobId(f"job-{index}")
        kind = RunErrorKind.CANCELLED if self._cancelled.is_set() else self._fails(request)
        if kind is not None:
            trace = "Traceback: planted\n" if kind is RunErrorKind.INTERNAL else ""
            return JobFailure(index, job_id, request, kind, "planted trouble", trace)
        recipe = recipe_for(request)
        tasks = (task("gpu-0", True, Stage.ENCODE), self._sampled(index))
        pixels = pixels_for(recipe)
        finished = FinishedOutput(
            recipe, ImagePixels(pixels), index, job_id, tasks[1].worker, 3.0, tasks, labels_of(request)
        )
        path = OutputFolder(self._output).write(finished).path
        return ImageResult(
            index=index,
            job_id=job_id,
            request=request,
            recipe=recipe,
            content=lambda: pixels,
            path=path,
            worker=tasks[1].worker,
            seconds=3.0,
            tasks=tasks,
        )


@dataclasses.dataclass
class FakePool:
    """`fails` says how a request ends; `before_each` is called before each job ends; `sampled` is the sample task of a
    job; `submitted` are the requests that came, and `templates` the names that they are to have.
    """

    fails: Callable[[GenerateRequest], RunErrorKind | None] = lambda request: None
    before_each: Callable[[int], None] = lambda index: None
    sampled: Callable[[int], TaskSummary] = lambda index: task(f"gpu-{index % 2}", index % 3 != 0)
    submitted: list[GenerateRequest] = dataclasses.field(default_factory=list)
    templates: list[str | None] = dataclasses.field(default_factory=list)
    jobs: list[FakeJobs] = dataclasses.field(default_factory=list)
    closed: bool = False
    model_names: tuple[str, ...] = MODELS[:1]

    def __enter__(self) -> FakePool:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def why_ended(self) -> str:
        return ""

    def recipes(self, requests: Iterable[GenerateRequest]) -> tuple[Recipe | UserError, ...]:
        """Each, or its problem."""
        return tuple(self._recipe(request) for request in requests)

    def submit_stream(
        self,
        chunks: Iterable[Sequence[GenerateRequest]],
        decide: Callable[[int, Recipe | UserError], bool],
        *,
        output: str | Path | Literal[False] | None = None,
        name: str | None = None,
        hold: bool = False,
        on_preview: Callable[[ImagePreview], None] | None = None,
        batches: SubmittedBatches = NO_BATCHES,
    ) -> FakeJobs:
        """Takes the requests in the thread that reads the results. Sends one preview, if any are wanted."""
        if on_preview is not None:
            content = encoded_preview(np.full((8, 8, 3), 200, np.uint8))
            assert content is not None
            on_preview(ImagePreview(1, 2, content, 0, JobId("s-0")))
        assert isinstance(output, Path)
        self.templates.append(name)

        def take() -> Iterator[tuple[int, GenerateRequest]]:
            place = 0
            for chunk in chunks:
                for request, answer in zip(chunk, self.recipes(chunk), strict=True):
                    if decide(place, answer):
                        self.submitted.append(request)
                        yield place, request
                    place += 1

        self.jobs.append(FakeJobs(take, output, self.fails, self.before_each, self.sampled))
        return self.jobs[-1]

    def models(self) -> tuple[ModelListing, ...]:
        """One good model by default."""
        return tuple(
            ModelListing(name, f"/models/{name}.safetensors", "SD 1", 5 << 20, 64, 64) for name in self.model_names
        )

    def file_names(self) -> FileNames:
        """None besides models and LoRAs."""
        return FileNames()

    def loras(self) -> tuple[LoraListing, ...]:
        """One good, one broken."""
        return (
            LoraListing("light", "/loras/light.safetensors", 40 << 10, 24, (4,), trigger_words=("light lines",)),
            LoraListing("torn", "/loras/torn.safetensors", 10, problem="torn.safetensors: too short"),
        )

    def status(self) -> PoolStatus:
        """Two workers, one of them in trouble."""
        workers = (
            WorkerStatus(
                WorkerId("gpu-0"), "busy", "sim:0", 1, 64 << 20, 12 << 20, ("shapes/vae@3f2a91c04b",), "sample"
            ),
            WorkerStatus(WorkerId("gpu-1"), "starting", "", 2, 0, 0, (), None, "killed by signal 9"),
        )
        waiting = {"sample": 3, "decode": 0}
        jobs = {"live": 4, "succeeded": 10, "failed": 1, "cancelled": 0}
        return PoolStatus(workers, waiting, jobs, 30 << 20, 0, 5, 27, 30, 1)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Always."""

    def _recipe(self, request: GenerateRequest) -> Recipe | UserError:
        try:
            return recipe_for(request)
        except UserError as error:
            return error


class KnownNames(NameCheck):
    """Knows these models and LoRAs."""

    def __init__(self, *models: str, loras: tuple[str, ...] = ()) -> None:
        super().__init__(None)
        self._known, self._loras = models, loras

    def check(self, request: GenerateRequest) -> None:
        """Raise UnknownName for another model."""
        if request.model not in self._known:
            raise unknown_name("model", request.model, self._known)

    def model_names(self) -> tuple[str, ...]:
        """Return them."""
        return self._known

    def lora_names(self) -> tuple[str, ...]:
        """Return them."""
        return self._loras
