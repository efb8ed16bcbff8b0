"""The configuration: every preset loads, and errors name the file and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool.actors.cli.terminal.options import DeviceOption as OfferedKind
from modelpool.actors.config.config import PoolConfig
from modelpool.pool.devices.kind_names import AUTO, DeviceKind
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.values.core.errors import MIB, UnknownName, UnusableField, UserError
from tests.each_case import each_case

ROOT = Path(__file__).parents[3]
PRESETS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.name)
def test_every_preset_loads(preset) -> None:
    config = PoolConfig.load(preset)
    assert config.models.folders
    assert config.describe()


def test_changes_are_described_without_defaults() -> None:
    assert PoolConfig().describe(changes_only=True) == ""
    described = PoolConfig().override(device="sim", workers=2).describe(changes_only=True)
    assert described.split() == ["[pool]", "device", "=", '"sim"', "workers", "=", "2"]


def test_the_laptop_preset_serves_the_example() -> None:
    config = PoolConfig.load(ROOT / "configs" / "laptop.toml")
    assert config.models.folders == (ROOT / "examples" / "shapes" / "models",)
    assert config.models.loras == (ROOT / "examples" / "shapes" / "loras",)
    assert config.pool.budget_bytes == 64 * MIB
    assert config.output.folder == ROOT / "outputs"


@each_case(
    ("text", "error", "message"),
    [
        ("[pool]\nwrokers = 3", UnknownName, r"\[pool\] unknown key 'wrokers'; did you mean 'workers'"),
        ("[pool]\ncheckpoint_seconds = -1", UnusableField, r"\[pool\] checkpoint_seconds: found -1"),
        ("[pool]\ncheckpoint_seconds = true", UnusableField, r"\[pool\] checkpoint_seconds: found True"),
        ("[pool]\ncheckpoint_bytes = 'much'", UnusableField, r"checkpoint_bytes: found 'much', expected a size such"),
        ("[pool]\ncheckpoint_bytes = 0", UnusableField, r"checkpoint_bytes: found 0, expected a size such"),
        ("[models]\npin = ['sdxl:0']", UnusableField, r"\[models\] pin: found 'sdxl:0', expected the name of a model"),
        ("[models]\npin = 'sdxl'", UnusableField, r"\[models\] pin: found 'sdxl'"),
        ("[models]\npin = ['']", UnusableField, r"\[models\] pin: found ''"),
        ("[poool]", UnknownName, r"unknown section 'poool'; did you mean 'pool'"),
        ("[scheduler]\nwindw = 3", UnknownName, r"\[scheduler\] unknown key 'windw'; did you mean 'window'"),
        ("[scheduler]\nwindow = 0", UnusableField, r"\[scheduler\] window: found 0, expected at least 1"),
        ("[scheduler]\nwindow = 'x'", UnusableField, r"\[scheduler\] window: found 'x'"),
        ("[scheduler]\nwindow = true", UnusableField, r"\[scheduler\] window: found True, expected a finite number"),
        ("[scheduler]\nrun_timeout_seconds = true", UnusableField, r"\[scheduler\] run_timeout_seconds: found True"),
        ("[scheduler]\nrun_timeout_seconds = nan", UnusableField, r"\[scheduler\] run_timeout_seconds: found nan, exp"),
        ("[scheduler]\nquarantine_seconds = inf", UnusableField, r"\[scheduler\] quarantine_seconds: found inf"),
        ("[scheduler]\nplacement = true", UnusableField, r"\[scheduler\] placement: found True, expected a text"),
        ("[pool]\nvram = 'abc'", UnusableField, r"\[pool\] vram: found 'abc', expected a size such as 64MiB"),
        ("[pool]\nvram = 0", UnusableField, r"\[pool\] vram: found 0"),
        ("[pool]\nreserve_vram = 'abc'", UnusableField, r"\[pool\] reserve_vram: found 'abc', expected a size such as"),
        ("[pool]\nreserve_vram = -1", UnusableField, r"\[pool\] reserve_vram: found -1"),
        ("[pool]\ngpu_link = 'fast'", UnusableField, r"\[pool\] gpu_link: found 'fast', expected bytes per second"),
        ("[pool]\nvram = true", UnusableField, r"\[pool\] vram: found True, expected a number or a text"),
        ("[pool]\nreserve_vram = false", UnusableField, r"\[pool\] reserve_vram: found False"),
        ("[pool]\nworkers = true", UnusableField, r"\[pool\] workers: found True"),
        ("[pool]\nthreads = true", UnusableField, r"\[pool\] threads: found True"),
        ("[pool]\nvram = '0MiB'", UnusableField, r"\[pool\] vram: found '0MiB'"),
        ("[pool]\nvram_policy = 'lo'", UnusableField, r"\[pool\] vram_policy: found 'lo', expected 'auto', 'disabled'"),
        ("[pool]\nworkers = 0", UnusableField, r"\[pool\] workers: found 0, expected a whole number from 1"),
        ("[pool]\nworkers = 'most'", UnusableField, r"\[pool\] workers: found 'most'"),
        ("[pool]\ndevice = 'gpu'", UnusableField, r"\[pool\] device: found 'gpu', expected 'auto', 'cuda'"),
        ("[cluster]\nname = '../x'", UnusableField, r"\[cluster\] name: found '../x'"),
        ("[models]\nfolders = 3", UnusableField, r"\[models\] folders: found 3"),
        ("pool = 3", UnusableField, r"pool: found 3, expected a table, \[pool\]"),
        ("x =", UserError, r"is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_key(tmp_path, text, error, message) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(error, match=message) as caught:
        PoolConfig.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.toml: cannot be read"):
        PoolConfig.load(tmp_path / "nowhere.toml")


def test_paths_in_a_file_are_relative_to_it(tmp_path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[models]\nfolders = ["a", "../b", "/c"]\n[output]\nfolder = "out"\nrecord = "log"'
    )
    config = PoolConfig.load(tmp_path / "mine.toml")
    assert config.models.folders == (tmp_path / "a", tmp_path.parent / "b", Path("/c"))
    assert config.output.folder == tmp_path / "out"
    assert config.output.record == tmp_path / "log"


def test_single_settings_can_be_changed_and_none_leaves_them(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = PoolConfig.load(ROOT / "configs" / "laptop.toml")
    config = before.override(workers="3", vram=None, device="sim", models="mine", output="out", name="big")
    assert (config.pool.workers, config.pool.device, config.pool.vram) == (3, "sim", "64MiB")
    assert config.models.folders == (tmp_path / "mine",)
    assert config.models.loras == before.models.loras
    assert config.output.folder == tmp_path / "out"
    assert config.cluster.name == "big"
    with pytest.raises(UnknownName, match="unknown setting 'wrokers'; did you mean 'workers'"):
        before.override(wrokers=3)
    with pytest.raises(UnusableField, match="workers: found 0"):
        before.override(workers=0)


def test_what_allows_something_is_said_plainly(tmp_path) -> None:
    assert PoolConfig().models.allow_pickle is False
    for said in ('"yes"', "1", '"true"'):
        (tmp_path / "mine.toml").write_text(f"[models]\nallow_pickle = {said}")
        with pytest.raises(UnusableField, match=r"\[models\] allow_pickle: found .*, expected true or false"):
            PoolConfig.load(tmp_path / "mine.toml")
    (tmp_path / "mine.toml").write_text("[models]\nallow_pickle = true")
    config = PoolConfig.load(tmp_path / "mine.toml")
    assert config.models.allow_pickle is True
    assert "allow_pickle = true\n" in config.describe()


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (None, None),
        (0, 0),
        ("0", 0),
        ("0B", 0),
        (" 0 MiB", 0),
        ("0.0G", 0),
        ("0kb", 0),
        ("0.5KiB", 512),
        ("600MiB", 600 * MIB),
        (1_000_000, 1_000_000),
    ],
)
def test_a_reserve_may_be_nothing(said, meant) -> None:
    assert PoolConfig().override(reserve_vram=said).pool.reserve_bytes == meant


def test_a_policy_that_nobody_names_is_the_devices() -> None:
    assert PoolConfig().pool.policy is None
    assert PoolConfig().override(vram_policy="high").pool.policy is VramPolicy.HIGH


def test_the_configuration_that_nobody_names(tmp_path, monkeypatch) -> None:
    """In this order: the file that a variable names, modelpool.toml here, the preset of the checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MODELPOOL_CONFIG", raising=False)
    assert PoolConfig.find() == PoolConfig.load(ROOT / "configs" / "laptop.toml")
    (tmp_path / "modelpool.toml").write_text("[pool]\nworkers = 7")
    assert PoolConfig.find().pool.workers == 7
    (tmp_path / "other.toml").write_text("[pool]\nworkers = 8")
    monkeypatch.setenv("MODELPOOL_CONFIG", str(tmp_path / "other.toml"))
    assert PoolConfig.find().pool.workers == 8
    assert PoolConfig.find(tmp_path / "modelpool.toml").pool.workers == 7
    assert PoolConfig.find(PoolConfig()) == PoolConfig()


