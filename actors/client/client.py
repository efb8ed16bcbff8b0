"""`ModelPool`: starts or joins a pool, submits requests and reports its state.

Ray is imported when a pool is started or joined, not with this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, Unpack, cast

from modelpool.actors.client.followed_jobs import FollowedJobs
from modelpool.actors.client.jobs import JobHandle, Jobs, image_of
from modelpool.actors.client.output_writer import HOLD_SECONDS, DriverOutputs, ImageWriter
from modelpool.actors.client.pool_operator import PoolOperator
from modelpool.actors.client.request_stream import Decide, RequestStream
from modelpool.actors.client.sample_options import SAMPLE_DEFAULTS, SampleOptions
from modelpool.actors.client.stage_result import StageResult
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.config.output_address import OutputAddress, OutputDefaults, output_address
from modelpool.actors.control.catalog_questions import FILE_NAMES, LORAS, MODELS
from modelpool.actors.control.connection import CONTROLLER, Connection
from modelpool.actors.control.event_reader import EventReader, Listener
from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.control.output_commit import NodeWriters
from modelpool.actors.control.status_values import PinnedModel, PoolStatus, WorkerStatus
from modelpool.actors.graph.common.stage_request import InputLatent, StageLike, StageRequest, UpscaleRequest
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import CHOSEN_BATCHES, NO_BATCHES, SubmittedBatches
from modelpool.actors.outputs.layout import OutputLayout
from modelpool.actors.outputs.open_outputs import check_store
from modelpool.actors.outputs.output_check import check_outputs
from modelpool.actors.outputs.results.outcomes import ImageResult, PoolLost
from modelpool.actors.outputs.results.previews import ImagePreview
from modelpool.actors.request.image_fields import checked_image
from modelpool.actors.request.name_template import NameTemplate
from modelpool.actors.request.qos import DEADLINE_PREFIX, user_of_this_process
from modelpool.actors.request.requests import GenerateRequest, LoraChoice, RequestLike, request_of
from modelpool.actors.request.workflow_inputs import is_own_workflow, with_inputs
from modelpool.actors.worker.process_memory import ProcessMemory
from modelpool.actors.worker.step_checkpoints.latest_queue import LatestQueue
from modelpool.actors.worker.wire.messages import ClientId, ResultRef, StageSubmission, Submission, SubmissionId
from modelpool.pool.values.core.argument_checks import whole_number
from modelpool.pool.values.core.errors import UnknownName, UserError, unusable_field
from modelpool.pool.values.core.previews import INTERVAL_SECONDS, PreviewWish
from modelpool.pool.values.core.stage_params import Latent
from modelpool.pool.values.specs.spec import Stage, TaskId, WorkerId

if TYPE_CHECKING:
    from types import TracebackType

    from modelpool.actors.client.detached_jobs import DetachedJobs
    from modelpool.actors.client.opening import OpenedPool
    from modelpool.actors.control.detached.job_service import JobsConnection
    from modelpool.actors.control.detached.records import SubmissionRecord
    from modelpool.actors.control.metrics.families import MetricFamily
    from modelpool.actors.ray.forks import Forks
    from modelpool.pool.catalog.registry.listings import FileNames, LoraListing, ModelListing
    from modelpool.scheduler.core.history import JobHistory
    from modelpool.scheduler.core.waiting_jobs import SubmissionWaits

LoraLike: TypeAlias = LoraChoice | str | tuple[str, float] | tuple[str, float, str]

#: requests that travel together
CHUNK = 256
#: longest wait of one readiness call
_READY_SECONDS = 5.0


class DeadlineTooSoon(UserWarning):
    """Some images cannot finish by their deadline. The message states how many, and the time they need."""


class PartialLora(UserWarning):
    """Some of a LoRA's keys are not used. The message states how many, which, and why."""


class WorkersFailed(RuntimeError):
    """Workers failed to start. The message states which and why."""


