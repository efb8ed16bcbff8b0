"""A pytest plugin for runs with older versions of libraries (`scripts/test_versions`): tests of what they lack are
skipped, by the name that is missing.

    python -m pytest -p tests.older_libraries tests/pool
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Generator
from typing import Any

import pytest

#: modules that newer versions moved: the new name, and the older one
_MOVED = {
    "diffusers.pipelines.deprecated.wuerstchen": "diffusers.pipelines.wuerstchen",
    "diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model": (
        "diffusers.pipelines.wuerstchen.modeling_paella_vq_model"
    ),
    "diffusers.pipelines.deprecated.stable_diffusion_sag": "diffusers.pipelines.stable_diffusion_sag",
    "diffusers.pipelines.deprecated.stable_diffusion_sag.pipeline_stable_diffusion_sag": (
        "diffusers.pipelines.stable_diffusion_sag.pipeline_stable_diffusion_sag"
    ),
    "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl": (
        "transformers.models.qwen2_vl.image_processing_qwen2_vl"
    ),
}
#: image processors that compute with numpy, which newer versions call NamePil
_PROCESSORS = ("CLIPImageProcessor", "GlmImageImageProcessor", "Qwen2VLImageProcessor")
_LACKING = (
    re.compile(r"cannot import name '(\w+)' from '((?:diffusers|transformers)[\w.]*)'"),
    re.compile(r"No module named '((?:diffusers|transformers)\.[\w.]+)'"),
    re.compile(r"module '?(diffusers|transformers)[\w.]*'? has no attribute '?(\w+)'?"),
    re.compile(r"(\w+): (diffusers|transformers) [\d.]+ does not have it"),
    re.compile(r"torch [\d.+a-z]+ (has no devices in Python)"),  # those that the simulated device is
)


def pytest_configure(config: pytest.Config) -> None:
    """Give modules and classes of older versions the names of newer ones."""
    config.addinivalue_line("filterwarnings", "ignore:Dynamo detected a call to a")  # since torch 2.10 it says less
    import transformers

    for new, old in _MOVED.items():
        try:
            importlib.import_module(new)
        except ImportError:
            sys.modules[new] = importlib.import_module(old)
    for name in _PROCESSORS:
        if not hasattr(transformers, f"{name}Pil"):
            setattr(transformers, f"{name}Pil", getattr(transformers, name))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file of tests that imports what the library lacks."""
    report = yield
    if report.failed and (found := _lacking(str(report.longrepr))):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"lacks {found}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that needs what the library lacks."""
    report = yield
    if report.failed and call.excinfo is not None and (found := _lacking(str(call.excinfo.value))):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, f"lacks {found}")
    return report


def _lacking(message: str) -> str:
    found = next((match for rule in _LACKING if (match := rule.search(message))), None)
    return "" if found is None else " ".join(found.groups())
