"""The lists of features name every feature that acts there, once."""

from __future__ import annotations

from modelpool.actors.graph import all_features
from modelpool.actors.graph.all_features import DEFAULTS_ORDER, FEATURES, LINE_ORDER
from modelpool.actors.graph.features.feature import Feature, Section


def test_every_feature_acts_where_it_has_a_function_and_once() -> None:
    named = [each for each in vars(all_features).values() if isinstance(each, Feature)]
    assert len(named) > 20
    for feature in named:
        sections = feature.recipe, feature.images
        expected = {
            "FEATURES": 1,
            "DEFAULTS_ORDER": feature.defaults is not Feature().defaults,
            "LINE_ORDER": any(each.lines is not Section().lines for each in sections),
        }
        found = {
            "FEATURES": FEATURES.count(feature),
            "DEFAULTS_ORDER": DEFAULTS_ORDER.count(feature),
            "LINE_ORDER": LINE_ORDER.count(feature),
        }
        assert found == expected, feature
