"""The alert rules of `configs/prometheus`, and what of the metrics they read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.architecture.source_tree import ROOT

RULES = ROOT / "configs" / "prometheus" / "alerts.yml"
TESTS = ROOT / "tests" / "actors" / "control" / "history" / "alerts_test.yml"
_SELECTOR = re.compile(r"(modelpool_\w+)(?:\{([^}]*)\})?")
_LABEL = re.compile(r'(\w+)=~?"([^"]*)"')


@cache
def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def missing_of(text: str) -> list[str]:
    """What the rules read, and a scrape of a pool with this text does not have: metrics, and values of labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return [wanted for rule in rules() for wanted in _missing(rule["expr"], samples)]


def _missing(expression: str, samples: Iterable[Any]) -> list[str]:
    missing = []
    for name, labels in _SELECTOR.findall(expression):
        found = [sample.labels for sample in samples if sample.name == name]
        if not found:
            missing.append(name)
        for label, values in _LABEL.findall(labels):
            known = {each.get(label) for each in found}
            missing += [f"{name}{{{label}={value}}}" for value in values.split("|") if value not in known]
    return missing