def test_a_configuration_travels_as_json() -> None:
    """That is how `modelpool up` hands it to its daemon."""
    config = PoolConfig.load(ROOT / "configs" / "laptop.toml").override(workers=3, name="x")
    assert PoolConfig.model_validate_json(config.model_dump_json()) == config


def test_devices_have_the_same_names_everywhere() -> None:
    """The pool's kinds, what a configuration may say, and what the command line offers."""
    names = {AUTO, *(kind.value for kind in DeviceKind)}
    assert {kind.value for kind in OfferedKind} == names
    assert {PoolConfig().override(device=name).pool.device for name in names} == names


def test_models_of_separate_files_have_tables_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "pool.toml").write_text(
        '[models]\nfolders = ["checkpoints"]\n\n[models.paint]\ndiffusion_model = "unet/p.safetensors"\n'
        'vae = "~/soft.safetensors"\ntext_encoders = ["/data/l.safetensors", "clip/g.safetensors"]\n\n'
        '[models."paint 2.0"]\ncheckpoint = "checkpoints/paint.safetensors"\nvae = "other.safetensors"\n'
    )
    config = PoolConfig.load(tmp_path / "pool.toml")
    first, second = config.models.assemblies
    assert (first.path, second.path) == ("/[models]/paint", "/[models]/paint 2.0")
    assert first.diffusion_model == str(tmp_path / "unet" / "p.safetensors")
    assert first.vae == str(Path("~/soft.safetensors").expanduser())
    assert first.text_encoders == ("/data/l.safetensors", str(tmp_path / "clip" / "g.safetensors"))
    assert (second.checkpoint, second.diffusion_model) == (str(tmp_path / "checkpoints" / "paint.safetensors"), "")
    assert '[models."paint 2.0"]' in config.describe()
    assert config.override(models=tmp_path).models.assemblies == (first, second), "other settings leave them"


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[models.paint]\nunet = 'x'", UnknownName, r"\[models\] paint: unknown key 'unet'"),
        ("[models.paint]\nvae = 'x'", UserError, r"\[models\] paint: /\[models\]/paint: names no diffusion_model"),
        ("[models.paint]\ndiffusion_model = 3", UnusableField, r"\[models\] paint: diffusion_model: found 3"),
        ("[models.'a/b']\ndiffusion_model = 'x'", UnusableField, r"\[models\] a/b: name: found 'a/b'"),
        ("[models.folders]\ndiffusion_model = 'x'", UnusableField, r"\[models\] folders: .*expected no table"),
        ("[models]\nseparate = 3", UnusableField, r"\[models\] separate: found 3, expected no such key here"),
    ],
)
def test_tables_of_separate_files_that_say_something_else(
    tmp_path: Path, text: str, error: type[UserError], message: str
) -> None:
    (tmp_path / "pool.toml").write_text(text)
    with pytest.raises(error, match=message):
        PoolConfig.load(tmp_path / "pool.toml")


