"""Several tasks in one run.

Proves, as a pure decision: whatever fails and however little memory there is, each member has the outcome that it has
alone, in a bounded number of runs; shares of a cost add up to it. And on the shapes model and a simulated device, in
float32: an image of a batch is the image made alone, but for last bits, with each kind of sampler; order and company
change nothing; who stops or cannot be done takes nobody along; a batch that finds too little memory becomes smaller
ones; as many times the figure of one task as there are tasks is never too little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.estimates.stage_peak_bytes import stage_call
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.engine.batching import batch_task, run_batch, shares
from modelpool.pool.engine.engine import Engine
from modelpool.pool.inference.sampling.samplers import FUNCTIONS
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.sampling_facts import PLAIN_SAMPLING
from modelpool.pool.values.core.stage_params import (
    ADAPTIVE_SAMPLER,
    BatchMember,
    DecodeParams,
    Encoded,
    EncodeParams,
    GuidanceParams,
    ImagePixels,
    Latent,
    ModelRef,
    Outcome,
    OutputShape,
    Result,
    RunHooks,
    RunState,
    SampleParams,
    SamplingSchedule,
    StageParams,
    Stopped,
    batch_key,
    stage_of,
    task_id,
)
from modelpool.pool.values.specs.execution_modes import execution_modes
from modelpool.pool.values.specs.spec import ComponentKey, ComponentUse, OomStep, Role, RunCost, Stage, TaskId, TaskSpec
from modelpool.pool.weights.patcher.out_of_memory import RanOutOfMemory
from modelpool.pool.weights.plan.eviction_plan import needed_bytes
from modelpool.pool.weights.tracing.activation_bytes import peak_bytes
from tests.pool.changed_work import changed_work
from tests.pool.input_names import inputs_of
from tests.pool.pipeline import PLENTY_BYTES, QUIET, open_engine

SHAPES = Path(__file__).parents[3] / "examples" / "shapes" / "models"
SIDE, STEPS = 64, 6
TEXTS = ("a red circle", "two (blue:1.3) squares and a green triangle", "a cyan star", "a yellow ring " * 30)
ROLES = {Stage.ENCODE: Role.TEXT_ENCODER, Stage.SAMPLE: Role.DIFFUSION_MODEL, Stage.DECODE: Role.VAE}
#: last bits, as a part of the largest number of a result: matrix products add up in another order at other batch sizes
NEAR = 1e-5

# ---- the decision --------------------------------------------------------------------------------------------------

FILE = ModelRef("m", "m.safetensors", "00")
USE = ComponentUse(ComponentKey("m/vae"), 1)


def asking(number: int, side: int = 8, asks: Callable[[], bool] = lambda: False, size: int = 1) -> BatchMember:
    work = DecodeParams(FILE, OutputShape(side, side), batch_size=size if size > 1 else 0)
    result = Latent(np.full((4, 1, 1), number, np.float32))
    task = TaskSpec(TaskId(str(number)), Stage.DECODE, (USE,), 10, 1.0, batch_size=size)
    return BatchMember(task, work, {"latent": result}, RunHooks(lambda done, steps: None, asks))


class Machine:
    """Runs members where `poison` is not among them and at most `room` are; counts its runs."""

    def __init__(self, poison: frozenset[int] = frozenset(), room: int = 1 << 30) -> None:
        self.poison, self.room = poison, room
        self.runs: list[list[int]] = []

    def __call__(self, members: Sequence[BatchMember]) -> tuple[list[Result], RunCost]:
        numbers = [int(member.task.task_id) for member in members]
        self.runs.append(numbers)
        if len(members) > self.room:
            raise RanOutOfMemory("too many")
        if self.poison & set(numbers):
            raise CorruptFile("poison")
        return [Latent(np.full((1, 1, 1), n, np.float32)) for n in numbers], RunCost(run_seconds=float(len(members)))


def named(outcomes: Sequence[Outcome]) -> list[object]:
    return [type(o) if isinstance(o, Exception) else int(o[0].samples_CHW.item()) for o in outcomes]  # type: ignore[union-attr]


@given(st.integers(1, 9), st.frozensets(st.integers(0, 8)), st.integers(1, 9), st.frozensets(st.integers(0, 8)))
def test_each_has_the_outcome_that_it_has_alone(
    count: int, poison: frozenset[int], room: int, stopped: frozenset[int]
) -> None:
    machine = Machine(poison, room)
    members = [asking(n, side=8 + 8 * (n % 2), asks=lambda n=n: n in stopped) for n in range(count)]  # type: ignore[misc]
    alone = [Stopped if n in stopped else CorruptFile if n in poison else n for n in range(count)]
    assert named(run_batch(members, machine)) == alone
    assert len(machine.runs) <= 3 * count
    ran = [n for run in machine.runs for n in run]
    assert not stopped & set(ran)
    assert all(len({n % 2 for n in run}) == 1 for run in machine.runs), "of two sizes"


def test_too_little_memory_halves_and_says_so() -> None:
    machine = Machine(room=2)
    outcomes = run_batch([asking(n) for n in range(5)], machine)
    assert machine.runs == [[0, 1, 2, 3, 4], [0, 1, 2], [0, 1], [2], [3, 4]]
    costs = [outcome[1] for outcome in outcomes if isinstance(outcome, tuple)]
    assert [cost.batched for cost in costs] == [2, 2, 1, 2, 2]
    assert [cost.oom_steps for cost in costs] == [(OomStep.DIVIDE,) * 2] * 3 + [(OomStep.DIVIDE,)] * 2


def test_a_fixed_batch_size_that_does_not_fit_is_not_tried_with_fewer() -> None:
    """Fewer members have as large a pass."""
    machine = Machine(room=2)
    assert named(run_batch([asking(n, size=4) for n in range(4)], machine)) == [RanOutOfMemory] * 4
    assert machine.runs == [[0, 1, 2, 3]]


def test_padding_is_charged_to_nobody() -> None:
    for count in (1, 3, 4):
        costs = [outcome[1] for outcome in run_batch([asking(n, size=4) for n in range(count)], Machine())]  # type: ignore[index]
        assert {(cost.batched, cost.run_seconds) for cost in costs} == {(4, count / 4)}, count
        assert {cost.whole.run_seconds for cost in costs} == {float(count)}, count


def test_what_fails_by_itself_takes_nobody_along() -> None:
    machine = Machine(poison=frozenset({1}))
    assert named(run_batch([asking(n) for n in range(4)], machine)) == [0, CorruptFile, 2, 3]
    assert machine.runs == [[0, 1, 2, 3], [0], [1], [2], [3]]


@given(st.integers(1, 12), st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 100))
def test_shares_add_up(count: int, uploaded: int, switches: int, seconds: int) -> None:
    cost = RunCost(seconds, 2 * seconds, uploaded, uploaded // 2, 77, patch_switches=switches, storage_bytes=uploaded)
    parts = shares(cost, count)
    for name in ("uploaded_bytes", "streamed_bytes", "patch_switches", "storage_bytes"):
        assert sum(getattr(part, name) for part in parts) == getattr(cost, name)
    assert math.isclose(sum(p.run_seconds for p in parts), cost.run_seconds)
    assert {(p.batched, p.peak_bytes) for p in parts} == {(count, 77)}


# ---- on a device ---------------------------------------------------------------------------------------------------


class Bench:
    """The shapes model on an engine, one task at a time or several."""

    def __init__(self, engine: Engine, catalog: Catalog) -> None:
        self.engine, self.catalog = engine, catalog
        self.model = catalog.find_model("shapes")

    def member(self, work: StageParams, *inputs: Result, hooks: RunHooks = QUIET) -> BatchMember:
        stage = stage_of(work)
        use = self.catalog.use(
            self.model, ROLES[stage], (), work.schedule.steps if isinstance(work, SampleParams) else 1
        )
        tokens = [len(i.context_LD) for i in inputs if isinstance(i, Encoded)]
        whole, *divided = self.catalog.execution_modes(self.model, work, tokens)
        task = TaskSpec(task_id(work, {}), stage, (use,), whole.activation_bytes, 0.1, divisions=tuple(divided))
        return BatchMember(task, work, inputs_of(work, *inputs), hooks)

    def fixed(self, member: BatchMember, size: int) -> BatchMember:
        """`member` with a batch size, as `TaskCollector` makes it."""
        whole = execution_modes(member.task)[0].times(size)
        task = replace(member.task, activation_bytes=whole.activation_bytes, divisions=(), batch_size=size)
        return replace(member, task=task, work=replace(member.work, batch_size=size))  # type: ignore[call-arg]

    def alone(self, member: BatchMember) -> Result:
        return self.engine.run(member.task, member.work, member.inputs, member.hooks)[0]

    def encodes(self, texts: Sequence[str] = TEXTS) -> list[BatchMember]:
        return [self.member(EncodeParams(self.model, (), text)) for text in texts]

    def samples(self, count: int = 4, sampler: str = "euler_ancestral") -> list[BatchMember]:
        """Of images with seeds and prompts of their own and equally long texts."""
        prompt, negative = [self.alone(member) for member in self.encodes(("a cyan star", ""))]
        assert isinstance(prompt, Encoded)
        texts = [Encoded(prompt.context_LD * (1 + place / 8)) for place in range(count)]
        works = [
            SampleParams(
                self.model,
                (),
                OutputShape(SIDE, SIDE),
                SamplingSchedule(STEPS, sampler, "normal"),
                GuidanceParams(4.0),
                seed,
            )
            for seed in range(7, 7 + count)
        ]
        return [self.member(work, text, negative) for work, text in zip(works, texts, strict=True)]

    def decodes(self, count: int = 4) -> list[BatchMember]:
        random = np.random.default_rng(1)
        latents = [Latent(random.normal(size=(4, SIDE // 8, SIDE // 8)).astype(np.float32)) for _ in range(count)]
        return [self.member(DecodeParams(self.model, OutputShape(SIDE, SIDE)), latent) for latent in latents]


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return Catalog([SHAPES], [], "sim")


@pytest.fixture
def bench(catalog: Catalog) -> Iterator[Bench]:
    engine = open_engine("sim", PLENTY_BYTES)
    yield Bench(engine, catalog)
    engine.close()
    assert sim.memory_stats(0).used_bytes == 0


def array(result: Result | Outcome) -> np.ndarray:
    match result:
        case (found, RunCost()):
            return array(found)
        case Encoded():
            return result.context_LD
        case Latent():
            return result.samples_CHW
        case ImagePixels():
            return result.pixels_HWC
    raise AssertionError(f"no result: {result!r}")


def assert_near(found: Sequence[Outcome], expected: Sequence[Result], near: float = NEAR) -> None:
    """Pixels may be rounded to the next level where they were between two."""
    for one, other in zip(found, expected, strict=True):
        a, b = array(one).astype(np.float64), array(other).astype(np.float64)
        most = 1.0 if array(other).dtype == np.uint8 else near * np.abs(b).max()
        assert np.abs(a - b).max() <= most
        assert array(other).dtype != np.uint8 or (a != b).mean() < 1e-3


#: a sampler of each kind: one model call per step, two, noise of its own, and steps before that it keeps
SAMPLERS = ("euler", "euler_ancestral", "heun", "dpm_2", "dpmpp_2m", "dpmpp_2m_sde", "uni_pc", "deis", "sa_solver")
#: the samplers that extrapolate from several guesses enlarge what the guesses differ by
NEAR_MULTISTEP = 1e-3


def test_images_of_a_run_are_those_made_alone(bench: Bench) -> None:
    """Of each kind of sampler. Each image has noise of its own."""
    assert set(SAMPLERS) <= set(FUNCTIONS)
    for sampler in SAMPLERS:
        members = bench.samples(3, sampler)
        outcomes = bench.engine.run_batch(members)
        assert_near(outcomes, [bench.alone(member) for member in members], NEAR_MULTISTEP)
        assert {outcome[1].batched for outcome in outcomes if isinstance(outcome, tuple)} == {3}, sampler
        arrays = [array(outcome) for outcome in outcomes]
        assert not np.allclose(arrays[0], arrays[1], atol=0.1), sampler


def test_a_sampler_whose_steps_follow_from_the_image_runs_alone(bench: Bench) -> None:
    (member,) = bench.samples(1, ADAPTIVE_SAMPLER)
    assert not batch_key(member.work)


def test_texts_of_any_length_and_latents_of_a_run_are_those_made_alone(bench: Bench) -> None:
    for members in (bench.encodes(), bench.decodes()):
        assert_near(bench.engine.run_batch(members), [bench.alone(member) for member in members])


def test_texts_of_a_run_have_the_bytes_that_they_have_alone(bench: Bench) -> None:
    """On a CPU, in runs of any size, and in another one of its device. Measured likewise at the widths of CLIP and T5.
    GPUs choose kernels by the size, so texts have a batch size all the same."""
    members = bench.encodes(("a cyan star", "", "two blue squares", "a ring", "a dot", "a line", "red", "green"))
    alone = [array(bench.alone(member)) for member in members]
    for count in (2, 3, 8):
        outcomes = bench.engine.run_batch(members[:count])
        assert {outcome[1].batched for outcome in outcomes if isinstance(outcome, tuple)} == {count}
        assert all(np.array_equal(array(found), one) for found, one in zip(outcomes, alone, strict=False))


def test_neither_order_nor_company_changes_a_image(bench: Bench) -> None:
    """In runs of as many: bit for bit. Every member of a batch is computed like every other."""
    members = bench.samples(4)
    outcomes = bench.engine.run_batch(members)
    order = (2, 0, 3, 1)
    mixed = bench.engine.run_batch([members[place] for place in order])
    others = [replace(m, work=replace(m.work, seed=90 + n)) for n, m in enumerate(members[1:])]  # type: ignore[type-var, call-arg]
    beside = bench.engine.run_batch([members[0], *others])
    for place, outcome in zip(order, mixed, strict=True):
        assert np.array_equal(array(outcome), array(outcomes[place]))
    assert np.array_equal(array(beside[0]), array(outcomes[0]))


def test_with_a_fixed_batch_size_no_grouping_changes_a_byte(bench: Bench) -> None:
    """Texts, samplings and decodes of four: together, in two, alone, in any order, with others, and alone in an engine
    that has run nothing before. Alone without a batch size, some have other last bits: else this proves nothing."""
    texts = ("a cyan star", "", "two blue squares", "a ring", "a dot", "a line")
    for single in (bench.encodes(texts), bench.samples(6), bench.decodes(6)):
        members = [bench.fixed(member, 4) for member in single]
        whole = [array(outcome) for outcome in bench.engine.run_batch(members[:4])]
        for places in ((0, 1), (2,), (3, 0), (3, 2, 1, 0), (5, 2, 4), (1, 4, 5, 3)):
            outcomes = bench.engine.run_batch([members[place] for place in places])
            for place, outcome in zip(places, outcomes, strict=True):
                assert isinstance(outcome, tuple), outcome
                assert outcome[1].batched == 4
                assert place > 3 or np.array_equal(array(outcome), whole[place]), (places, place)
        fresh = open_engine("sim", PLENTY_BYTES)
        assert np.array_equal(array(fresh.run_batch([members[1]])[0]), whole[1])
        fresh.close()
        if isinstance(single[0].work, SampleParams):
            alone = [array(bench.alone(member)) for member in single[:4]]
            assert any(not np.array_equal(one, other) for one, other in zip(alone, whole, strict=True))


def test_a_run_with_padding_resumes_with_other_padding(bench: Bench) -> None:
    """A state that a run of three saved continues alone: the same bytes."""
    members = [bench.fixed(member, 4) for member in bench.samples(3)]
    whole = bench.engine.run_batch(members)
    saved: list[RunState] = []

    def keep(states: Callable[[], Sequence[RunState]]) -> None:
        (state,) = states()
        if state.step == 3:
            saved.append(state)

    hooks = replace(QUIET, checkpoint=keep)
    bench.engine.run_batch([members[0], replace(members[1], hooks=hooks), members[2]])
    (state,) = saved
    (resumed,) = bench.engine.run_batch([replace(members[1], resume=state)])
    assert np.array_equal(array(resumed), array(whole[1]))


def test_unlike_members_are_run_apart(bench: Bench) -> None:
    members = bench.samples(3)
    work = members[1].work
    assert isinstance(work, SampleParams)
    other = replace(members[1], work=changed_work(work, cfg=2.0))
    outcomes = bench.engine.run_batch([members[0], other, members[2]])
    assert [o[1].batched for o in outcomes if isinstance(o, tuple)] == [2, 1, 2]
    assert np.array_equal(array(outcomes[1]), array(bench.alone(other)))


def test_one_that_stops_leaves_the_others_and_all_end_the_run(bench: Bench) -> None:
    members = bench.samples(3)
    expected = [bench.alone(member) for member in members]
    steps: list[int] = []
    some = RunHooks(lambda done, of: steps.append(done), lambda: len(steps) >= 2)
    asked = [replace(members[0], hooks=some), *members[1:]]
    outcomes = bench.engine.run_batch(asked)
    assert steps == list(range(1, STEPS + 1)), "two want it"
    assert_near(outcomes, expected)
    steps.clear()
    outcomes = bench.engine.run_batch([replace(member, hooks=some) for member in members])
    assert [type(outcome) for outcome in outcomes] == [Stopped] * 3
    assert steps == [1] * 3


def test_a_latent_that_is_not_finite_fails_alone(bench: Bench) -> None:
    members = bench.samples(3)
    prompt = members[1].inputs["positive"]
    assert isinstance(prompt, Encoded)
    broken_prompt = Encoded(prompt.context_LD * np.float32("nan"))
    broken = replace(members[1], inputs={**members[1].inputs, "positive": broken_prompt})
    outcomes = bench.engine.run_batch([members[0], broken, members[2]])
    assert isinstance(outcomes[1], CorruptFile)
    for place in (0, 2):
        assert np.array_equal(array(outcomes[place]), array(bench.alone(members[place])))


@pytest.mark.parametrize("fits", [1, 2, 3])
def test_a_budget_for_fewer_makes_smaller_runs(bench: Bench, catalog: Catalog, fits: int) -> None:
    members = bench.decodes(4)
    expected = [bench.alone(member) for member in members]
    task = members[0].task
    budget_bytes = needed_bytes(task.uses, fits * task.activation_bytes) + task.activation_bytes // 2
    bench.engine.close()  # its weights would be there too
    tight = Bench(open_engine("sim", budget_bytes), catalog)
    outcomes = tight.engine.run_batch(members)
    tight.engine.close()
    assert_near(outcomes, expected)
    assert [o[1].batched for o in outcomes if isinstance(o, tuple)] == ([2] * 4 if fits > 1 else [1] * 4)
    assert sim.memory_stats(0).peak_bytes <= budget_bytes
    sim.configure(0, PLENTY_BYTES)


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("stage", [Stage.ENCODE, Stage.SAMPLE, Stage.DECODE])
def test_as_many_times_the_figure_of_one_is_never_too_little(bench: Bench, stage: Stage, count: int) -> None:
    """On a device that takes what torch allocates: at most that, and at least half of it."""
    texts = [f"{word} (red:1.2) thing" for word in "abcdefgh"[:count]]
    members = {
        Stage.ENCODE: lambda: bench.encodes(texts),
        Stage.SAMPLE: lambda: bench.samples(count, "uni_pc"),
        Stage.DECODE: lambda: bench.decodes(count),
    }[stage]()
    outcomes = bench.engine.run_batch(members)
    (held_bytes,) = {outcome[1].working_bytes for outcome in outcomes if isinstance(outcome, tuple)}
    planned_bytes = batch_task([member.task for member in members]).activation_bytes
    assert planned_bytes == count * members[0].task.activation_bytes
    assert planned_bytes / 2 <= held_bytes <= planned_bytes


@pytest.mark.parametrize("side", [64, 96, 256])
def test_dry_runs_say_the_same_at_other_sizes(catalog: Catalog, side: int) -> None:
    opened = OpenModel(catalog.find_model("shapes"), "sim")
    works: list[tuple[Role, StageParams]] = [
        (
            Role.DIFFUSION_MODEL,
            SampleParams(
                opened.ref, (), OutputShape(side, side), SamplingSchedule(4, "euler", "normal"), GuidanceParams(4.0), 1
            ),
        ),
        (Role.VAE, DecodeParams(opened.ref, OutputShape(side, side))),
    ]
    for role, work in works:
        component = opened.component(role)
        module, dtype, latent = component.built.module, component.form.compute_dtype, opened.checkpoint.latent
        one, *more = [
            peak_bytes(module, dtype, stage_call(work, dtype, latent, PLAIN_SAMPLING, 77, images))
            for images in (1, 2, 4, 8)
        ]
        assert [found <= count * one for count, found in zip((2, 4, 8), more, strict=True)] == [True] * 3


def test_what_a_run_reads_of_a_model_or_a_request_keeps_works_apart() -> None:
    """Two models may have equal weights, and read texts, noise and latents otherwise; layers of CLIP may be skipped."""
    one, other = ModelRef("a", "/a", "a" * 64), ModelRef("b", "/b", "b" * 64)
    sample = SampleParams(
        one, (), OutputShape(SIDE, SIDE), SamplingSchedule(STEPS, "euler", "normal"), GuidanceParams(1.0), 0
    )
    for work in (EncodeParams(one, (), "a"), sample, DecodeParams(one, OutputShape(SIDE, SIDE))):
        assert batch_key(work) != batch_key(replace(work, model=other))
    text = EncodeParams(one, (), "a")
    assert batch_key(text) != batch_key(replace(text, layers_skipped=1))
    assert batch_key(text) == batch_key(replace(text, text="b"))
    assert batch_key(sample) == batch_key(replace(sample, seed=7))
