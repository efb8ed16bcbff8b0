"""`QUESTIONS`: everything that a catalog can be asked, in one table.

A question is asked through a controller, another process or another node by its name (`CatalogQueries.ask`), and the
method of this name answers it in the thread of the catalog. A new question is a method of the catalog and an entry
here. A driver imports this table, and not what answers: that builds task graphs and imports all families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, TypeVarTuple, cast

if TYPE_CHECKING:
    from modelpool.actors.control.opened_catalog import ListingCatalog, OpenedCatalog

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class CatalogQuestion(Generic[*Ts, T]):
    """A question to a catalog, with the types of its arguments and of its answer. Travels as its name.

    name      of the method that answers
    of_files  whether it is a method of the catalog of files itself
    """

    name: str
    of_files: bool = False

    def answer(self, opened: OpenedCatalog, *arguments: *Ts) -> T:
        """Return the answer. Raises what the method raises."""
        return cast("T", getattr(opened.files if self.of_files else opened, self.name)(*arguments))

    def __reduce__(self) -> tuple[Callable[[str], CatalogQuestion[*tuple[Any, ...], Any]], tuple[str]]:
        return question_named, (self.name,)


def question_named(name: str) -> CatalogQuestion[*tuple[Any, ...], Any]:
    """Return the question with this name. Raises KeyError."""
    return QUESTIONS[name]


class _Named:
    """Stands for a method, by its name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name


class _ByName:
    """Stands for a class: its attributes are the names of its methods."""

    def __getattr__(self, name: str) -> _Named:
        return _Named(name)


_OPENED = cast("type[OpenedCatalog]", _ByName())
_FILES = cast("type[ListingCatalog]", _ByName())


def _question(method: Callable[[OpenedCatalog, *Ts], T]) -> CatalogQuestion[*Ts, T]:
    return CatalogQuestion(method.__name__)


def _of_files(method: Callable[[ListingCatalog, *Ts], T]) -> CatalogQuestion[*Ts, T]:
    return CatalogQuestion(method.__name__, of_files=True)


BUILD_SOME = _question(_OPENED.build_some)
BUILD_STAGE = _question(_OPENED.build_stage)
WEIGHTS = _question(_OPENED.weights)
MODELS = _of_files(_FILES.models)
LORAS = _of_files(_FILES.loras)
FILE_NAMES = _of_files(_FILES.file_names)
TINY_DECODERS = _of_files(_FILES.tiny_decoders)
#: not a question: sent without waiting for an answer
LEARN_ALL = _question(_OPENED.learn_all)

#: every question, by its name
QUESTIONS: Mapping[str, CatalogQuestion[*tuple[Any, ...], Any]] = MappingProxyType(
    {
        question.name: question
        for question in (BUILD_SOME, BUILD_STAGE, WEIGHTS, MODELS, LORAS, FILE_NAMES, TINY_DECODERS, LEARN_ALL)
    }
)