class ModelPool:
    """An open pool. Use it as a context manager, or call `close`. Thread-safe."""

    def __init__(
        self,
        connection: Connection,
        close: Callable[[], None],
        output: OutputAddress | None,
        address: str = "",
        jobs: Callable[[], JobsConnection] | None = None,
        hold_seconds: float = HOLD_SECONDS,
        file_name: str | None = None,
        node_writers: NodeWriters | None = None,
        ended: Callable[[], str] = str,
    ) -> None:
        """Called by `start` and `connect`. `close` releases what was started for this driver. `jobs` connects to the
        pool's job service; it raises UserError if the pool has none. Attached jobs wait up to `hold_seconds` for an
        output folder that cannot be written. `file_name` is the usual template of the names of outputs; requests that
        lack a field of it have other names. `node_writers` write outputs on the nodes that made them; without them,
        this process writes all. `ended` as in `OpenedPool`.
        """
        self._connection = connection
        #: returns why a pool that was joined has ended, once this program has left it; "" while it runs. Calls raise
        #: PoolLost then, and `connect` joins the next pool. Other pools end with their program
        self.why_ended = ended
        self._jobs = jobs
        self._close = close
        self._outputs = DriverOutputs(connection, output, file_name, hold_seconds, node_writers)
        self._closed = False
        #: user of jobs that set none
        self._user = user_of_this_process()
        self._client_id = ClientId(uuid.uuid4().hex)
        #: calls `on_preview`
        self._previews = LatestQueue("modelpool previews")
        #: submissions with requests that are still being taken
        self._streams: list[RequestStream] = []
        self._reader = EventReader(connection, self._client_id)
        #: where another driver on this machine, or of the cluster, can connect
        self.address = address
        connection.call(CONTROLLER.enter, self._client_id)
        self._reader.start(wake=partial(_leave, connection, self._client_id))

    @classmethod
    def start(
        cls, config: str | Path | PoolConfig | None = None, *, address: str | None = None, **overrides: Any
    ) -> ModelPool:
        """Start a pool: Ray (unless an address is configured), a controller, and one worker per GPU. It ends with
        `close`.

        Returns when the controller answers; workers start in the background, and jobs wait for them. `config` is a
        TOML file or a PoolConfig (by default `PoolConfig.find`); `address` and `overrides` change its settings:
        workers, device, vram, threads, models, loras, namespace, name, output.

        Raises UserError if any of them is wrong.
        """
        settings = PoolConfig.find(config).override(address=address, **overrides)
        if settings.output.folder is not None:
            check_outputs(settings.output.folder)
        return cls.start_configured(settings)

    @classmethod
    def start_configured(cls, settings: PoolConfig, forks: Forks | None = None) -> ModelPool:
        """Start a pool with exactly these settings; see `start`. `forks` is where its processes come from, and ends
        with it, also if it does not start. Raises UserError.
        """
        from modelpool.actors.client.opening import start_pool
        from modelpool.actors.client.start_checks import check_device, check_folders, check_named_models

        with contextlib.ExitStack() as failed:
            if forks is not None:
                failed.callback(forks.close)
            check_folders(settings)
            check_device(settings)
            check_named_models(settings)
            if settings.output.folder is not None:
                check_store(settings.output.folder)
            opened = start_pool(settings, forks=forks)
            failed.pop_all()
        return cls._open(opened, settings.output.defaults)

    @classmethod
    def connect(cls, name_or_address: str | None = None, *, output: str | Path | None = None) -> ModelPool:
        """Join a running pool: by its name or by its Ray address (host:port); by default the one that `modelpool up`
        started last.

        Outputs are written to `output`, by default to the folder or URL of the pool's configuration, if it has one: a
        folder is the one with that path on this machine. Closing leaves that pool running. Raises UserError if there is
        none.
        """
        from modelpool.actors.client.opening import join_pool

        if name_or_address is not None and not isinstance(name_or_address, str):
            raise unusable_field("name_or_address", name_or_address, "the name of a pool, or host:port, as text")
        address = output_address(output) if output else None
        opened = join_pool(name_or_address)
        defaults = _defaults_of(opened)
        return cls._open(opened, defaults if address is None else replace(defaults, folder=address))

    @classmethod
    def connect_here(
        cls, name: str | None = None, *, namespace: str | None = None, output: str | Path | None = None
    ) -> ModelPool:
        """Join a pool of the Ray cluster in which this code runs: from a Ray task, an actor or a job, on any node.
        `name` and `namespace` are those in `[cluster]` of the pool's configuration. Outputs are written only where
        `output` or `submit` names a place, since each node has its own folders. Otherwise as `connect`.
        """
        from modelpool.actors.client.opening import join_connected

        address = output_address(output) if output else None
        opened = join_connected(namespace, name)
        return cls._open(opened, OutputDefaults(address, by_nodes=_defaults_of(opened).by_nodes))

    def generate(
        self, prompt: str, *, model: str, output: str | Path | Literal[False] | None = None, **fields: Any
    ) -> ImageResult:
        """Generate one image and return it: `pool.generate("a red circle", model="shapes").pil`. `fields` are further
        fields of a request, such as steps=30 and loras=[("light", 0.8)]; `output` is as in `submit`, which is for
        several images, videos and audio.

        Waits for the image, and cancels it if the wait is interrupted. Raises UserError before anything is queued, also
        for a model that generates no images, JobFailed and PoolLost.
        """
        job = _only_job(self, prompt, model, output, fields)
        try:
            return image_of(job.result())
        except BaseException:
            job.cancel()
            raise

    async def generate_async(
        self, prompt: str, *, model: str, output: str | Path | Literal[False] | None = None, **fields: Any
    ) -> ImageResult:
        """Generate one image as `generate`, without blocking the event loop."""
        job = await asyncio.to_thread(_only_job, self, prompt, model, output, fields)
        try:
            return image_of(await job)
        except BaseException:
            job.cancel()
            raise

    def run(
        self,
        workflow: Mapping[str, Any],
        inputs: Mapping[str, Any] | None = None,
        *,
        seed: int | None = None,
        output: str | Path | Literal[False] | None = None,
        **fields: Any,
    ) -> Jobs:
        """Queue a workflow of the pool, {"nodes": {ID: NODE}, "output": ID}, with other `inputs` of its nodes, such as
        {"sampler.steps": 8}; `pool.run(workflow).images()` waits for its output. `seed` is that of nodes without one,
        `fields` are further fields of a request beside `workflow`, which may be in it beside its nodes, too; `output`
        is as in `submit`. `modelpool run` and the
        HTTP interface take workflows of ComfyUI. Raises UserError.
        """
        if not is_own_workflow(workflow):
            expected = '{"nodes": {ID: NODE}, "output": ID}; `modelpool run` takes workflows of ComfyUI'
            raise unusable_field("workflow", type(workflow).__name__, expected)
        graph = with_inputs(workflow, inputs or {})
        beside = {name: value for name, value in graph.items() if name not in ("nodes", "output")}
        changed = {"nodes": graph["nodes"], "output": graph["output"]}
        seeded = {} if seed is None else {"seed": seed}
        return self.submit(GenerateRequest(workflow=changed, **{**beside, **fields, **seeded}), output=output)

    def submit(
        self,
        requests: RequestLike | Iterable[RequestLike],
        *,
        output: str | Path | Literal[False] | None = None,
        name: str | None = None,
        priority: int | None = None,
        user: str | None = None,
        deadline: float | str | None = None,
        on_preview: Callable[[ImagePreview], None] | None = None,
        preview_seconds: float | None = None,
    ) -> Jobs:
        """Queue requests, or dicts of their fields. Missing seeds are drawn now. Outputs are written to `output` as
        they arrive, a folder or a URL such as s3://bucket/folder: by default the one of the pool's configuration; False
        writes nothing. `name` is the name of their files without its end, such as "{id}-{seed}" (`NAME_FIELDS` of
        `modelpool.actors.request.name_template` are its fields); an output with a taken name gets a longer one.

        A list or tuple is checked completely before anything is queued. From another iterable, chunks of some hundred
        are queued while the next is drawn; if one is refused, everything queued is cancelled. Either way, a call that
        raises has submitted nothing. If a model matches only some keys of a LoRA, a `PartialLora` warning is issued.

        `priority`, `user` and `deadline` ("10m", or seconds, from now) apply to requests that do not set them; a
        deadline that cannot be met causes a `DeadlineTooSoon` warning.

        With `on_preview`, previews are made while images are sampled, at most one of each image in `preview_seconds`
        (default: 0.5; 0 is one for each step). It is called in a thread of the pool; while it takes long, only the
        newest preview of each image waits. The last ones are also in `ImageResult.previews`.

        Raises UserError naming the problem, or whatever `requests` raises.
        """
        requests = _several(requests)
        self._reader.check()  # of a pool that has ended, nothing else is worth saying
        terms = _Qos(priority, user, deadline)
        template = self._outputs.template(name)
        user_name = self._user if terms.user is None else terms.user
        wish = None if on_preview is None and preview_seconds is None else _preview_wish(preview_seconds)
        drawn = (one for given in requests for one in terms.fill_in(request_of(given)).expanded())
        # complete: nothing is queued before all of it is checked
        wanted = list(drawn) if isinstance(requests, Sequence) else drawn
        count = len(wanted) if isinstance(wanted, Sequence) else 0
        writer = self._outputs.writer(output)
        batches = _batches_of(wanted, writer) if isinstance(wanted, Sequence) else NO_BATCHES
        jobs = self._new_jobs(user_name, writer, template, on_preview, wish, batches)
        images = InputImages(self._connection.give)
        ended_at = 0
        try:
            for chunk in _chunks(wanted):
                _check_names(None if name is None else template, chunk, ended_at)
                jobs.writing.wait_while_held()
                jobs.add(chunk)
                sent, given = images.bring_all(chunk)
                first_index, ended_at = ended_at, ended_at + len(chunk)
                hold = ended_at < count
                who = self._client_id, jobs.id, first_index
                part = Submission(*who, sent, hold, user_name, given, wish, batches)
                recipes = self._connection.call(CONTROLLER.submit, part)
                _warn(text for recipe in recipes for text in recipe.warnings)
        except BaseException:
            jobs.abandon()
            raise
        jobs.seal()
        return Jobs(jobs)

    def submit_stream(
        self,
        chunks: Iterable[Sequence[GenerateRequest]],
        decide: Decide,
        *,
        output: str | Path | Literal[False] | None = None,
        name: str | None = None,
        hold: bool = False,
        on_preview: Callable[[ImagePreview], None] | None = None,
        batches: SubmittedBatches = NO_BATCHES,
    ) -> Jobs:
        """Queue requests while they are read: `chunks` are taken, checked and queued in a thread, while earlier ones
        run. Missing seeds are drawn. `decide` is called with the index and the recipe, or the error, of each request,
        in order and in that thread; those that it refuses are not queued, and have no result. It must refuse those with
        an error, or raise. `hold`: nothing is queued before all are checked.

        Returns at once. If `chunks` or `decide` raises, everything is cancelled, and `Jobs.results` raises the same.
        `output` is opened when the first request is accepted; `name` and `on_preview` are as in `submit`. `batches` is
        what decides about the batch size "auto" besides the pool.
        """
        template = self._outputs.template(name)
        wish = None if on_preview is None else PreviewWish()
        jobs = self._new_jobs(self._user, None, template, on_preview, wish, batches)
        stream = RequestStream(
            self._connection,
            jobs,
            self._client_id,
            decide,
            partial(self._outputs.writer, output),
            _warn,
            self._user,
            hold,
            batches,
        )
        self._streams = [known for known in self._streams if known.is_open] + [stream]
        seeded = (tuple(map(_with_seed, chunk)) for chunk in chunks)
        stream.start(_with_names(None if name is None else template, seeded))
        return Jobs(jobs)

    def submit_detached(
        self,
        requests: RequestLike | Iterable[RequestLike],
        *,
        output: str | Path,
        jobs_id: str | None = None,
        name: str | None = None,
        layout: OutputLayout | None = None,
        priority: int | None = None,
        user: str | None = None,
        deadline: float | str | None = None,
    ) -> DetachedJobs:
        """Hand requests over to the pool: they run, and their outputs are written, after this program has ended.

        When this returns, they are on the disk of the pool's head node, and survive the loss of every process. An
        iterator is read as they are handed over. Missing seeds are drawn now. `output` is a folder of that node, or a
        URL such as s3://bucket/folder, which it writes with its own credentials. Submitting again under the same
        `jobs_id` returns the same jobs. `name` is the template of the names of files, as for `submit`. `layout` packs
        the outputs in shards (`modelpool.actors.outputs.layout`): the last shard exists before the submission has
        ended.

        Needs a pool that outlives its drivers (`modelpool up`). Raises UserError, also for images in memory.
        """
        from modelpool.actors.client.detached_jobs import MOST_TRIES, submit_detached

        terms, several = _Qos(priority, user, deadline), _several(requests)
        template = self._outputs.template(name)

        def seeded() -> Iterator[GenerateRequest]:
            wanted = (one for given in several for one in terms.fill_in(request_of(given)).expanded())
            for place, request in enumerate(map(_with_seed, wanted)):
                _check_names(None if name is None else template, (request,), place)
                yield request

        return submit_detached(
            self._job_service(),
            seeded,
            output_address(output),
            self._user if terms.user is None else terms.user,
            jobs_id,
            self.recipes,
            "" if template is None else template.text,
            layout,
            # what an iterator has yielded is gone
            1 if isinstance(several, Iterator) else MOST_TRIES,
        )

    def attach(self, jobs_id: str) -> DetachedJobs:
        """Return the detached jobs with this id, or with this unique start of an id. Raises UnknownName."""
        from modelpool.actors.client.detached_jobs import DetachedJobs
        from modelpool.actors.control.detached.job_service import JobService

        service = self._job_service()
        return DetachedJobs(service, service.call(JobService.progress, jobs_id).record.submission_id)

    def detached(self) -> tuple[SubmissionRecord, ...]:
        """Return all detached submissions, oldest first."""
        from modelpool.actors.control.detached.job_service import JobService

        return self._job_service().call(JobService.submissions)

    def recipes(self, requests: RequestLike | Iterable[RequestLike]) -> tuple[Recipe | UserError, ...]:
        """Return the recipe of each request, of its first output, or its error. Queues nothing."""
        found: list[Recipe | UserError] = []
        images = InputImages(lambda image: None)
        given = iter(_several(requests))
        while chunk := [_request_or_error(one) for one in islice(given, CHUNK)]:
            usable_ones = iter(images.bring_each([one for one in chunk if isinstance(one, GenerateRequest)]))
            sent = [one if isinstance(one, UserError) else next(usable_ones) for one in chunk]
            usable = tuple(one for one in sent if not isinstance(one, UserError))
            answers = iter(self._connection.call(CONTROLLER.recipes, usable))
            found += [one if isinstance(one, UserError) else next(answers) for one in sent]
        return tuple(found)

    def recipe(self, request: RequestLike) -> Recipe:
        """Return the recipe of `request`, of its first output. Queues nothing. Raises UserError."""
        found = self.recipes((request_of(request, "request"),))[0]
        if isinstance(found, UserError):
            raise found
        return found

    def encode(self, prompt: str, *, model: str, loras: Iterable[LoraLike] = ()) -> StageResult:
        """Encode a text with the text encoders of `model`; the result is an `Encoded`. Raises UserError."""
        checked = GenerateRequest(model=model, prompt=prompt, loras=_choices(loras))
        return self._stage(StageRequest(Stage.ENCODE, checked))

    def sample(
        self,
        positive: StageResult,
        negative: StageResult | None = None,
        *,
        model: str,
        loras: Iterable[LoraLike] = (),
        **options: Unpack[SampleOptions],
    ) -> StageResult:
        """Sample a denoised `Latent`, of an image, a video or an audio clip as `model` generates. Without
        `negative`, guidance uses the empty text. The options are `steps`, `cfg`, `sampler`, `schedule`, `width`,
        `height`, `seed`, `frames`, `frame_rate` and `seconds`, as in a request. Raises UserError.
        """
        if unknown := options.keys() - SAMPLE_DEFAULTS.keys():
            raise TypeError(f"sample() has no options {', '.join(sorted(unknown))}")
        fields = {**SAMPLE_DEFAULTS, **options}
        checked = _with_seed(GenerateRequest(model=model, prompt="", loras=_choices(loras), **fields))
        expected = "a result of encode()"
        texts = _stage_of(positive, Stage.ENCODE, "positive", expected).request
        avoided = checked if negative is None else _stage_of(negative, Stage.ENCODE, "negative", expected).request
        stage = StageRequest(Stage.SAMPLE, checked, positive=texts, negative=avoided)
        return self._stage(stage, {**positive.held, **(negative.held if negative is not None else {})})

    def decode(
        self,
        latent: StageResult | Latent,
        *,
        model: str,
        vae_tile: int | None = None,
        vae_frames: int | None = None,
    ) -> StageResult:
        """Decode a latent, from `sample` or from the driver, to `ImagePixels`, `VideoFrames` or `AudioSamples`;
        `vae_tile` and `vae_frames` are as in a request. Raises UserError.
        """
        checked = GenerateRequest(model=model, prompt="", vae_tile=vae_tile, vae_frames=vae_frames)
        if isinstance(latent, Latent):
            shape_CHW = latent.samples_CHW.shape
            digest = hashlib.sha256(b"".join(array.tobytes() for array in latent.arrays)).hexdigest()[:20]
            task_id = TaskId(f"given-{'x'.join(map(str, shape_CHW))}-{digest}")
            stage = StageRequest(Stage.DECODE, checked, latent=InputLatent(task_id, tuple(shape_CHW[1:])))
            return self._stage(stage, {task_id: self._connection.give(latent)})
        sampled = _stage_of(latent, Stage.SAMPLE, "latent", "a result of sample(), or a Latent")
        tiled = sampled.request.model_copy(update={"vae_tile": vae_tile, "vae_frames": vae_frames})
        stage = replace(sampled, stage=Stage.DECODE, vae_model=checked.model, request=tiled)
        return self._stage(stage, latent.held)

    def upscale(self, image: Any, upscale: Any, *, user: str | None = None, priority: int | None = None) -> StageResult:
        """Enlarge an image (a path, a Pillow image or a numpy array) to `ImagePixels`. `upscale` is as in a request,
        such as "4x-ultra", "4x-ultra:2" (and its scale) or a dict of its fields. Raises UserError.
        """
        terms = _Qos(priority, user, None)
        wanted = GenerateRequest(model="any", prompt="", upscale=upscale).upscale
        source = checked_image("image", image)
        if wanted is None:
            raise unusable_field("upscale", upscale, "the name of an upscaler")
        if source is None:
            raise unusable_field("image", image, "a path, a Pillow image or a numpy array")
        stored, given = InputImages(self._connection.give).bring_image("image", source)
        return self._stage(UpscaleRequest(stored, wanted), given, terms)

    def models(self) -> tuple[ModelListing, ...]:
        """Return the checkpoints in the pool's folders."""
        return self._connection.call(CONTROLLER.ask_catalog, MODELS)

    def loras(self) -> tuple[LoraListing, ...]:
        """Return the LoRAs in the pool's folders."""
        return self._connection.call(CONTROLLER.ask_catalog, LORAS)

    def file_names(self) -> FileNames:
        """Return the names of the ControlNets, upscalers, image prompt adapters and embeddings in the pool's
        folders."""
        return self._connection.call(CONTROLLER.ask_catalog, FILE_NAMES)

    def pin(self, *models: str, replicas: int = 1) -> tuple[PinnedModel, ...]:
        """Keep all weights of these models on `replicas` GPUs each, until `unpin` or the end of the pool: idle workers
        load them, they are evicted last, and nodes that hold them are not given up. The journal of a pool of
        `modelpool up` has them for a controller that replaces this one. Without models, nothing changes.
        Returns all pinned models with their state; loads have begun and may take a while. LoRAs are not part of it.

        Raises UserError: UnknownName, CorruptFile, UnusableField for `replicas`.
        """
        return self.operator.pin(models, whole_number("replicas", replicas, "a whole number, 1 or more", 1))

    def unpin(self, *models: str) -> tuple[PinnedModel, ...]:
        """Let these models be evicted as any others. Returns the models that are still pinned. Raises UnknownName for
        one that is not pinned."""
        return self.operator.pin(models, 0)

    @property
    def operator(self) -> PoolOperator:
        """What operators ask of a pool: cordon, drain and restart parts of it, and what it would request now."""
        return PoolOperator(self._connection, self._job_service)

    def status(self) -> PoolStatus:
        """Return the current state of the pool."""
        return self._connection.call(CONTROLLER.status)

    def metrics(self) -> tuple[MetricFamily, ...]:
        """Return the metrics of the pool; `metrics_text` of `modelpool.actors.control.metrics.exposition` writes them
        in Prometheus' format."""
        return self._connection.call(CONTROLLER.metrics)

    def history(self, job: str) -> JobHistory:
        """Return the history of a job, by its id or a unique part of it: each start of its tasks with the reason,
        the expected and the measured time. Of jobs that ended before the controller was replaced, the journal has the
        latest. Raises UnknownName.
        """
        try:
            return self._connection.call(CONTROLLER.history, job)
        except UnknownName:
            from modelpool.actors.control.detached.job_service import JobService

            try:
                service = self._job_service()
            except UserError:  # the pool ends with its driver, or has no journal
                service = None
            kept = None if service is None else service.call(JobService.history, job)
            if kept is None:
                raise
            return kept

    def waits(self, submission: str) -> SubmissionWaits | None:
        """Return why the jobs of a submission in the pool have not ended, in groups with a common reason, by its id or
        the beginning of it; None if the pool has no such job."""
        return self._connection.call(CONTROLLER.waits, submission)

    def memory(self) -> dict[WorkerId, ProcessMemory]:
        """Return the host memory of each worker's process."""
        return self._connection.call(CONTROLLER.memory_reports)

    def wait_ready(self, timeout: float | None = None) -> None:
        """Wait until every worker has started. Raises WorkersFailed if one was given up, and TimeoutError."""
        left = float("inf") if timeout is None else timeout
        while True:
            status = self._connection.call(CONTROLLER.wait_ready, min(left, _READY_SECONDS))
            failed = [worker for worker in status.workers if worker.state == "given_up"]
            if failed:
                raise WorkersFailed("; ".join(f"{worker.id}: {worker.trouble}" for worker in failed))
            starting = [worker for worker in status.workers if worker.state == "starting"]
            if not starting and status.workers:
                return
            left -= _READY_SECONDS
            if left <= 0:
                waits = f"{status.waiting_for}; " if status.waiting_for else ""
                raise TimeoutError(f"not ready after {timeout} s: {waits}{', '.join(map(_described, starting))}")

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"at {self.address}" if self.address else "open"
        return f"<ModelPool {state}>"

    def close(self) -> None:
        """Write pending outputs, cancel unfinished jobs, and disconnect. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for stream in self._streams:
            stream.stop()
        self._reader.stop(wake=partial(_leave, self._connection, self._client_id))
        self._previews.close()
        self._outputs.close()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def _open(cls, opened: OpenedPool, output: OutputDefaults) -> ModelPool:
        try:
            return cls(
                opened.connection,
                opened.close,
                output.folder,
                opened.address,
                opened.jobs,
                file_name=output.name,
                node_writers=opened.node_writers if output.by_nodes else None,
                ended=opened.ended,
            )
        except BaseException:
            opened.close()
            raise

    def controller_handle(self) -> Any:
        """Return a reference to the controller that travels to other processes of the Ray cluster. Raises UserError for
        a pool that is not on Ray.
        """
        from modelpool.actors.ray.ray_connection import RayConnection

        if not isinstance(self._connection, RayConnection):
            raise UserError("this pool is not on a Ray cluster")
        return self._connection.controller

    def _job_service(self) -> JobsConnection:
        if self._jobs is None:
            raise UserError("this pool ends with its driver, so it has no detached jobs; start one with `modelpool up`")
        return self._jobs()

    def _new_jobs(
        self,
        user: str,
        writer: ImageWriter | None,
        name: NameTemplate | None,
        on_preview: Callable[[ImagePreview], None] | None,
        wish: PreviewWish | None,
        batches: SubmittedBatches = NO_BATCHES,
    ) -> FollowedJobs:
        """Return a submission without requests, for this `user`; its events are read from now on."""
        listened = [_new_submission()]
        images = InputImages(self._connection.give)

        def forget() -> None:
            for known in listened:
                self._reader.forget(known)

        def submit_again(wanted: Sequence[tuple[int, GenerateRequest]], again_id: SubmissionId) -> None:
            listened.append(again_id)
            self._reader.listen(again_id, jobs)
            for first, chunk in _runs_of_indexes(wanted):
                sent, given = images.bring_all(chunk)
                part = Submission(self._client_id, again_id, first, sent, False, user, given, wish, batches)
                self._connection.call(CONTROLLER.submit, part)

        def previewed(preview: ImagePreview) -> None:
            if on_preview is not None:
                self._previews.put((listened[0], preview.index), partial(on_preview, preview))

        jobs = FollowedJobs(
            self._connection,
            self._client_id,
            listened[0],
            writer,
            forget,
            submit_again,
            name,
            on_preview=previewed,
            wish=wish,
        )
        self._reader.listen(jobs.id, jobs)
        return jobs

    def _stage(
        self, stage: StageLike, given: dict[TaskId, ResultRef] | None = None, terms: _Qos | None = None
    ) -> StageResult:
        submission_id = _new_submission()
        result = StageResult(
            stage, self._connection, submission_id, self._client_id, partial(self._reader.forget, submission_id)
        )
        listener: Listener = result
        self._reader.listen(submission_id, listener)
        user, priority = (None, 0) if terms is None else (terms.user, terms.priority)
        try:
            part = StageSubmission(
                self._client_id, submission_id, stage, given or {}, self._user if user is None else user, priority
            )
            _warn(self._connection.call(CONTROLLER.submit_stage, part), stacklevel=4)
        except BaseException:
            self._reader.forget(submission_id)
            raise
        return result


def _batches_of(wanted: Sequence[GenerateRequest], writer: ImageWriter | None) -> SubmittedBatches:
    """Return what these requests, the whole of a submission, know about their batch sizes."""
    if all(request.batch not in CHOSEN_BATCHES for request in wanted):
        return NO_BATCHES
    return SubmittedBatches({} if writer is None else writer.place.batch_sizes(), len(wanted))


def _only_job(
    pool: ModelPool, prompt: str, model: str, output: str | Path | Literal[False] | None, fields: Mapping[str, Any]
) -> JobHandle:
    """Submit a request for one image. Raises UserError for one of several outputs, and of a model without images."""
    request = request_of({**fields, "model": model, "prompt": prompt})
    if request.n not in (None, 1):
        raise unusable_field("n", request.n, "1: generate() returns one image; use submit() for several")
    recipe = pool.recipe(request)
    if recipe.is_video or recipe.is_layers or recipe.seconds:
        kind = "audio" if recipe.seconds else "layers" if recipe.is_layers else "videos"
        raise unusable_field("model", model, f"one that generates images; this one generates {kind}: use submit()")
    return pool.submit(request, output=output)[0]


class _Qos:
    """The scheduling arguments of one `submit`, for all its requests. Raises UserError."""

    def __init__(self, priority: int | None, user: str | None, deadline: float | str | None) -> None:
        arguments = {"priority": priority, "user": user, "deadline": deadline}
        set_here: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
        checked = GenerateRequest(model="any", prompt="", **set_here)
        self.user, self.priority = checked.user, checked.priority
        self._set = {name: getattr(checked, name) for name in set_here}

    def fill_in(self, request: GenerateRequest) -> GenerateRequest:
        """Return `request` with the missing ones set."""
        if not self._set:
            return request
        missing = {name: value for name, value in self._set.items() if name not in request.model_fields_set}
        return request.model_copy(update=missing) if missing else request


def _leave(connection: Connection, client_id: ClientId) -> None:
    with contextlib.suppress(PoolLost):  # the controller ended first
        connection.call(CONTROLLER.leave, client_id)


def _defaults_of(opened: OpenedPool) -> OutputDefaults:
    """Return how drivers of a pool write outputs; closes the connection if it does not answer."""
    try:
        return opened.connection.call(CONTROLLER.output_defaults)
    except BaseException:
        opened.close()
        raise


def _warn(texts: Iterable[str], stacklevel: int = 3) -> None:
    """Issue each warning once, at the line that called the pool."""
    for text in dict.fromkeys(texts):
        category = DeadlineTooSoon if text.startswith(DEADLINE_PREFIX) else PartialLora
        warnings.warn(text, category, stacklevel=stacklevel)


def _new_submission() -> SubmissionId:
    return SubmissionId(uuid.uuid4().hex[:10])


def _with_seed(request: GenerateRequest) -> GenerateRequest:
    if request.seed is not None:
        return request
    # a workflow with seeds in all its runs is the same at every call, and so is its file
    own = None if request.workflow is None else request.workflow.own_seed
    return request.model_copy(update={"seed": secrets.randbits(32) if own is None else own})


def _chunks(requests: Iterable[GenerateRequest]) -> Iterator[tuple[GenerateRequest, ...]]:
    """Yield `requests` with seeds, in chunks; draws no more than it yields."""
    drawn = (_with_seed(request) for request in requests)
    while chunk := tuple(islice(drawn, CHUNK)):
        yield chunk


def _runs_of_indexes(
    wanted: Sequence[tuple[int, GenerateRequest]],
) -> Iterator[tuple[int, tuple[GenerateRequest, ...]]]:
    """Yield requests with consecutive indexes together, in chunks, each with its first index. `wanted` is sorted."""
    begin = 0
    for end in range(1, len(wanted) + 1):
        if end == len(wanted) or wanted[end][0] != wanted[end - 1][0] + 1 or end - begin == CHUNK:
            yield wanted[begin][0], tuple(request for _, request in wanted[begin:end])
            begin = end


def _choices(loras: Iterable[LoraLike]) -> tuple[LoraChoice, ...]:
    """The short forms of LoRAs, which a request parses."""
    if not isinstance(loras, Iterable) or isinstance(loras, str):
        raise unusable_field("loras", loras, 'a list of LoRAs, such as [("light", 0.8)]')
    return cast("tuple[LoraChoice, ...]", tuple(loras))


def _several(requests: object) -> Iterable[RequestLike]:
    """Return one request as several. Raises UnusableField for anything else; each is still to be checked."""
    if isinstance(requests, GenerateRequest | Mapping):
        return (requests,)
    if not isinstance(requests, Iterable) or isinstance(requests, str | bytes):
        found = type(requests).__name__
        raise unusable_field("requests", found, "a GenerateRequest, a dict of its fields, or several of them")
    several: Iterable[RequestLike] = requests
    return several


def _request_or_error(given: RequestLike) -> GenerateRequest | UserError:
    """Return the first output of a request, with a seed, or why it is none."""
    try:
        return _with_seed(request_of(given).expanded()[0])
    except UserError as problem:
        return problem


def _check_names(template: NameTemplate | None, chunk: Sequence[GenerateRequest], first: int) -> None:
    """Raise UnusableField if a request lacks a field of the names of files."""
    if template is not None:
        for position, request in enumerate(chunk, start=first):
            template.check(request, f"requests[{position}]" if request.line is None else f"line {request.line}")


def _with_names(
    template: NameTemplate | None, chunks: Iterable[tuple[GenerateRequest, ...]]
) -> Iterator[tuple[GenerateRequest, ...]]:
    """Yield `chunks`. Raises UnusableField at a request that lacks a field of the names of files."""
    first = 0
    for chunk in chunks:
        _check_names(template, chunk, first)
        first += len(chunk)
        yield chunk


def _stage_of(result: StageResult, stage: Stage, name: str, expected: str) -> StageRequest:
    """Return what was requested of a result, in the argument `name`. Raises UnusableField for another stage, and for
    something else.
    """
    if not isinstance(result, StageResult):
        raise unusable_field(name, type(result).__name__, expected)
    if isinstance(result.stage, UpscaleRequest):
        raise unusable_field(name, "a result of upscale()", expected)
    if result.stage.stage is not stage:
        raise unusable_field(name, f"a result of {result.stage.stage.value}()", expected)
    return result.stage


def _described(worker: WorkerStatus) -> str:
    reason = worker.not_up if worker.not_up != "starting" else ""
    return f"{worker.id} ({reason})" if reason else worker.id


def _preview_wish(interval_seconds: float | None) -> PreviewWish:
    """Return a wish for previews. Raises UnusableField."""
    seconds = INTERVAL_SECONDS if interval_seconds is None else interval_seconds
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise unusable_field("preview_seconds", interval_seconds, "a number of seconds from 0")
    return PreviewWish(interval_seconds=float(seconds))
