"""`batch = "auto"` in a graph.

Proves: the recipe and the tasks have a number, and are those of a request with that number; a request without a batch
size is unchanged; work that runs alone, and too little memory, make it smaller, with a reason; images that exist decide
about the others; neither measurements of runs nor other requests have an effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.auto_batch import USUAL_TERMS, AutoBatch, BatchTerms
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import (
    KINDS_REMEMBERED,
    BatchKind,
    RecordedBatches,
    SubmittedBatches,
    output_keys,
)
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.batch_gains import BatchedWork, MeasuredGain
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.sampling_facts import ModelDefaults
from modelpool.pool.values.core.stage_params import DecodeParams, EncodeParams, ModelRef, StageParams
from modelpool.pool.values.specs.spec import JobId, Stage
from tests.actors.fakes import FakeCatalog

GAIN = MeasuredGain(frozenset({"a"}), frozenset({"cpu"}), "card", 128, 1000, {2: 1.5, 4: 2.0, 8: 2.5}, "here")


class Measured(FakeCatalog):
    gains = (GAIN,)


class Routed(Measured):
    """Of a model that routes tokens to experts."""

    def model_defaults(self, model: ModelRef) -> ModelDefaults:
        found = super().model_defaults(model)
        return replace(found, sampling=replace(found.sampling, routes_tokens=True))


class OnGpus(Measured):
    """Of GPUs with so much memory."""

    device_bytes = 0

    def batched_work(self, model: ModelRef) -> BatchedWork:
        return replace(super().batched_work(model), device_bytes=self.device_bytes)


def request(**fields: object) -> GenerateRequest:
    return GenerateRequest.model_validate({"model": "shapes", "prompt": "a", "seed": 1, "batch": "auto", **fields})


def built(
    wanted: GenerateRequest, terms: BatchTerms = USUAL_TERMS, catalog: FakeCatalog | None = None
) -> tuple[Recipe, JobGraph]:
    return build_graph(wanted, JobId("j"), catalog or Measured(), terms)


def recorded(*sizes: int, side: int = 64) -> BatchTerms:
    kind = BatchKind.of(built(request(width=side, height=side))[0])
    return BatchTerms(submission=SubmittedBatches({kind: sizes}))


def test_the_recipe_and_the_tasks_are_those_of_the_number() -> None:
    recipe, graph = built(request())
    assert (recipe.batch, {task.batch_size for task in graph.job.tasks}) == (8, {8})
    explicit, same = built(request(batch=8))
    assert (recipe.digest, graph.job, graph.works) == (explicit.digest, same.job, same.works)
    assert recipe.as_json() == explicit.as_json(), "why it was chosen is for who asked"
    assert ("2.5 times" in recipe.batch_reason, explicit.batch_reason) == (True, "")


def test_usual_texts_have_the_batch_size_and_long_ones_run_alone() -> None:
    found = {}
    for prompt in ("a", "a" * 400):
        _, graph = built(request(batch=8, prompt=prompt, negative="b"))
        found[len(prompt)] = [
            (work.batch_size, task.batch_size)
            for task in graph.job.tasks
            if isinstance(work := graph.works[task.task_id], EncodeParams)
        ]
    assert found == {1: [(8, 8), (8, 8)], 400: [(0, 1), (8, 8)]}
    _, single = built(request(batch=1))
    assert {getattr(work, "batch_size", 0) for work in single.works.values()} == {0}


def test_large_images_are_decoded_one_by_one() -> None:
    """Found: an image of 512x512 that had left a pass of eight was decoded with seven copies, in six times its time."""
    found = {}
    for side in (64, 128, 136, 512):
        _, graph = built(request(batch=8, width=side, height=side))
        tasks = {task.stage: (task.batch_size, graph.works[task.task_id]) for task in graph.job.tasks}
        assert tasks[Stage.SAMPLE][0] == 8
        found[side], work = tasks[Stage.DECODE]
        assert isinstance(work, DecodeParams)
        assert work.batch_size == (8 if side <= 128 else 0)
    assert found == {64: 8, 128: 8, 136: 1, 512: 1}


def test_single_requests_and_kinds_without_a_measurement_are_as_without_it() -> None:
    plain = GenerateRequest(model="shapes", prompt="a", seed=1)
    assert plain.batch == 1
    recipe, graph = built(plain)
    for catalog in (FakeCatalog(), Measured()):
        side = 64 if catalog.gains == () else 512
        usual, _ = built(plain.model_copy(update={"width": side, "height": side}), catalog=catalog)
        found, same = built(request(width=side, height=side), catalog=catalog)
        assert (found.digest, found.batch) == (usual.digest, 0)
        assert "no gain of batches is measured" in found.batch_reason
        assert side != 64 or same.job == graph.job
    assert recipe.batch == 0


def test_what_runs_alone_has_one_and_says_why() -> None:
    for terms in (BatchTerms(), BatchTerms(AutoBatch(4)), recorded(8)):
        recipe, graph = built(request(sampler="dpm_adaptive"), terms)
        assert (recipe.batch, {task.batch_size for task in graph.job.tasks}) == (0, {1})
        assert "dpm_adaptive" in recipe.batch_reason


def test_a_run_that_several_gpus_share_has_one_and_says_why() -> None:
    """Found with a job file: lines with `gpus` were refused, since the command chooses `auto` for all lines."""
    for size in ("auto", "adaptive"):
        recipe, graph = built(request(gpus=2, batch=size))
        samplings = [task for task in graph.job.tasks if task.stage is Stage.SAMPLE]
        assert (recipe.batch, recipe.gpus, [task.degrees for task in samplings]) == (0, "2", [(2,)])
        assert recipe.batch_reason == "several GPUs share its run"
    with pytest.raises(UnusableField, match="gpus: found 2, expected fewer: a run with a fixed batch size"):
        built(request(gpus=2, batch=8))


def test_outputs_in_tiles_are_sampled_in_passes_and_decoded_one_by_one() -> None:
    """They had no batch size, though tiles of one output are decoded alone with any. The decode has the tasks of a
    request without a batch size but for the latent; so are the parts that several workers take."""
    for fields, decodes in (({"vae_tile": 64}, 1), ({"vae_tile": 512, "width": 4096, "height": 4096}, 9)):
        recipe, graph = built(request(**{**fields, "batch": 8}))
        single, alone = built(request(**{**fields, "batch": 1}))
        assert (recipe.batch, single.batch, recipe.vae_tile) == (8, 0, fields["vae_tile"])
        sizes = {stage: {task.batch_size for task in graph.job.tasks if task.stage is stage} for stage in Stage}
        assert (sizes[Stage.SAMPLE], sizes[Stage.DECODE]) == ({8}, {1})
        tiled, plain = (
            [work for work in each.works.values() if isinstance(work, DecodeParams)] for each in (graph, alone)
        )
        assert tiled == plain
        assert len(tiled) == decodes
        assert not any(task.together for task in graph.job.tasks if task.stage is Stage.DECODE)
    assert built(request(vae_tile=64))[0].batch == 8, "auto"


def test_a_model_whose_images_depend_on_each_other_has_one_and_says_why() -> None:
    """HiDream: `auto`, and a size that is configured, are 1; one that is asked for is refused by name."""
    for terms in (BatchTerms(), BatchTerms(AutoBatch(4)), recorded(8)):
        recipe, graph = built(request(), terms, Routed())
        assert (recipe.batch, {task.batch_size for task in graph.job.tasks}) == (0, {1})
        assert "experts" in recipe.batch_reason
    with pytest.raises(UnusableField, match=r"batch.*4.*experts"):
        built(request(batch=4), catalog=Routed())


def test_a_pass_fits_into_the_smallest_gpu_with_as_many_weights_as_one_image() -> None:
    _, graph = built(request(batch=1))
    weights = {spec.key: spec.weight_bytes for spec in graph.components}
    needs = [(sum(weights[use.component] for use in task.uses), task) for task in graph.job.tasks if task.together]

    def least_bytes(size: int) -> int:
        return max(own + size * task.activation_bytes + max(u.scratch_bytes for u in task.uses) for own, task in needs)

    for size in (8, 4, 2):
        for configured in (True, False):
            catalog = OnGpus()
            room_bytes = -(-least_bytes(size) * 100 // 85) + 1
            catalog.device_bytes = 0 if configured else room_bytes
            found, _ = built(request(), BatchTerms(AutoBatch(0, room_bytes if configured else None)), catalog)
            assert found.batch == size, (size, configured)
            assert size == 8 or "do not fit" in found.batch_reason
    assert built(request(), catalog=OnGpus())[0].batch == 8, "of a card that is not known, some memory is assumed"


class LongTexts(OnGpus):
    """With a text encoder that needs a fifth of the memory of a GPU for a long text."""

    device_bytes = 1 << 30

    def activation_bytes(self, model: ModelRef, work: StageParams, context_tokens: Sequence[int] = ()) -> int:
        if isinstance(work, EncodeParams) and not self.tokenize(work).is_usual:
            return self.device_bytes // 5
        return super().activation_bytes(model, work, context_tokens)


def test_a_text_that_runs_alone_makes_no_batch_smaller() -> None:
    """Found: a long text counted as often as the images of a pass, and images with one had another batch size."""
    for prompt in ("a", "a" * 400):
        assert built(request(prompt=prompt), catalog=LongTexts())[0].batch == 8, len(prompt)


def test_images_that_exist_decide_about_the_others_of_their_kind() -> None:
    cases: list[tuple[tuple[int, ...], int]] = [((1,), 0), ((4,), 4), ((1, 8), 8), ((8, 1), 8), ((2, 4), 4)]
    for sizes, expected in cases:
        assert built(request(), recorded(*sizes))[0].batch == expected, sizes
    assert built(request(width=128, height=128), recorded(1))[0].batch == 8, "another kind"
    assert built(request(), BatchTerms(AutoBatch(3), recorded(8).submission))[0].batch == 8
    assert built(request(), BatchTerms(AutoBatch(3)))[0].batch == 3
    few = SubmittedBatches(recorded(8).submission.recorded, expected=2)
    assert built(request(), BatchTerms(submission=few))[0].batch == 8
    assert built(request(), BatchTerms(submission=SubmittedBatches({}, 2)))[0].batch == 2


def test_outputs_of_other_sizes_are_found_if_the_size_is_left_open() -> None:
    recipe, _ = built(request())
    old = replace(recipe, batch=0)
    assert output_keys(request(), recipe, (1, 4)) == (recipe.digest, old.digest, replace(recipe, batch=4).digest)
    assert output_keys(request(batch=8), recipe, (1, 4)) == (recipe.digest,)


def test_a_place_of_very_many_kinds_is_bounded() -> None:
    found, recipe = RecordedBatches(), built(request())[0]
    for width in range(KINDS_REMEMBERED + 9):
        for batch in (0, 4, 4, 0):
            found.note(replace(recipe, width=width, batch=batch))
    assert len(found.sizes) == KINDS_REMEMBERED
    assert found.sizes[BatchKind(recipe.model_sha256, KINDS_REMEMBERED + 8, recipe.height)] == (4, 1)