def test_single_models_have_settings_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text(
        '[pool]\ncompile = "blocks"\n[pool.models.sdxl]\ncuda_graphs = true\n[pool.models."my own"]\ncompile = "off"\n'
    )
    config = PoolConfig.load(file)
    paths = config.pool.fast_paths
    assert [paths.of(name).words for name in ("sdxl", "my own", "other")] == [
        "compiled blocks, CUDA graphs",
        "as usual",
        "compiled blocks",
    ]
    assert config.override(device="cpu").pool.fast_paths == paths, "other settings leave them"
    file.write_text(config.describe(changes_only=True))
    assert PoolConfig.load(file).pool.models == config.pool.models
    for text, error, message in (
        ('[pool.models.sdxl]\ncompiles = "off"', UserError, r"\[pool\] models.sdxl: .*compiles"),
        ('[pool.models.sdxl]\ncompile = "all"', UnusableField, r"\[pool\] models.sdxl: .*compile: found 'all'"),
        ("[pool.models.sdxl]\ncuda_graphs = 1", UnusableField, "cuda_graphs: found 1, expected true or false"),
        ('[pool.models.sdxl]\nname = "x"', UnusableField, "the name is that of the table"),
        ("[pool]\nmodels = 3", UnusableField, r"\[pool\] models: found 3, expected tables"),
        ('[pool]\nmodels = ["sdxl"]', UnusableField, r"\[pool\] models: found \['sdxl'\], expected tables"),
        ("[pool.models]\nsdxl = 3", UnusableField, r"models.sdxl: found 3, expected a table"),
    ):
        file.write_text(text)
        with pytest.raises(error, match=message):
            PoolConfig.load(file)


