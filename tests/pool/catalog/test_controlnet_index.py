"""What a request means by the name of a ControlNet: its file, and what lies beside that. Equal files are one module,
yet each is called, and has a configuration, of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.catalog.controlnet_index import ControlNetIndex
from modelpool.pool.catalog.registry.registry import open_registry
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.stage_params import (
    ControlRef,
    GuidanceParams,
    ModelRef,
    OutputShape,
    SampleParams,
    SamplingSchedule,
    batch_key,
    control_key,
    task_id,
)
from tests.pool.inference.controlnets import tiny_controls
from tests.pool.inference.controlnets.layouts import ldm_controlnet
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

ZEROS, IN_A_FOLDER = "force_zeros_for_pooled_projection", "diffusion_pytorch_model.safetensors"
File = dict[str, Any]


def shelf_of(folder: Path) -> ControlNetIndex:
    def no_model(ref: ModelRef) -> Any:
        raise AssertionError(f"asked for {ref}")

    return ControlNetIndex(open_registry([folder], [], folder / "registry"), "cpu", no_model)


def found(shelf: ControlNetIndex, path: Path) -> ControlRef:
    return shelf.find(str(path), 1.0, 0.0, 1.0)


def in_folder(folder: Path, config: str, make: Callable[[], Any] = tiny_controls.sd3, name: str = IN_A_FOLDER) -> Path:
    """A ControlNet with `config` beside it."""
    tiny_controls.write(folder / name, make)
    (folder / "config.json").write_text(config)
    return folder / name


def without_kind(state: Mapping[str, Any]) -> File:
    """The names of Stability's files, none of which says the kind of its images."""
    return {key: tensor for key, tensor in tiny_controls.sd35_file(state).items() if key != "control_type"}


def sampled(control: ControlRef) -> SampleParams:
    """Some work with it."""
    return SampleParams(
        ModelRef("m", "m", "aa"),
        (),
        OutputShape(64, 64),
        SamplingSchedule(4, "euler", "normal"),
        GuidanceParams(3.0),
        1,
        (control,),
    )


@pytest.mark.parametrize("zeros", [True, False])
def test_what_no_shape_tells_is_taken_from_the_configuration_in_its_folder(zeros: bool, tmp_path: Path) -> None:
    """And nothing else is, such as its layers or a class; nor is one beside a file of another name, which may be of
    another file."""
    config = json.dumps({"_class_name": "MyControlNet", ZEROS: zeros, "num_layers": 10**6, "unheard_of": 1})
    shelf = shelf_of(tmp_path)
    for name, expected in ((IN_A_FOLDER, zeros), ("canny.safetensors", True)):
        opened = shelf.opened(found(shelf, in_folder(tmp_path / name[:5], config, name=name)))
        assert opened.module.config.force_zeros_for_pooled_projection is expected
        assert opened.module.config.num_layers == 1


def test_equal_files_beside_which_other_things_are_said_are_two(tmp_path: Path) -> None:
    """In whichever order they are asked for: with an id, a place in memory and company of its own each. Saying what
    shapes tell is as saying nothing, and ids are what they were before anything was read."""
    paths = {zeros: in_folder(tmp_path / str(zeros), json.dumps({ZEROS: zeros})) for zeros in (True, False)}
    plain_path = in_folder(tmp_path / "plain", "{}")
    for order in ((True, False), (False, True)):
        shelf = shelf_of(tmp_path)
        refs = {zeros: found(shelf, paths[zeros]) for zeros in order}
        assert refs[True].sha256 == refs[False].sha256
        for zeros, ref in refs.items():
            assert shelf.opened(ref).module.config.force_zeros_for_pooled_projection is zeros
            assert shelf.opened(ref).key == control_key(ref)
        works = [sampled(refs[zeros]) for zeros in order]
        assert len({task_id(work, {}) for work in works}) == 2
        assert len({batch_key(work) for work in works}) == 2
        assert len({control_key(ref) for ref in refs.values()}) == 2
        plain = found(shelf, plain_path)
        assert plain.config_overrides == refs[True].config_overrides == ()
        assert task_id(sampled(plain), {}) == task_id(sampled(refs[True]), {})
        assert control_key(plain) == f"{plain.name}/controlnet@{plain.sha256[:10]}"


