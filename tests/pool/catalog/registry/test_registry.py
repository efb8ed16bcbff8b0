"""Files are found by path, name, alias and hash; one name of several is refused with all of them; nothing is hashed
twice, and what changed is hashed anew."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from modelpool.pool.catalog.registry import registry as registry_module
from modelpool.pool.catalog.registry.changes import add_location, hash_all, set_alias, unhashed
from modelpool.pool.catalog.registry.file_purpose import LORAS, MODELS, FileKind
from modelpool.pool.catalog.registry.folder_scan import Fingerprint, ModelLocation
from modelpool.pool.catalog.registry.hashes import hash_file
from modelpool.pool.catalog.registry.registry import Registry
from modelpool.pool.catalog.registry.registry_store import CONTENTS_FILE, DATABASE_FILE, ContentRecord, RegistryStore
from modelpool.pool.models.loading.content_digest import DIGEST_BYTES
from modelpool.pool.values.core.errors import AmbiguousName, CorruptFile, UnknownName
from tests.pool.catalog.registry.weights import CHECKPOINT, LORA, VAE, make_registry, no_wait, write_weights


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder as ComfyUI has it."""
    base = tmp_path / "models"
    write_weights(base / "checkpoints" / "sd15" / "base.safetensors", fill=1)
    write_weights(base / "checkpoints" / "sdxl" / "base.safetensors", fill=2)
    write_weights(base / "checkpoints" / "Dream.safetensors", fill=3)
    write_weights(base / "loras" / "light.safetensors", LORA, metadata={"ss_base_model_version": "sd_v1"})
    write_weights(base / "vae" / "light.safetensors", VAE)
    return base


@pytest.fixture
def registry(tmp_path: Path, models: Path) -> Registry:
    found = make_registry(tmp_path / "state")
    add_location(found, models)
    return found


