"""Run parts: a feature of one's own is a row of the tuple, and whatever raises, nothing of a part outlives its run."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from modelpool.actors.control.inputs.input_images import InputImages
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.catalog.estimates.activation_estimator import ActivationEstimator
from modelpool.pool.engine import engine as engine_module
from modelpool.pool.engine import sampling_stage
from modelpool.pool.engine.all_run_parts import RUN_PARTS
from modelpool.pool.engine.sampling_stage import sample_batch
from modelpool.pool.inference.conditioning.run_parts import (
    CallInputs,
    DenoisingRun,
    PreparePart,
    RunPart,
    RunResults,
)
from modelpool.pool.inference.guidance.text_loras import changing_loras_part
from modelpool.pool.values.core.stage_params import Latent, Result, SampleParams
from modelpool.pool.values.specs.spec import JobId, Role, TaskId, TaskSpec
from modelpool.pool.weights.options.run_context import current_run
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from tests.pool.families.conftest import one_mib_on_the_cpu
from tests.pool.families.tiny_model import QUIET, TinyModel
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.inference.image_prompts.tiny_adapters import (
    flat,
    ip_adapter,
    layers_for,
    vision_encoder,
    write_encoder,
)
from tests.pool.input_names import results_read
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora

STEPS = 4
IMAGE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8))
PLAIN: dict[str, Any] = {
    "prompt": "a red cube", "negative": "blurry", "steps": STEPS, "cfg": 5.0, "sampler": "dpmpp_2m", "width": 64,
    "height": 64,
}  # fmt: skip
#: the fields of requests with runs that use one feature each, and of one that uses all
FEATURES: dict[str, dict[str, Any]] = {
    "image prompt": {"image_prompts": [{"model": "adapter", "image": IMAGE, "strength": 0.8}]},
    "LoRA of a text": {"loras": [{"name": "twist", "only": ["prompt"]}]},
    "LoRA of some steps": {"loras": [{"name": "twist", "start": 0.3}]},
    "ControlNet": {"controls": [{"model": "canny", "image": IMAGE}]},
    "option that installs": {"options": {"deepcache": {}}},
    "option of the model": {"options": {"freeu": {}, "pag": {}}},
}
ALL = {
    name: value
    for fields in (*list(FEATURES.values())[:4], {"options": {"deepcache": {}, "freeu": {}}})
    for name, value in fields.items()
}


class Raised(Exception):
    """Of a part."""


@dataclass
class Failing:
    """A part that raises in one stage of a run, and notes the runs that it has seen, and the patches before them."""

    stage: str
    runs: list[DenoisingRun] = field(default_factory=list)
    patches: list[str] = field(default_factory=list)

    def __call__(self, run: DenoisingRun) -> RunPart:
        self.runs.append(run)
        self.patches.append(run.model.patches.digest)
        self._reach("prepare")
        return RunPart(self._around, lambda call: self._reach("third call", run), self._results)

    def _reach(self, stage: str, run: DenoisingRun | None = None) -> None:
        if self.stage == stage and (run is None or run.partial_run.done == 2):
            raise Raised(stage)

    @contextmanager
    def _around(self, module: nn.Module) -> Iterator[None]:
        self._reach("enter")
        yield
        self._reach("exit")

    def _results(self, samples_BCHW: Tensor) -> RunResults | None:
        self._reach("results")
        return None


#: in their order
STAGES = ("prepare", "enter", "third call", "exit", "results")


class Sampled:
    """Sampling tasks of a tiny model in a folder with everything that `FEATURES` name."""

    def __init__(self, folder: Path) -> None:
        for name in ("controlnet", "ipadapter"):
            (folder / name).mkdir()
        control = folder / "controlnet" / "canny.safetensors"
        write_tiny_checkpoint(control, seed=1, dtype=torch.float32, layout=ldm_controlnet(layouts.TINY_UNET))
        write_tiny_lora(folder / "twist.safetensors", 2)
        write_encoder(folder / "clip_vision" / "image_encoder", vision_encoder())
        bare = TinyModel(folder, layouts.tiny_sd1())
        adapter = ip_adapter("base", layers_for(bare.module(Role.DIFFUSION_MODEL)))
        bare.close()
        save_file(flat(adapter), folder / "ipadapter" / "adapter.safetensors")
        self.tiny = TinyModel.of_folder(folder, loras=(folder,))
        self._tasks: dict[str, tuple[TaskSpec, SampleParams, dict[str, Result]]] = {}

    def task(self, **fields: Any) -> tuple[TaskSpec, SampleParams, dict[str, Result]]:
        """The sampling task of a request, with its inputs, which are computed the first time."""
        if repr(fields) not in self._tasks:
            self._tasks[repr(fields)] = self._task(**fields)
        return self._tasks[repr(fields)]

    def _task(self, **fields: Any) -> tuple[TaskSpec, SampleParams, dict[str, Result]]:
        given: dict[TaskId, Result] = {}
        request = GenerateRequest(**{"model": "tiny", "seed": 11, **PLAIN, **fields})
        request, refs = InputImages(lambda result: result).bring(request)
        given.update(refs)  # type: ignore[arg-type] # here a reference is the result itself
        _, cut = build_graph(request, JobId("job"), self.tiny.catalog)
        for task in cut.job.tasks:
            work, inputs = cut.works[task.task_id], results_read(task, given)
            if isinstance(work, SampleParams):
                return task, work, inputs
            given[task.task_id], _ = self.tiny.engine.run(task, work, inputs, QUIET)
        raise AssertionError("no sampling task")

    def latent(self, parts: Sequence[PreparePart] = RUN_PARTS, **fields: Any) -> bytes:
        """The bytes of the latent of a request, sampled with these parts."""
        task, work, inputs = self.task(**fields)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine_module, "sample_batch", partial(sample_batch, parts=parts))
            result, _ = self.tiny.engine.run(task, work, inputs, QUIET)
        assert isinstance(result, Latent)
        return result.samples_CHW.tobytes()

    def left(self) -> dict[str, Any]:
        """What a run may leave behind at the model and its patcher."""
        patcher = self.tiny.engine.patcher(self.tiny.model, Role.DIFFUSION_MODEL)
        hooks = {
            name: (len(each._forward_hooks), len(each._forward_pre_hooks), sorted(vars(each)))
            for name, each in patcher.module.named_modules()
        }
        return {"hooks": hooks, "patches": patcher.patches.digest, "run": current_run(patcher.module)}


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampled]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ActivationEstimator, "_mode_bytes", one_mib_on_the_cpu)
        found = Sampled(tmp_path_factory.mktemp("parts"))
        yield found
        found.tiny.close()


def halved_part(run: DenoisingRun) -> RunPart:
    """A feature of one's own: halves the text states, and everything that the first convolution returns."""
    first = run.model.module.get_submodule("conv_in")

    @contextmanager
    def hooked(module: nn.Module) -> Iterator[None]:
        assert current_run(module) is not None, "entered while the model runs"
        handle = first.register_forward_hook(lambda module, inputs, output: output * 0.5)
        try:
            yield
        finally:
            handle.remove()

    def halve(call: CallInputs) -> None:
        call.context_BLD = call.context_BLD * 0.5

    return RunPart(hooked, halve, lambda samples_BCHW: tuple(Latent(each.numpy() + 1) for each in samples_BCHW))


