"""What encoding a text is planned to need depends on the text, and not on which texts were asked about before."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import EngineSettings
from modelpool.pool.values.core.stage_params import EncodeParams, stage_of, task_id
from modelpool.pool.values.specs.spec import TaskSpec
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.whole_transformer import Whole
from tests.pool.pipeline import QUIET

pytestmark = pytest.mark.counted

_LONG = "a small red cat sits beside a large blue dog on the table " * 60
#: all as long to T5; the last weighs a word that T5 has no room for
TEXTS = ("a cat", _LONG, "a (red:1.3) cat", f"{_LONG} (far:1.3)")


@pytest.mark.parametrize("name", ["flux_dev", "sd35_large", "hunyuan_dit"])
def test_figures_do_not_depend_on_the_order_of_calls(name: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES[name])

    def figures(texts: tuple[str, ...]) -> dict[str, int]:
        catalog = Catalog((tmp_path,), (), "cpu")
        model = catalog.find_model("tiny")
        return {text: catalog.figures.counted_bytes(model, EncodeParams(model, (), text)) for text in texts}

    found = figures(TEXTS)
    assert len(set(found.values())) > 1
    assert figures(TEXTS[::-1]) == found
    whole.engine.close()


@pytest.mark.parametrize("text", TEXTS, ids=["short", "long", "weighted", "weighted far"])
def test_a_run_takes_no_more_than_its_figure(text: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path, FAMILIES["flux_dev"], settings=EngineSettings("sim", budget_bytes=1 << 30))
    work = EncodeParams(whole.model, (), text)
    figure_bytes = whole.catalog.figures.counted_bytes(whole.model, work)
    uses = tuple(whole.catalog.use(whole.model, role, ()) for role in whole.family.text_encoders)
    _, cost = whole.engine.run(TaskSpec(task_id(work, {}), stage_of(work), uses, figure_bytes, 0.1), work, {}, QUIET)
    assert cost.working_bytes <= figure_bytes <= 1.1 * cost.working_bytes
    whole.engine.close()
