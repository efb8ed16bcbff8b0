"""The tested versions of libraries: one statement for the package, the tests and `modelpool doctor`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from modelpool.pool.devices.kind_names import DeviceKind, choose_kind, host_kind
from modelpool.pool.devices.tested_versions import TESTED, untested
from modelpool.pool.models.components.common.library_names import is_stand_in, of_library
from modelpool.pool.values.core.errors import NeedsNewerLibrary

ROOT = Path(__file__).resolve().parents[3]


def test_the_package_requires_the_oldest_tested_versions() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    for name, tested in TESTED.items():
        oldest = ".".join(map(str, tested.oldest))
        assert any(each.startswith(f"{name}>={oldest},") for each in required), name


def test_the_versions_of_the_tests_are_tested_ones() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
    )
    assert untested(pinned) == ()


def test_other_versions_are_named() -> None:
    found = {
        "torch": "2.8.1+cu130",
        "diffusers": "0.37.1",
        "ray": "3.0.0.dev0",
        "transformers": "5.24.0",
        "numpy": "1.0",
    }
    assert [str(each) for each in untested(found)] == [
        "ray: found 3.0.0.dev0, tested with 2.54 to 2.60",
        "torch: found 2.8.1+cu130, tested with 2.9 to 2.14",
    ]


def test_a_class_that_a_library_lacks_is_refused_when_it_is_constructed_and_not_before() -> None:
    class Adapted(of_library("diffusers", "NotYetTransformer2DModel")):  # type: ignore[misc]
        pass

    assert is_stand_in(Adapted)
    with pytest.raises(NeedsNewerLibrary, match=r"NotYetTransformer2DModel: diffusers [\d.]+ does not have it"):
        Adapted(width=3)
    assert not is_stand_in(of_library("diffusers", "AutoencoderKL"))
    assert is_stand_in(of_library("transformers.no_such_module", "Name"))


def test_a_torch_that_cannot_simulate_gpus_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, kind in (
        ("2.9.1+cu128", DeviceKind.CPU),
        ("2.10.0", DeviceKind.SIM),
        ("3.0rc1", DeviceKind.SIM),
        ("2.9.0a0+git", DeviceKind.CPU),
    ):
        monkeypatch.setattr("importlib.metadata.version", lambda name, found=version: found)
        assert host_kind() is kind, version
        assert choose_kind(None, (), has_gpus=False) is kind, version
