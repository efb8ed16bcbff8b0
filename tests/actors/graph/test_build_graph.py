"""Cutting: equal work is one task, different work is not, and a task names all that its result depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.graph.build_graph import build_graph, build_stage_graph
from modelpool.actors.graph.common.stage_request import InputLatent, StageRequest
from modelpool.actors.graph.memory_fit import check_fits
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.core.stage_params import EncodeParams, SampleParams
from modelpool.pool.values.specs.spec import JobId, Role, Stage, TaskId
from modelpool.pool.weights.plan.eviction_plan import Residency, needed_bytes, plan
from tests.actors.fakes import FakeCatalog, component_key, sha

JOB = JobId("job")
LORA_LISTS = st.lists(
    st.tuples(st.sampled_from(["light", "thick", "words"]), st.sampled_from([0.0, 0.5, 1.0])), max_size=3
)
REQUESTS = st.builds(
    lambda **fields: GenerateRequest(model="shapes", **fields),
    prompt=st.sampled_from(["a red circle", "a blue square", ""]),
    negative=st.sampled_from(["", "blurry"]),
    loras=LORA_LISTS,
    steps=st.integers(1, 4),
    cfg=st.sampled_from([1.0, 5.0]),
    seed=st.integers(0, 3),
    width=st.sampled_from([None, 64, 128]),
)


def cut(request: GenerateRequest):
    return build_graph(request, JOB, FakeCatalog())


@given(REQUESTS)
def test_every_task_comes_after_what_it_needs_and_the_wanted_one_is_last(request_) -> None:
    _, made = cut(request_)
    seen: set[TaskId] = set()
    for task in made.job.tasks:
        assert set(task.needs) <= seen
        seen.add(task.task_id)
    assert made.job.tasks[-1].task_id == made.job.wanted
    assert made.job.tasks[-1].stage is Stage.DECODE
    assert set(made.works) == seen
    assert made.job.given == ()
    uses = [use for task in made.job.tasks for use in task.uses]
    assert {c.key for c in made.components} == {key for use in uses for key in (use.component, *use.adapters)}


def _touched(lora: str) -> list[bool]:
    catalog = FakeCatalog()
    model, ref = catalog.find_model("shapes"), catalog.find_lora(lora, 1.0)
    return [catalog.touches(model, role, ref) for role in (Role.TEXT_ENCODER, Role.DIFFUSION_MODEL)]


@given(REQUESTS, REQUESTS)
def test_images_are_the_same_task_exactly_when_their_recipes_would_make_the_same(one, other) -> None:
    """Without guidance the negative prompt says nothing; nor does the order of LoRAs that change different weights."""
    (recipe, first), (other_recipe, second) = cut(one), cut(other)
    seen = [
        replace(
            r,
            negative="" if r.cfg == 1 else r.negative,
            loras=tuple(sorted(r.loras, key=lambda lora: _touched(lora.name))),
        ).digest
        for r in (recipe, other_recipe)
    ]
    assert (first.job.wanted == second.job.wanted) == (seen[0] == seen[1])


@given(REQUESTS)
def test_a_lora_is_named_where_it_acts_and_nowhere_else(request_) -> None:
    _, made = cut(request_)
    wanted = [(lora.name, lora.strength) for lora in request_.loras if lora.strength != 0]
    for task in made.job.tasks:
        role = {Stage.ENCODE: Role.TEXT_ENCODER, Stage.SAMPLE: Role.DIFFUSION_MODEL, Stage.DECODE: Role.VAE}[task.stage]
        named = [(lora.name, lora.strength) for lora in getattr(made.works[task.task_id], "loras", ())]
        catalog = FakeCatalog()
        model = catalog.find_model("shapes")
        acting = [(n, s) for n, s in wanted if catalog.touches(model, role, catalog.find_lora(n, s))]
        assert named == acting
        assert bool(task.uses[0].patch_digest) == bool(acting)
        assert task.uses[0].component == component_key(model, role)


def test_steps_are_the_passes_that_streamed_weights_are_paid_for() -> None:
    _, made = cut(GenerateRequest(model="shapes", prompt="p", seed=1, steps=7))
    assert {task.stage: task.uses[0].passes for task in made.job.tasks} == {
        Stage.ENCODE: 1,
        Stage.SAMPLE: 7,
        Stage.DECODE: 1,
    }


def test_the_recipe_says_what_was_left_to_defaults() -> None:
    recipe, _ = cut(GenerateRequest(model="shapes", prompt="p", seed=5, sampler="DPM++ 2M", loras=["light", "words:0"]))
    assert (recipe.sampler, recipe.schedule) == ("dpmpp_2m", "karras")
    assert (recipe.width, recipe.height, recipe.seed) == (64, 64, 5)
    assert (recipe.model, recipe.model_sha256) == ("shapes", sha("shapes"))
    assert [(lora.name, lora.sha256, lora.strength) for lora in recipe.loras] == [("light", sha("light"), 1.0)]


def test_an_equal_prompt_and_negative_prompt_are_one_task_read_twice() -> None:
    _, made = cut(GenerateRequest(model="shapes", prompt="same", negative="same", seed=1))
    assert [task.stage for task in made.job.tasks] == [Stage.ENCODE, Stage.SAMPLE, Stage.DECODE]
    assert made.job.tasks[1].needs == (made.job.tasks[0].task_id,) * 2


def test_what_is_given_is_not_made_and_neither_is_what_only_it_needs() -> None:
    stage = StageRequest(Stage.DECODE, GenerateRequest(model="shapes", prompt="p", seed=1))
    whole = build_stage_graph(stage, JOB, FakeCatalog())
    sample = next(t.task_id for t in whole.job.tasks if isinstance(whole.works[t.task_id], SampleParams))
    rest = build_stage_graph(stage, JOB, FakeCatalog(), frozenset({sample, TaskId("of another job")}))
    assert [task.stage for task in rest.job.tasks] == [Stage.DECODE]
    assert rest.job.given == (sample,)
    assert rest.job.wanted == whole.job.wanted
    assert len(rest.components) == 1


def test_a_latent_of_ones_own_is_given() -> None:
    latent = InputLatent(TaskId("mine"), (8, 16))
    stage = StageRequest(Stage.DECODE, GenerateRequest(model="shapes", prompt="", seed=1), latent=latent)
    made = build_stage_graph(stage, JOB, FakeCatalog())
    assert made.job.given == ("mine",)
    assert [task.needs for task in made.job.tasks] == [("mine",)]
    (work,) = made.works.values()
    assert (work.shape.width, work.shape.height) == (128, 64)


@given(REQUESTS, st.integers(0, 4 << 20))
def test_what_is_said_to_fit_can_be_planned_and_what_is_not_cannot(request_, capacity_bytes) -> None:
    _, made = cut(request_)
    specs = {component.key: component for component in made.components}

    def plan_all() -> None:
        for task in made.job.tasks:
            plan(Residency(capacity_bytes), task.uses, specs, task.least_activation_bytes)

    try:
        check_fits(made.job, capacity_bytes)
    except DoesNotFit:
        with pytest.raises(DoesNotFit):
            plan_all()
    else:
        plan_all()


def test_the_message_names_a_budget_that_is_enough() -> None:
    _, made = cut(GenerateRequest(model="shapes", prompt="p", seed=1))
    enough = max(needed_bytes(task.uses, task.least_activation_bytes) for task in made.job.tasks)
    check_fits(made.job, enough)
    with pytest.raises(DoesNotFit, match=r"needs at least 1\.1 MiB of device memory, the budget is 1\.0 MiB"):
        check_fits(made.job, 1 << 20)


def test_figures_that_round_to_the_same_are_told_in_bytes() -> None:
    """Found in a review: "needs at least 20.1 MiB of device memory, the budget is 20.1 MiB"."""
    _, made = cut(GenerateRequest(model="shapes", prompt="p", seed=1))
    enough = max(needed_bytes(task.uses, task.least_activation_bytes) for task in made.job.tasks)
    with pytest.raises(DoesNotFit, match=f"needs at least {enough} B of device memory, the budget is {enough - 1} B"):
        check_fits(made.job, enough - 1)


def test_what_is_refused_is_refused_by_what_was_counted() -> None:
    """Found in a review: figures that runs had raised refused what had fitted before, for good."""
    _, made = cut(GenerateRequest(model="shapes", prompt="p", seed=1))
    enough = max(needed_bytes(task.uses, task.least_activation_bytes) for task in made.job.tasks)
    raised = [
        replace(
            task,
            activation_bytes=4 * task.activation_bytes,
            divisions=tuple(
                replace(way, activation_bytes=4 * way.activation_bytes, counted_bytes=way.activation_bytes)
                for way in task.divisions
            ),
            counted_bytes=task.activation_bytes,
        )
        for task in made.job.tasks
    ]
    check_fits(replace(made.job, tasks=tuple(raised)), enough)


def test_the_message_is_about_the_task_that_needs_most() -> None:
    """So that who raises the budget to the figure in the message has raised it far enough."""
    _, made = cut(GenerateRequest(model="shapes", prompt="p", negative="n" * 3000, seed=1, width=4096, height=4096))
    largest_task = max(made.job.tasks, key=lambda task: needed_bytes(task.uses, task.least_activation_bytes))
    assert largest_task.stage is Stage.SAMPLE
    with pytest.raises(DoesNotFit, match="to sample with"):
        check_fits(made.job, 1)


def test_the_texts_of_a_sample_count_by_their_length() -> None:
    figures = []
    for prompt in ("short", "long" * 200):
        _, made = cut(GenerateRequest(model="shapes", prompt=prompt, seed=1))
        figures.append({task.stage: task.activation_bytes for task in made.job.tasks})
    assert figures[1][Stage.SAMPLE] > figures[0][Stage.SAMPLE]
    assert figures[1][Stage.DECODE] == figures[0][Stage.DECODE]


def test_tasks_know_how_they_can_be_divided() -> None:
    _, made = cut(GenerateRequest(model="shapes", prompt="p", seed=1))
    for task in made.job.tasks:
        figures = [task.activation_bytes, *(way.activation_bytes for way in task.divisions)]
        assert figures == sorted(set(figures), reverse=True)
        assert bool(task.divisions) == (task.stage is not Stage.ENCODE)


def test_a_strength_that_changes_over_the_steps_is_not_added_up_on_the_text_encoders() -> None:
    """Texts are encoded once: with the strengths of the uses of a file that begin first."""
    cases: list[tuple[list[str], list[float]]] = [
        (["words:0.8@0-0.5", "words:0.4@0.5-1"], [0.8]),
        (["words:0.4@0.5-1", "words:0.8@0-0.5"], [0.8]),
        (["words:0.3:0.8@0.25-0.5", "words:0.1:0.4@0.5-1"], [0.3]),
        (["words:0.8", "words:0.4@0-0.5", "words:1@0.5-1"], [0.8, 0.4]),
        (["words:0.4@0.5-1", "thick:1"], [0.4, 1.0]),
    ]
    for said, expected in cases:
        _, job = cut(GenerateRequest(model="shapes", prompt="p", seed=5, loras=said))
        (of_text,) = {work.loras for work in job.works.values() if isinstance(work, EncodeParams)}
        assert [lora.strength for lora in of_text] == expected, said
        assert all((lora.start, lora.end) == (0.0, 1.0) for lora in of_text)
        ignored = [each for each in job.warnings if "strength 0.1 on the text encoders is not used" in each]
        assert len(ignored) == ("words:0.1:0.4@0.5-1" in said)


def test_strengths_of_a_lora_reach_the_stages_that_they_are_for() -> None:
    said = "odd:0.25:0.8@0-0.5:lbw=BASE*0.5,MID*0"
    recipe, job = cut(GenerateRequest(model="shapes", prompt="p", seed=5, loras=[said]))
    works = [job.works[task.task_id] for task in job.job.tasks]
    (of_text,) = {work.loras for work in works if isinstance(work, EncodeParams)}
    (of_model,) = {work.loras for work in works if isinstance(work, SampleParams)}
    assert [(each.strength, each.end, each.blocks) for each in of_text] == [(0.25, 1.0, (("BASE", 0.5),))]
    assert [(each.strength, each.end, each.blocks) for each in of_model] == [(0.8, 0.5, (("MID", 0.0),))]
    (lora,) = recipe.loras
    assert (lora.strength, lora.text_strength, lora.end) == (0.8, 0.25, 0.5)
    assert lora.blocks == (("BASE", 0.5), ("MID", 0.0))


def test_cfg_plus_plus_reads_the_negative_prompt_at_cfg_1() -> None:
    """Its noise comes from the prediction for the negative prompt, at every guidance scale."""
    fields = {"model": "shapes", "prompt": "a red circle", "negative": "blurry", "cfg": 1.0, "seed": 1}
    for sampler, reads in (("euler_cfg_pp", True), ("euler", False)):
        _, made = cut(GenerateRequest(sampler=sampler, **fields))
        (sample,) = (task for task in made.job.tasks if task.stage is Stage.SAMPLE)
        texts = {work.text for work in made.works.values() if isinstance(work, EncodeParams)}
        assert ("blurry" in texts) is reads
        assert len(sample.needs) == 1 + reads


def test_options_of_a_run_separate_tasks_and_batches_and_are_in_the_recipe() -> None:
    fields = {"model": "shapes", "prompt": "a red circle", "seed": 1}
    made = [cut(GenerateRequest(**fields, options=options)) for options in (None, {"pag": 2}, {"pag": 3}, {"pag": "3"})]
    tasks = [next(t for t in graph.job.tasks if t.stage is Stage.SAMPLE) for _, graph in made]
    assert [len({task.task_id for task in tasks[:n]}) for n in (2, 3, 4)] == [2, 3, 3]
    assert [len({task.together for task in tasks[:n]}) for n in (2, 3, 4)] == [2, 3, 3]
    recipes = [recipe for recipe, _ in made]
    assert "options" not in recipes[0].as_json()
    assert recipes[2].options == {"pag": {"scale": 3.0, "start": 0.0, "end": 1.0}}
    assert recipes[2].digest == recipes[3].digest != recipes[1].digest != recipes[0].digest
    (again, *_) = requests_of(recipes[2], lambda file: file)
    assert again.options == GenerateRequest(**fields, options={"pag": 3}).options
