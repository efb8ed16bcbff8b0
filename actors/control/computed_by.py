"""Settings that change pixels, by name, as recipes have them: of all models, and of single ones."""

from __future__ import annotations

from collections.abc import Mapping

#: between the name of a setting and the name of its model
_OF = " of "
#: value of a setting of one model that means the default, where all models have another value
AS_USUAL = ""


def setting_of(setting: str, model: str) -> str:
    """Return the name of a setting of one model."""
    return f"{setting}{_OF}{model}"


def computed_by_of(computed_by: Mapping[str, str], model: str) -> dict[str, str]:
    """Return the settings of one model that differ from the defaults: settings of all, replaced by its own."""
    found = {name: value for name, value in computed_by.items() if _OF not in name}
    for name, value in computed_by.items():
        setting, of, owner = name.partition(_OF)
        if of and owner == model:
            found[setting] = value
    return {name: value for name, value in found.items() if value != AS_USUAL}