def test_pins_name_models_with_their_number_of_gpus(tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text('[models]\npin = ["sdxl", "flux:12", "odd:name", "a:b:2"]')
    assert PoolConfig.load(file).models.pins == (("sdxl", 1), ("flux", 12), ("odd:name", 1), ("a:b", 2))


def test_outputs_may_go_to_an_object_store(tmp_path: Path) -> None:
    path = tmp_path / "pool.toml"
    path.write_text('[output]\nfolder = "s3://bucket/pictures/"')
    config = PoolConfig.load(path)
    assert config.output.folder == "s3://bucket/pictures"
    assert config.override(workers=2, output="gs://bucket/x").output.folder == "gs://bucket/x"
    assert 'folder = "s3://bucket/pictures"' in config.describe()
    path.write_text('[output]\nfolder = "s3://key:secret@bucket/pictures"')
    with pytest.raises(UserError, match=r"\[output\] folder: .*without user name and password") as caught:
        PoolConfig.load(path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("size", "meant"), [(20, "20GiB"), ("20", "20GiB"), (24576, "24576MiB"), ("1.5", "1.5GiB"), (999_999, "999999MiB")]
)
def test_a_small_number_without_a_unit_is_no_size(size: int | str, meant: str) -> None:
    """20 would be 20 bytes, which nobody means."""
    with pytest.raises(UserError, match=f'vram: found .*, expected a size with a unit, such as "{meant}"'):
        PoolConfig().override(vram=size)
    with pytest.raises(UserError, match=f'reserve_vram: found .*"{meant}"'):
        PoolConfig().override(reserve_vram=size)


@pytest.mark.parametrize("size", [1_000_000, "1000000", "20KiB", "20 B", 20 << 30])
def test_large_numbers_and_sizes_with_a_unit_are_accepted(size: int | str) -> None:
    assert PoolConfig().override(vram=size).pool.vram == size