def quiet_halved_part(run: DenoisingRun) -> RunPart:
    """The same, which leaves the results to others."""
    return replace(halved_part(run), results=None)


def test_a_part_of_ones_own_acts_and_is_undone_also_when_a_later_part_raises(sampled: Sampled) -> None:
    """All of its three functions act, with and without other features; then nothing of it is left."""
    left, failures = sampled.left(), []
    for fields in ({}, ALL):
        plain = sampled.latent(**fields)
        own = sampled.latent((*RUN_PARTS, halved_part), **fields)
        without_results = sampled.latent((*RUN_PARTS, quiet_halved_part), **fields)
        assert len({plain, own, without_results}) == 3
        raised = np.frombuffer(own, np.float32) - np.frombuffer(without_results, np.float32)
        np.testing.assert_allclose(raised, 1, atol=1e-3)
        for stage in STAGES:
            with pytest.raises(Raised, match=stage):
                sampled.latent(
                    (*RUN_PARTS, lambda run: replace(halved_part(run), results=None), Failing(stage)), **fields
                )
            if sampled.left() != left or sampled.latent(**fields) != plain:
                failures.append((stage, bool(fields)))
    assert not failures, failures


def test_each_part_is_undone_whatever_raises_at_each_stage(sampled: Sampled) -> None:
    """In front of the parts, between them and behind them: model and patcher are as before, the state of the run holds
    no tensors, and the next runs, plain and with the feature, are those of a new process. With all features, each stage
    fails at each place; with one, each stage at one place, another for each feature."""
    left, plain, failures = sampled.left(), sampled.latent(), []
    places = (0, RUN_PARTS.index(changing_loras_part) + 1, len(RUN_PARTS))
    for turn, (name, fields) in enumerate({**FEATURES, "all": ALL}.items()):
        expected = sampled.latent(**fields)
        assert expected != plain, f"{name} does not act"
        for step, stage in enumerate(STAGES):
            tried = places if name == "all" else (places[(turn + step) % len(places)],)
            for place in tried:
                failing = Failing(stage)
                with pytest.raises(Raised, match=stage):
                    sampled.latent((*RUN_PARTS[:place], failing, *RUN_PARTS[place:]), **fields)
                if sampled.left() != left:
                    failures.append(f"{name}, {stage} at {place}: {sampled.left()}")
                (run,) = failing.runs
                if [run.model.patches.digest] != failing.patches:
                    failures.append(f"{name}, {stage} at {place}: the patcher has the patches of a step")
                # behind it, the part of the partial run is entered when the failing one is; it is left before "results"
                if stage in ("third call", "exit") and place and run.partial_run.latent_BCHW is not None:
                    failures.append(f"{name}, {stage} at {place}: the state of the run still has its tensors")
            if sampled.latent() != plain:
                failures.append(f"{name}, {stage}: another latent in the next run")
        if sampled.latent(**fields) != expected:
            failures.append(f"{name}: another latent in the next run with it")
    assert not failures, "\n".join(failures)