class Reads:
    """Counts the files that were hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        real = hash_file

        def counting(path: Path, *rest: object) -> object:
            self.paths.append(Path(path).name)
            return real(path, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(registry_module, "hash_file", counting)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def hash_everything(registry: Registry) -> None:
    for _ in hash_all(registry, unhashed(registry), wait=no_wait):
        pass


def test_a_listing_tells_name_kind_and_what_it_is(registry: Registry) -> None:
    listing = registry.listing()
    assert [(e.name, e.kind, e.facts.title) for e in listing.entries] == [
        ("Dream", FileKind.CHECKPOINT, listing.entries[0].facts.title),
        ("sd15/base", FileKind.CHECKPOINT, listing.entries[0].facts.title),
        ("sdxl/base", FileKind.CHECKPOINT, listing.entries[0].facts.title),
        ("light", FileKind.LORA, "sd_v1"),
        ("light", FileKind.VAE, ""),
    ]
    assert (listing.refused, listing.unfinished) == ((), ())


def test_a_name_means_a_file_of_the_kind_that_is_asked_for(registry: Registry, models: Path) -> None:
    assert registry.find("light", LORAS, "LoRA").path == models / "loras" / "light.safetensors"
    assert registry.find("LIGHT", {FileKind.VAE}, "VAE").path == models / "vae" / "light.safetensors"
    assert registry.find("dream", MODELS, "model").path == models / "checkpoints" / "Dream.safetensors"
    with pytest.raises(AmbiguousName):
        registry.find("light")
    with pytest.raises(UnknownName, match=r"'Dream' is a checkpoint, expected a LoRA \(.*Dream\.safetensors\)"):
        registry.find("Dream", LORAS, "LoRA")


def test_one_stem_in_two_folders_is_refused_with_both_and_how_to_say_which(registry: Registry, models: Path) -> None:
    with pytest.raises(AmbiguousName) as caught:
        registry.find("base", MODELS, "model")
    folder = models / "checkpoints"
    assert str(caught.value) == (
        f"model 'base' can mean 2 files: 'sd15/base' ({folder}/sd15/base.safetensors); "
        f"'sdxl/base' ({folder}/sdxl/base.safetensors). Use one of these names, a path or a hash, or set "
        "an alias: modelpool models alias NAME sd15/base"
    )
    assert registry.find("sdxl/base", MODELS).path == folder / "sdxl" / "base.safetensors"
    assert registry.find("SD15/base", MODELS).path == folder / "sd15" / "base.safetensors"


def test_of_copies_it_does_not_matter_which_is_meant(registry: Registry, models: Path) -> None:
    copy = models / "checkpoints" / "again" / "Dream.safetensors"
    copy.parent.mkdir()
    copy.write_bytes((models / "checkpoints" / "Dream.safetensors").read_bytes())
    assert registry.find("Dream", MODELS).path.name == "Dream.safetensors"
    write_weights(copy, fill=99)
    with pytest.raises(AmbiguousName):
        registry.find("Dream", MODELS)


def test_every_name_that_is_shown_finds_its_file(registry: Registry) -> None:
    for entry in registry.listing().entries:
        kinds = MODELS if entry.kind in MODELS else {entry.kind}
        assert registry.find(entry.name, kinds).path == entry.file.path


def test_an_unknown_name_like_no_other_is_a_sentence_before_what_is_known(registry: Registry) -> None:
    with pytest.raises(UnknownName, match=r"unknown file 'quux'\. Known: "):
        registry.find("quux")


def test_an_unknown_name_suggests_the_nearest(registry: Registry) -> None:
    with pytest.raises(UnknownName, match="unknown LoRA 'lihgt'; did you mean 'light'"):
        registry.find("lihgt", LORAS, "LoRA")


@pytest.mark.parametrize("upper", [False, True])
def test_a_file_is_found_by_each_of_its_hashes(registry: Registry, models: Path, upper: bool) -> None:
    path = models / "loras" / "light.safetensors"
    content = path.read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    data = hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()
    with pytest.raises(UnknownName, match=r"5 files are not hashed yet: run `modelpool models scan`"):
        registry.find(sha256[:10], LORAS, "LoRA")
    hash_everything(registry)
    for name in (sha256, sha256[:10], sha256[:12], data[:12], data):
        assert registry.find(name.upper() if upper else name, LORAS, "LoRA").path == path
    with pytest.raises(UnknownName, match="is a LoRA, expected a model"):
        registry.find(sha256[:10], MODELS, "model")
    with pytest.raises(UnknownName, match=r"unknown LoRA '0123456789'(?!.*not hashed)"):
        registry.find("0123456789", LORAS, "LoRA")


def test_autov1_finds_files_that_are_long_enough(tmp_path: Path) -> None:
    path = write_weights(
        tmp_path / "models" / "big.safetensors", [f"lora_unet_{n}.lora_up.weight" for n in range(20_000)]
    )
    assert path.stat().st_size > (1 << 20) + 65_536
    registry = make_registry(tmp_path / "state", ModelLocation(path.parent))
    hash_everything(registry)
    window = path.read_bytes()[1 << 20 : (1 << 20) + 65_536]
    assert registry.find(hashlib.sha256(window).hexdigest()[:8]).path == path


def test_a_name_goes_before_a_hash_and_a_full_hash_tells(tmp_path: Path) -> None:
    registry = make_registry(tmp_path / "state", ModelLocation(tmp_path / "models"))
    first = write_weights(tmp_path / "models" / "first.safetensors", fill=1)
    digest = hashlib.sha256(first.read_bytes()).hexdigest()
    named_so = write_weights(tmp_path / "models" / f"{digest[:10]}.safetensors", fill=2)
    hash_everything(registry)
    assert registry.find(digest[:10]).path == named_so
    assert registry.find(digest).path == first


def test_nothing_is_hashed_twice_not_even_after_a_restart(registry: Registry, reads: Reads) -> None:
    hash_everything(registry)
    assert len(reads.paths) == 5
    hash_everything(registry)
    again = Registry(RegistryStore(registry.store.path.parent))
    for entry in again.listing().entries:
        assert entry.hashes == again.hashes(entry.file, entry.kind is FileKind.LORA)
    assert len(reads.paths) == 5


def test_a_file_that_changed_is_hashed_anew_whatever_its_times_say(registry: Registry, models: Path) -> None:
    path = models / "checkpoints" / "Dream.safetensors"
    for fill in (7, 8, 9):
        write_weights(path, fill=fill)
        os.utime(path, (1_000_000, 1_000_000))
        found = registry.hashes(registry.find("Dream"))
        assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_file_that_has_just_changed_is_remembered_here_alone(tmp_path: Path, models: Path, reads: Reads) -> None:
    """Within a tick of its file system's clock it could change again and look the same."""
    state = tmp_path / "state"
    locations = [ModelLocation(models)]
    young = Registry(RegistryStore(state), locations, now_ns=time.time_ns)
    file = young.find("Dream")
    young.hashes(file)
    young.hashes(file)
    assert reads.paths == ["Dream.safetensors"]
    Registry(RegistryStore(state), locations).hashes(file)
    assert len(reads.paths) == 2


