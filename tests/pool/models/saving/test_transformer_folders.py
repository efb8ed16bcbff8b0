"""Folders of diffusers of files that are not a whole model, or not a plain one: what a checkpoint has not is said and
not made up, LoRAs are in the weights, quantized weights become plain, large components are several files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.families.text_readings import READINGS
from modelpool.pool.files.formats.model_folder import read_component
from modelpool.pool.files.formats.safetensors_writer import TensorToWrite
from modelpool.pool.files.formats.shards import sharded
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.saving.text_tokenizer_files import tokenizer_class, write_text_tokenizer
from modelpool.pool.models.text.text_tokenizer import KINDS, TextTokenizer, byte_tokenizer
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.quant.quantize import quantize
from modelpool.pool.weights.quant.state_dict import save
from tests.pool.families.test_seen_wan import ONE
from tests.pool.families.test_transformers_as_folders import loaded, write
from tests.pool.families.test_transformers_saved import FAMILIES, LORAS
from tests.pool.families.tiny_relatives import RELATIVES
from tests.pool.families.tiny_transformers import seeded
from tests.pool.families.told_pipelines import of_folder
from tests.pool.files.formats.gguf_files import rounded, write_gguf
from tests.pool.models.saving.models import lora_ref, opened, sha256
from tests.pool.models.text.tiny_tokenizers import PROMPTS, tiny

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:__array__ implementation:DeprecationWarning")
_MODEL = "model.diffusion_model."


def alone(name: str, prefix: str = "") -> dict[str, Tensor]:
    """The diffusion model of a tiny family, as files of it alone are published."""
    own = FAMILIES[name].publish(seeded(FAMILIES[name].model, 1).state_dict())
    return {prefix + key: value.contiguous().clone() for key, value in own.items()}


@pytest.mark.parametrize("prefix", ["", _MODEL])
@pytest.mark.parametrize("name", ["flux_dev", "sd3", "wan_t2v", "z_image", "hunyuan_video", "cosmos2_t2i"])
def test_a_diffusion_model_alone_is_a_folder_of_it(name: str, prefix: str, tmp_path: Path) -> None:
    """Libraries load it by its class, this project as the part of a model; neither takes it for a whole."""
    save_file(alone(name, prefix), tmp_path / "a.safetensors")
    checkpoint, folder = open_checkpoint(tmp_path / "a.safetensors", whole=False), tmp_path / "folder"
    assert checkpoint.roles == (Role.DIFFUSION_MODEL,)
    saved = save_diffusers(checkpoint, folder)
    absent = {lack.partition(":")[0] for lack in saved.missing}
    texts = {f"{kind}{'' if n == 0 else f'_{n + 1}'}" for n in range(len(FAMILIES[name].encoders))
             for kind in ("text_encoder", "tokenizer")}  # fmt: skip
    assert absent == {"vae", *texts}
    assert {path.name for path in folder.iterdir()} == {"model_index.json", "transformer", "scheduler"}
    index = json.loads((folder / "model_index.json").read_text())
    assert all(index[place] == [None, None] for place in absent)
    module = checkpoint.build(Role.DIFFUSION_MODEL).module
    (own,) = loaded(folder).values()
    assert type(own).__name__ == type(module).__name__
    assert own.state_dict().keys() == module.state_dict().keys()
    assert all(torch.equal(value, own.state_dict()[key]) for key, value in module.state_dict().items())
    assert read_component(folder / "transformer").class_name == type(own).__name__
    again = open_checkpoint(folder, whole=False)
    assert again.family.name == name
    assert again.family.sampling == checkpoint.family.sampling
    back = again.build(Role.DIFFUSION_MODEL).module.state_dict()
    assert all(torch.equal(value, back[key]) for key, value in module.state_dict().items())
    with pytest.raises(UnknownArchitecture, match=r"its folder has no .*vae"):
        open_checkpoint(folder)


def test_a_part_of_a_model_is_refused_where_a_whole_one_is_wanted(tmp_path: Path) -> None:
    save_file(alone("flux_dev"), tmp_path / "a.safetensors")
    with pytest.raises(UnknownArchitecture, match="without its text encoder and second text encoder and VAE"):
        open_checkpoint(tmp_path / "a.safetensors")


def test_a_model_whose_sight_is_missing_says_so(tmp_path: Path) -> None:
    kept = {key: value for key, value in ONE.file().items() if not key.startswith("vision_encoder.")}
    save_file(kept, tmp_path / "a.safetensors")
    saved = save_diffusers(open_checkpoint(tmp_path / "a.safetensors", whole=False), tmp_path / "folder")
    assert [lack.partition(":")[0] for lack in saved.missing] == ["image_encoder", "tokenizer"]
    assert not (tmp_path / "folder" / "image_processor").exists()


def test_sd3_without_its_third_encoder_says_so(tmp_path: Path) -> None:
    """A whole model, which runs without."""
    save_file(FAMILIES["sd3"].file(("t5xxl",)), tmp_path / "a.safetensors")
    saved = save_diffusers(open_checkpoint(tmp_path / "a.safetensors"), tmp_path / "folder")
    assert [lack.partition(":")[0] for lack in saved.missing] == ["text_encoder_3", "tokenizer_3"]
    assert open_checkpoint(tmp_path / "folder").family.text_encoders == (Role.TEXT_ENCODER, Role.TEXT_ENCODER_2)


def test_a_tokenizer_that_is_nowhere_is_named(tmp_path: Path) -> None:
    """And where it is to be had from; the text encoder is there without it."""
    save_file(FAMILIES["lumina2"].file(), tmp_path / "a.safetensors")
    saved = save_diffusers(open_checkpoint(tmp_path / "a.safetensors"), tmp_path / "folder")
    (lack,) = saved.missing
    assert lack.startswith("tokenizer: no tokenizer of Gemma")
    assert "google/gemma-2-2b" in lack
    assert (tmp_path / "folder" / "text_encoder" / "model.safetensors").is_file()


def test_what_no_class_could_load_is_left_out(tmp_path: Path) -> None:
    """The first layers of Mistral, as files for Flux 2 have them: their last state is read before the norm, which the
    class of transformers would make up."""
    left_out = (".transformer.model.norm.weight", ".layers.30.")
    file = RELATIVES["flux2"].file()
    save_file({k: x for k, x in file.items() if not any(part in k for part in left_out)}, tmp_path / "a.safetensors")
    checkpoint = open_checkpoint(tmp_path / "a.safetensors")
    saved = save_diffusers(checkpoint, tmp_path / "folder")
    places = [lack.partition(": ") for lack in saved.missing]
    assert [place for place, _, _ in places] == ["tokenizer", "text_encoder"]
    assert places[1][2].startswith("the file has only its first layers, without the norm")
    assert not (tmp_path / "folder" / "text_encoder").exists()
    assert loaded(tmp_path / "folder").keys() == {"transformer", "vae"}


def test_what_a_bert_has_beside_is_carried(tmp_path: Path) -> None:
    """Its class has it, and no pipeline reads it: a file without it is saved without."""
    file, start = FAMILIES["hunyuan_dit"].file(), "text_encoders.hydit_bert.transformer.bert."
    width = file[f"{start}embeddings.word_embeddings.weight"].shape[1]
    beside = {"weight": torch.randn(width, width), "bias": torch.randn(width)}
    own = {f"{start}pooler.dense.{name}": value for name, value in beside.items()}
    save_file({**file, **own}, tmp_path / "a.safetensors")
    save_diffusers(open_checkpoint(tmp_path / "a.safetensors"), tmp_path / "folder")
    found = loaded(tmp_path / "folder")["text_encoder"].state_dict()
    assert all(torch.equal(found[f"pooler.dense.{name}"], value) for name, value in beside.items())


def _lora(folder: Path, name: str, shape: tuple[int, ...]) -> Path:
    weight, form = LORAS[name]
    generator = torch.Generator().manual_seed(3)
    up, down = torch.randn(shape[0], 2, generator=generator), torch.randn(2, shape[1], generator=generator)
    base = form.format(weight)
    save_file({f"{base}.lora_B.weight": up * 0.05, f"{base}.lora_A.weight": down}, folder / "some.safetensors")
    return folder / "some.safetensors"


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_merged_lora_is_in_the_folder(is_alone: bool, tmp_path: Path) -> None:
    """The weights are the weights of the merged file, of a diffusion model alone too."""
    from modelpool.pool.models.loading.open_model import OpenModel
    from modelpool.pool.values.core.stage_params import ModelRef

    source = tmp_path / "tiny.safetensors"
    save_file(alone("flux_dev") if is_alone else FAMILIES["flux_dev"].file(), source)
    model = OpenModel(ModelRef("tiny", str(source), sha256(source)), "cpu", whole=False)
    prefix = model.checkpoint.family.prefixes[Role.DIFFUSION_MODEL]
    shape = model.checkpoint.shapes[f"{prefix}{LORAS['flux_dev'][0]}.weight"]
    lora = lora_ref(_lora(tmp_path, "flux_dev", shape), 0.8)
    saved = save_diffusers(model, tmp_path / "folder", loras=[lora])
    save_checkpoint(model, tmp_path / "merged.safetensors", loras=[lora])
    assert saved.patched > 0
    merged = open_checkpoint(tmp_path / "merged.safetensors", whole=False).build(Role.DIFFUSION_MODEL).module
    plain = model.checkpoint.build(Role.DIFFUSION_MODEL).module.state_dict()
    found = load_file(tmp_path / "folder" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in merged.state_dict().items())
    assert any(not torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize("form", ["float8_e4m3fn", "int8_tensorwise", "mxfp8"])
def test_quantized_weights_become_plain(form: str, tmp_path: Path) -> None:
    """As many bits as what they stand for has: diffusers reads them, and finds the values that they stood for."""
    tensors = {key: value.bfloat16() for key, value in FAMILIES["flux_dev"].file().items()}
    chosen = [key for key, x in tensors.items() if ".linear1.weight" in key or ".img_mlp.0.weight" in key]
    given = {key: quantize(tensors[key], form, {}) for key in chosen}
    save_file(save({**tensors, **given}), tmp_path / "a.safetensors")
    model = opened(tmp_path / "a.safetensors")
    save_diffusers(model, tmp_path / "folder")
    found = loaded(tmp_path / "folder")["transformer"].state_dict()
    module = model.checkpoint.build(Role.DIFFUSION_MODEL).module
    packed = {name: p.data for name, p in module.named_parameters() if isinstance(p.data, PackedWeight)}
    assert packed
    written = load_file(tmp_path / "folder" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    for name, weight in packed.items():
        assert torch.equal(found[name].float(), weight.unpack(torch.float32).bfloat16().float()), name


def test_blocks_of_gguf_want_a_type(tmp_path: Path) -> None:
    """They are no type of a folder; with one that is, their values are there."""
    own = alone("flux_dev")
    write_gguf(tmp_path / "a.gguf", own)
    checkpoint = open_checkpoint(tmp_path / "a.gguf", whole=False)
    with pytest.raises(UnusableField, match="expected a plain dtype for the"):
        save_diffusers(checkpoint, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]
    save_diffusers(checkpoint, tmp_path / "folder", dtype=torch.float32)
    found = loaded(tmp_path / "folder")["transformer"].state_dict()
    save_file(rounded(own), tmp_path / "b.safetensors")
    values = open_checkpoint(tmp_path / "b.safetensors", whole=False).build(Role.DIFFUSION_MODEL).module.state_dict()
    held = dict(checkpoint.build(Role.DIFFUSION_MODEL).module.named_parameters())
    packed = {name for name, p in held.items() if isinstance(p.data, PackedWeight)}
    assert len(packed) > 10
    for name, value in values.items():  # what the model has in another form is loaded in half precision
        wanted = value if name in packed else held[name].data.float()
        assert torch.equal(found[name], wanted), name


def test_a_large_component_is_several_files(tmp_path: Path) -> None:
    """With an index that libraries and this project read; small models are one file."""
    checkpoint, folder = open_checkpoint(write(tmp_path, FAMILIES["flux_dev"])), tmp_path / "folder"
    save_diffusers(checkpoint, folder, shard_bytes=200_000)
    parts = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(parts) > 2
    assert parts[0].name == f"diffusion_pytorch_model-00001-of-{len(parts):05d}.safetensors"
    index = json.loads((folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in parts}
    plain = checkpoint.build(Role.DIFFUSION_MODEL).module.state_dict()
    assert index["metadata"]["total_size"] == sum(x.numel() * x.element_size() for x in plain.values())
    found, again = loaded(folder)["transformer"].state_dict(), open_checkpoint(folder)
    ours = again.build(Role.DIFFUSION_MODEL).module.state_dict()
    for name, value in plain.items():
        assert torch.equal(found[name], value)
        assert torch.equal(ours[name], value)
    assert type(loaded(folder)["text_encoder_2"]).__name__ == "T5EncoderModel"


def test_shards_have_every_tensor_once_in_order() -> None:
    """None beyond the limit, but of a tensor that is larger by itself."""
    sizes = [3, 4, 3, 20, 1, 9, 10, 1]
    tensors = [TensorToWrite(str(n), "U8", (size,), lambda: ()) for n, size in enumerate(sizes)]
    shards = list(sharded(tensors, 10))
    assert [tensor for shard in shards for tensor in shard] == tensors
    assert [sum(t.storage_bytes for t in shard) for shard in shards] == [10, 20, 10, 10, 1]
    assert list(sharded((), 10)) == [()]


def test_nothing_is_left_of_a_folder_that_fails(tmp_path: Path) -> None:
    """Between the files of one component too."""
    checkpoint = open_checkpoint(write(tmp_path, FAMILIES["flux_dev"]))
    before = {path.name for path in tmp_path.iterdir()}

    def fails(done_bytes: int, total_bytes: int) -> None:
        if done_bytes > total_bytes // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_diffusers(checkpoint, tmp_path / "folder", progress=fails, shard_bytes=100_000)
    assert {path.name for path in tmp_path.iterdir()} == before


_READ = {reading.encoder: reading for row in READINGS.values() for reading in row if reading.encoder in KINDS}


@pytest.mark.parametrize("encoder", _READ)
def test_a_tokenizer_in_a_folder_reads_what_ours_reads(encoder: str, tmp_path: Path) -> None:
    """With what stands around a text, and filled up on the side where the encoder has it; a chat has its template,
    without what the pipeline adds itself."""
    reading, kind = _READ[encoder], KINDS[encoder]
    ours = TextTokenizer(byte_tokenizer() if kind == "byt5" else tiny(kind), kind)
    write_text_tokenizer(tmp_path / "tokenizer", ours, reading)
    kinds: Any = getattr(transformers, tokenizer_class(ours))
    theirs = kinds.from_pretrained(tmp_path / "tokenizer", local_files_only=True)
    for prompt in PROMPTS:
        ids = [*ours.begin, *ours.encode(prompt).ids, *ours.end]
        found = theirs(prompt, padding="max_length", max_length=len(ids) + 2).input_ids
        pads = [ours.id_of(reading.pad) if reading.pad else ours.pad_id] * 2
        assert found == ([*pads, *ids] if reading.pads_left else [*ids, *pads])
        if reading.template != "{}":
            before, _, after = (reading.chat_template or reading.template).partition("{}")
            chat = [{"role": "user", "content": prompt}]
            said = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            assert said == f"{ours.facts.begin}{before}{prompt}{after}"


def test_diffusers_has_the_pipeline_without_what_is_missing(tmp_path: Path) -> None:
    """It wants what the folder has not, and takes it from the caller."""
    save_file(alone("flux_dev"), tmp_path / "a.safetensors")
    save_diffusers(open_checkpoint(tmp_path / "a.safetensors", whole=False), tmp_path / "folder")
    absent = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    with pytest.raises(ValueError, match="expected"):
        of_folder(tmp_path / "folder")
    assert type(of_folder(tmp_path / "folder", **absent)).__name__ == "FluxPipeline"
