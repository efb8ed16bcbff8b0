"""`Feature`: what a feature of requests adds to checks, defaults, recipes and the lines of `modelpool inspect`.

A feature is a value with functions; `actors.graph.all_features` lists them. Stage parameters are built by functions of
the same module, which `actors.graph.sample_graph` and `actors.graph.build_graph` call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import LoraRef, ModelRef, SampleParams, StageParams

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe, RecipeImages


#: a name and a value, as they are shown
Line: TypeAlias = tuple[str, str]
#: returns the path of an input file by its name; raises UserError if there is none
FindFile: TypeAlias = Callable[[str], str]
_Part = TypeVar("_Part")


class InputMissing(UserError):
    """An input image or video that an output needs to be generated again. The message names the file."""


@dataclass(frozen=True, slots=True)
class RecipeSource:
    """A request, its defaults filled in, and its task graph: the source of its recipe.

    loras      of the request; the graph has them only as far as they change a component that runs
    stages     the stage parameters of all tasks, in order
    samplings  the sampling runs, in order
    """

    request: GenerateRequest
    graph: JobGraph
    loras: Sequence[LoraRef]
    stages: Sequence[StageParams] = field(init=False)
    samplings: Sequence[SampleParams] = field(init=False)

    def __post_init__(self) -> None:
        stages = [self.graph.works[task.task_id] for task in self.graph.job.tasks]
        object.__setattr__(self, "stages", stages)
        object.__setattr__(self, "samplings", [stage for stage in stages if isinstance(stage, SampleParams)])

    @property
    def sample(self) -> SampleParams:
        """The first sampling run."""
        return self.samplings[0]


def _nothing(*_: Any) -> Mapping[str, Any]:
    return {}


def _no_lines(*_: Any) -> Iterable[Line]:
    return ()


def _accepts(request: GenerateRequest, facts: SamplingFacts) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Section(Generic[_Part]):
    """The fields of a feature in a recipe, or in the images of a recipe.

    record   returns the fields of the recipe. Fields with their defaults may be left out
    restore  returns the fields of the request that leads to the recipe; None for a field that it leaves out. Raises
             InputMissing
    lines    yields the lines of `modelpool inspect`
    """

    record: Callable[[RecipeSource], Mapping[str, Any]] = _nothing
    restore: Callable[[_Part, FindFile], Mapping[str, Any]] = _nothing
    lines: Callable[[_Part], Iterable[Line]] = _no_lines


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature of requests.

    check     raises UserError, naming the field, for a field that models of these facts do not support
    defaults  returns the fields that a request leaves out, or that mean the same as others
    recipe    its fields of `Recipe`
    images    its fields of `RecipeImages`
    """

    check: Callable[[GenerateRequest, SamplingFacts], None] = _accepts
    defaults: Callable[[GenerateRequest, ModelRef, ModelDefaults], Mapping[str, Any]] = _nothing
    recipe: Section[Recipe] = field(default_factory=Section)
    images: Section[RecipeImages] = field(default_factory=Section)


def without_unused_parts(
    name: str, request: GenerateRequest, model: ModelRef, defaults: ModelDefaults
) -> dict[str, Any]:
    """Return the parts of the field `name` that have an effect: their strength is not 0."""
    parts = getattr(request, name)
    return {name: tuple(part for part in parts if part.strength != 0)} if parts else {}


def same_fields(recipe: Recipe | RecipeImages, *names: str) -> dict[str, Any]:
    """Return fields that a request has under the same name, None for the unused ones."""
    return {name: getattr(recipe, name) or None for name in names}


def find_input(field_name: str, file: str, find: FindFile) -> str:
    """Return the path of the input `file`. Raises InputMissing for one from memory."""
    if not file:
        raise InputMissing(f"{field_name}: it came from the memory of a program, expected a file")
    return find(file)


def image_line(file: str, sha256: str, more: str = "") -> str:
    """Return the text for an input image or video."""
    return f"{file or 'from memory'}{more}  (sha256 of its pixels {sha256})"


def span_text(start: float, end: float, of: str) -> str:
    """Return the text for a part of the steps; empty for all of them."""
    return "" if (start, end) == (0.0, 1.0) else f"from {start:g} to {end:g} of {of}"