def test_digests_are_cached_apart_from_the_state_and_those_of_an_earlier_version_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They can be computed again: a backup of the state needs none of them."""
    state, caches = tmp_path / "state", tmp_path / "caches"
    record = ContentRecord(Fingerprint(1, 2, 3), {(0, 8): bytes(range(DIGEST_BYTES))})
    RegistryStore(state).save_content("/a", record)  # as an earlier version
    store = RegistryStore(state, caches)
    for _ in range(2):
        assert store.content_record("/a") == record
    assert caplog.text.count(f"were in {state}") == 1
    store.save_content("/b", record)
    (state / CONTENTS_FILE).unlink()
    assert RegistryStore(state, caches).content_record("/a") == record
    assert RegistryStore(state, caches).content_record("/b") == record
    assert not (state / CONTENTS_FILE).exists()


def test_hashing_waits_until_it_can_be_remembered(tmp_path: Path, models: Path) -> None:
    registry = Registry(RegistryStore(tmp_path / "state"), [ModelLocation(models)])
    newest_ns = max(entry.file.fingerprint.changed_ns for entry in unhashed(registry))
    waits: list[float] = []
    for _ in hash_all(registry, unhashed(registry), wait=waits.append, now_ns=lambda: newest_ns + 500_000_000):
        pass
    assert waits == [pytest.approx(1.501)]


def test_a_clock_that_is_wrong_is_not_waited_for(registry: Registry) -> None:
    done = list(hash_all(registry, unhashed(registry), wait=lambda seconds: pytest.fail("waits"), now_ns=lambda: 0))
    assert len(done) == 5


def test_a_file_that_changes_while_it_is_read_is_told(registry: Registry, models: Path) -> None:
    file = registry.find("Dream")
    path = models / "checkpoints" / "Dream.safetensors"

    def change(count: int) -> None:
        write_weights(path, (*CHECKPOINT, "more"))

    with pytest.raises(CorruptFile, match="changed while it was read"):
        registry.hashes(file, on_bytes=change)
    assert registry.listing().entries[0].hashes is None


def test_autov3_is_read_when_it_is_asked_for_later(registry: Registry) -> None:
    file = registry.find("light", LORAS)
    assert registry.hashes(file).autov3 == ""
    assert registry.hashes(file, with_data=True).autov3 != ""
    assert Registry(registry.store).hashes(file).autov3 != ""


def test_files_that_were_added_later_are_seen(registry: Registry, models: Path) -> None:
    with pytest.raises(UnknownName):
        registry.find("late", MODELS, "model")
    write_weights(models / "checkpoints" / "late.safetensors")
    assert registry.find("late", MODELS, "model").path.stem == "late"
    (models / "checkpoints" / "late.safetensors").unlink()
    with pytest.raises(UnknownName):
        registry.find("late", MODELS, "model")


def test_what_cannot_be_read_is_listed_with_its_problem_and_never_found(registry: Registry, models: Path) -> None:
    path = models / "checkpoints" / "torn.safetensors"
    path.write_bytes((models / "checkpoints" / "Dream.safetensors").read_bytes()[:-3])
    listing = registry.listing()
    assert [(r.path, r.problem.split(":")[0]) for r in listing.refused] == [(path, "truncated")]
    assert "torn" not in {entry.name for entry in listing.entries}
    with pytest.raises(CorruptFile, match=r"torn\.safetensors: truncated"):
        registry.find("torn", MODELS, "model")
    outside = write_weights(models.parent / "elsewhere" / "x.safetensors")
    (models / "checkpoints" / "linked.safetensors").symlink_to(outside)
    with pytest.raises(CorruptFile, match=r"linked\.safetensors: a link out of the folder"):
        registry.find("linked", MODELS, "model")


def test_a_path_is_a_name_wherever_it_leads(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = write_weights(tmp_path / "elsewhere" / "x.safetensors")
    (tmp_path / "link.safetensors").symlink_to(outside)
    assert registry.find(str(tmp_path / "link.safetensors")).real_path == outside
    monkeypatch.chdir(tmp_path)
    assert registry.find("elsewhere/x.safetensors").path == outside
    with pytest.raises(UnknownName):
        registry.find("elsewhere/y.safetensors")
    with pytest.raises(UnknownName):
        registry.find("a\0b.safetensors")


def test_a_diffusers_folder_has_one_hash_of_all_its_parts(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "sdxl"
    part = write_weights(folder / "unet" / "diffusion_pytorch_model.safetensors")
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionXLPipeline"}))
    registry = make_registry(tmp_path / "state", ModelLocation(tmp_path / "models"))
    [entry] = registry.listing().entries
    assert (entry.name, entry.kind) == ("sdxl", FileKind.CHECKPOINT)
    assert entry.facts.title == "diffusers folder, StableDiffusionXLPipeline"
    before = registry.hashes(entry.file).sha256
    write_weights(part, fill=1)
    assert registry.hashes(registry.find("sdxl")).sha256 != before


def test_a_file_in_parts_with_one_missing_is_refused(tmp_path: Path) -> None:
    base = tmp_path / "text_encoders"
    write_weights(base / "t5-00001-of-00002.safetensors", ["a"])
    (base / "t5.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "t5-00001-of-00002.safetensors", "b": "t5-00002-of-00002.safetensors"}})
    )
    registry = make_registry(tmp_path / "state", ModelLocation(base))
    [refused] = registry.listing().refused
    missing = base / "t5-00002-of-00002.safetensors"
    assert refused.problem == f"{missing}: no such file, expected a safetensors file"
    write_weights(base / "t5-00002-of-00002.safetensors", ["b"])
    [entry] = registry.listing().entries
    assert (entry.name, entry.kind, entry.facts.title) == ("t5", FileKind.TEXT_ENCODER, "in 2 parts")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.safetensors.index.json").write_text(text)
    listing = make_registry(tmp_path / "state", ModelLocation(tmp_path)).listing()
    assert listing.entries == ()
    assert len(listing.refused) == 1


def test_without_a_database_files_are_found_and_hashed_all_the_same(tmp_path: Path, models: Path) -> None:
    (tmp_path / "occupied").write_text("a file where the folder should be")
    registry = make_registry(tmp_path / "occupied", ModelLocation(models))
    with pytest.warns(RuntimeWarning, match=r"cannot be used.*; continuing without it"):
        found = registry.hashes(registry.find("Dream", MODELS))
    assert found.sha256 == hashlib.sha256((models / "checkpoints" / "Dream.safetensors").read_bytes()).hexdigest()
    assert registry.listing().entries[0].hashes == found, "it warns once"


def test_to_look_makes_no_database(tmp_path: Path, models: Path) -> None:
    registry = make_registry(tmp_path / "state", ModelLocation(models))
    registry.listing()
    registry.find("Dream", MODELS)
    assert not (tmp_path / "state").exists()


def test_places_that_people_added_count_where_they_are_asked_for(registry: Registry, models: Path) -> None:
    set_alias(registry, "mine", "Dream")
    without = Registry(registry.store, [ModelLocation(models / "loras", FileKind.LORA)], uses_added=False)
    assert [entry.name for entry in without.listing().entries] == ["light"]
    assert without.aliases() == ()
    assert registry.store.path.name == DATABASE_FILE