def test_a_run_uses_cuda_graphs_only_if_all_its_parts_let_it(sampled: Sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts act otherwise than by inputs of calls unless they say so."""
    captured: list[bool] = []
    running = ModelPatcher.running

    def noting(self: ModelPatcher, interrupt: Any = None, options: Any = None, captures: bool = False) -> Any:
        if self.module is sampled.tiny.module(Role.DIFFUSION_MODEL):
            captured.append(captures)
        return running(self, interrupt, options, captures)

    monkeypatch.setattr(ModelPatcher, "running", noting)
    found = {}
    cases: dict[str, tuple[dict[str, Any], PreparePart]] = {"plain": ({}, lambda run: None)}
    cases["own"] = {}, lambda run: RunPart()
    cases["own that captures"] = {}, lambda run: RunPart(captures=True)
    cases |= {name: (fields, lambda run: None) for name, fields in FEATURES.items()}
    for name, (fields, own) in cases.items():
        captured.clear()
        sampled.latent((*RUN_PARTS, own), **fields)
        (found[name],) = captured
    assert [name for name, captures in found.items() if captures] == ["plain", "own that captures"]


def test_the_engine_names_no_feature() -> None:
    """Neither the loop nor the run call asks for a field of one: it has the parts and what they return."""
    names = re.compile(
        r"control|adapter|image_prompt|lora|sound|silence|prepared|level|option|expert|first_frame\b", re.I
    )
    body = inspect.getsource(sampling_stage.sample_batch).split('"""')[2] + inspect.getsource(sampling_stage._sampled)
    allowed = {"model_options", "options", "level_B"}
    assert {name for name in re.findall(r"\w+", body) if names.search(name)} <= allowed