@pytest.mark.parametrize("config", ["{broken", '{"_class_name": "Mine", "num_layers": 1000000}', f'{{"{ZEROS}": 3}}'])
def test_a_configuration_that_nothing_is_taken_from_is_not_read(config: str, tmp_path: Path) -> None:
    """Such as any beside one for Stable Diffusion 1, or for Flux."""
    shelf = shelf_of(tmp_path)
    path = write_tiny_checkpoint(tmp_path / IN_A_FOLDER, layout=ldm_controlnet(layouts.TINY_UNET))
    (tmp_path / "config.json").write_text(config)
    assert found(shelf, path).config_overrides == ()
    assert found(shelf, in_folder(tmp_path / "flux", config, tiny_controls.flux)).config_overrides == ()


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ("{", r"config\.json"),
        (f'{{"{ZEROS}": 1}}', rf"config\.json: {ZEROS}: found '1', expected true or false"),
        (f'{{"{ZEROS}": null}}', rf"config\.json: {ZEROS}: found 'None', expected true or false"),
    ],
)
def test_a_configuration_that_is_none_is_refused_by_name(config: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=complaint):
        found(shelf_of(tmp_path), in_folder(tmp_path, config))


@pytest.mark.parametrize(
    ("place", "publish", "is_bright"),
    [
        ("c.safetensors", partial(tiny_controls.sd35_file, images=1), True),
        ("canny.safetensors", partial(tiny_controls.sd35_file, images=0), False),
        ("SD3.5-Canny-8b.safetensors", tiny_controls.as_it_is, True),
        ("depth.safetensors", tiny_controls.as_it_is, False),
        (f"sd35-controlnet-canny/{IN_A_FOLDER}", tiny_controls.as_it_is, True),
        ("canny/depth.safetensors", tiny_controls.as_it_is, False),
        (f"models--owner--sd35-canny/snapshots/0a1b/{IN_A_FOLDER}", tiny_controls.as_it_is, True),
        (f"canny/snapshots/0a1b/{IN_A_FOLDER}", tiny_controls.as_it_is, False),
    ],
)
def test_which_images_one_of_sd35_large_reads_is_said_by_its_file_or_else_its_name(
    place: str, publish: Callable[[Mapping[str, Any]], File], is_bright: bool, tmp_path: Path
) -> None:
    tiny_controls.write(tmp_path / place, tiny_controls.sd35_large, 0, publish)
    assert found(shelf_of(tmp_path), tmp_path / place).bright is is_bright


@pytest.mark.parametrize("order", [("canny", "copy"), ("copy", "canny")])
def test_the_name_that_counts_is_that_of_the_file_which_is_asked_for(order: tuple[str, str], tmp_path: Path) -> None:
    """Not the time of a copy which was asked for before, nor of the place that a link leads to."""
    shelf = shelf_of(tmp_path)
    for name in order:
        tiny_controls.write(tmp_path / f"{name}.safetensors", tiny_controls.sd35_large, 5, without_kind)
    refs = {name: found(shelf, tmp_path / f"{name}.safetensors") for name in order}
    assert {name: ref.bright for name, ref in refs.items()} == {"canny": True, "copy": False}
    assert {ref.name for ref in refs.values()} == {order[0]}
    link = tmp_path / "edges of canny.safetensors"
    link.symlink_to(tmp_path / "copy.safetensors")
    assert found(shelf, link).bright


def test_others_that_read_edges_read_them_as_they_are(tmp_path: Path) -> None:
    tiny_controls.write(tmp_path / "canny.safetensors", tiny_controls.sd3)
    assert not found(shelf_of(tmp_path), tmp_path / "canny.safetensors").bright


@pytest.mark.parametrize(
    "said",
    [
        torch.tensor(float("nan")),
        torch.tensor(float("inf")),
        torch.zeros(0),
        torch.ones(2),
        torch.ones(1, dtype=torch.complex64),
    ],
    ids=["nan", "inf", "none", "two", "complex"],
)
def test_a_file_that_says_no_number_of_its_images_is_refused_by_name(said: torch.Tensor, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    state = tiny_controls.sd35_file(tiny_controls.sd35_large().state_dict())
    save_file({**{key: torch.zeros_like(value) for key, value in state.items()}, "control_type": said}, path)
    with pytest.raises(CorruptFile, match=r"c\.safetensors: control_type: found \[.*\], expected one finite number"):
        found(shelf_of(tmp_path), path)
