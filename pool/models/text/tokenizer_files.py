"""Finds the tokenizer of a text encoder: in a folder named by the user, inside the weights file, or next to it.

Accepted files, in this order: tokenizer.json; spiece.model or tokenizer.model; tekken.json; vocab.json with merges.txt;
vocab.txt. Inside a weights file: byte tensors, as in ComfyUI's files of UMT5, Gemma and Mistral, or the entries of a
GGUF file. A vocabulary is skipped as another encoder's if it lacks the special tokens, differs much from the encoder in
size, or has a token id beyond the encoder's table; so is one that cannot read every text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

from modelpool.pool.files.formats.folder_header import WRITER_FOLDER
from modelpool.pool.files.formats.gguf_entries import has_gguf_start
from modelpool.pool.files.formats.gguf_parts import stem_of
from modelpool.pool.files.formats.regular_file import MAX_TEXT_BYTES, read_text_file
from modelpool.pool.models.text.gguf_tokenizer import gguf_tokenizer
from modelpool.pool.models.text.sentencepiece_file import sentencepiece_tokenizer
from modelpool.pool.models.text.tekken_file import tekken_tokenizer
from modelpool.pool.models.text.text_tokenizer import TOKENIZER_FACTS, TextTokenizer, TokenizerMissing, byte_tokenizer
from modelpool.pool.models.text.tokenizer_errors import convert_errors
from modelpool.pool.models.text.word_patterns import QWEN_WORDS
from modelpool.pool.values.core.errors import CorruptFile, UnusableField, UserError

#: an encoder's table is slightly longer than its tokenizer's; a vocabulary below this fraction is another encoder's
MIN_VOCABULARY_SHARE = 0.5
#: names of byte tensors, and the file that their bytes are
TENSORS: Mapping[str, str] = {
    "tokenizer_json": "tokenizer.json", "spiece_model": "spiece.model", "tekken_model": "tekken.json",
}  # fmt: skip
#: test texts: words, and characters without a token in any vocabulary (private use, and NUL)
_PROBE_TEXTS = ("a red cat, 12 dogs", "\ue000", "a\U0010fffdb \ufdd0 \x00")


def find_tokenizer(
    kind: str,
    vocabulary: int,
    *,
    folder: Path | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    weights: Path | None = None,
) -> TextTokenizer:
    """Return the tokenizer of a text encoder of `kind` with `vocabulary` tokens in its embedding table.

    folder   location named by the user; no other place is searched then
    tensors  tensors of the weights file, without prefix: those in `TENSORS` may be it
    weights  the weights file, next to which it may be located (`folders_beside`)
    ByT5's needs no file.
    Raises TokenizerMissing with the places that were searched, and what to put where; CorruptFile for a damaged file in
    a folder named by the user.
    """
    if kind == "byt5":
        return TextTokenizer(byte_tokenizer(), kind, "bytes")
    passed: list[str] = []
    for source, read in _candidates(kind, folder, tensors or {}, weights):
        try:
            found = TextTokenizer(read(), kind, source)
            _check_reads_all(found)
        except UserError as error:
            if folder is not None and isinstance(error, CorruptFile):
                raise
            passed.append(str(error))
            continue
        if not MIN_VOCABULARY_SHARE * vocabulary <= found.size <= vocabulary:
            passed.append(f"{source}: found {found.size} tokens, expected about the encoder's {vocabulary}")
        elif found.last_id >= vocabulary:
            passed.append(f"{source}: found the token id {found.last_id}, expected ids below {vocabulary}")
        else:
            return found
    facts = TOKENIZER_FACTS[kind]
    if folder is None and weights is not None:
        folder = weights.parent
        where = f"into {folder / 'tokenizer'}, or next to the weights as {stem_of(weights)}.tokenizer.json"
    else:
        where = f"into {folder}" if folder is not None else "into a folder, and name the folder"
    reasons = "".join(f"; {reason}" for reason in passed)
    raise TokenizerMissing(f"tokenizer of {facts.title}: found none{reasons}. Put {facts.published} {where}")


def _check_reads_all(tokenizer: TextTokenizer) -> None:
    """Raise CorruptFile for a tokenizer that fails on characters without a token."""
    try:
        for text in _PROBE_TEXTS:
            tokenizer.encode(text)
    except UnusableField as error:
        raise CorruptFile(f"{tokenizer.source}: found a tokenizer that cannot read every text: {error}") from error


def folders_beside(weights: Path) -> tuple[Path, ...]:
    """Return folders in which the tokenizer of a weights file may be located, the most likely first.

    A folder named like the file; the folder that contains it, for a model folder; `tokenizer*` in that, and, for
    diffusers' `text_encoder_2/model.safetensors`, first `tokenizer_2` next to that folder, and last `processor`. For
    `vision_language_encoder`, `processor`. A `transformer` that reads tokens has `tokenizer` next to it.
    """
    here = weights.parent
    suffix = "" if here.name == "transformer" else here.name.removeprefix("text_encoder")
    if here.name == WRITER_FOLDER:
        return tuple(folder for folder in (here.parent / "processor", here) if folder.is_dir())
    near = [here / stem_of(weights), here, *sorted(here.glob("tokenizer*"))]
    if suffix != here.name:
        siblings = sorted(here.parent.glob("tokenizer*"))
        near = [here.parent / f"tokenizer{suffix}", *near, *siblings, here.parent / "processor"]
    return tuple(dict.fromkeys(folder for folder in near if folder.is_dir()))


def _candidates(
    kind: str, folder: Path | None, tensors: Mapping[str, Tensor], weights: Path | None
) -> Iterator[tuple[str, Callable[[], Tokenizer]]]:
    if folder is not None:
        yield from _in_folders((folder, *sorted(folder.glob("tokenizer*"))))
        return
    for name, file_name in TENSORS.items():
        if name in tensors:
            yield f"tensor {name!r}", partial(_of_tensor, file_name, tensors[name], name)
    if weights is not None:
        for file_name in _ALONE:
            path = weights.with_name(f"{stem_of(weights)}.{file_name}")
            if path.is_file():
                yield str(path), partial(_of_file, file_name, path)
        if weights.is_file() and has_gguf_start(str(weights)):
            inside = f"entries of {weights}"
            yield inside, partial(gguf_tokenizer, str(weights), kind, inside)
        yield from _in_folders(folders_beside(weights))


def _in_folders(folders: Iterable[Path]) -> Iterator[tuple[str, Callable[[], Tokenizer]]]:
    for folder in folders:
        for file_name in _ALONE:
            path = folder / file_name
            if path.is_file():
                yield str(path), partial(_of_file, file_name, path)
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            yield str(folder / "vocab.json"), partial(_byte_level, folder)
        if (folder / "vocab.txt").is_file():
            yield str(folder / "vocab.txt"), partial(_word_pieces, folder)


def _of_file(kind: str, path: Path) -> Tokenizer:
    return _of_bytes(kind, _read(path), str(path))


def _of_tensor(kind: str, tensor: Tensor, name: str) -> Tokenizer:
    return _of_bytes(kind, _bytes_of(tensor, name), f"tensor {name!r}")


#: single-file tokenizers, the most reliable first
_ALONE = ("tokenizer.json", "spiece.model", "tokenizer.model", "tekken.json")


def _of_bytes(file_name: str, data: bytes, source: str) -> Tokenizer:
    if file_name == "tekken.json":
        return tekken_tokenizer(data, source)
    if file_name.endswith(".model"):
        return sentencepiece_tokenizer(data, source)
    expected = "expected a tokenizer.json as tokenizers writes it"
    with convert_errors(lambda problem: CorruptFile(f"{source}: found no tokenizer, {expected}: {problem}")):
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _byte_level(folder: Path) -> Tokenizer:
    """Build Qwen's byte-level BPE from its two files; special tokens are in other files next to them."""
    source = str(folder / "vocab.json")
    with convert_errors(lambda problem: CorruptFile(f"{source}: found no vocabulary with merges: {problem}")):
        ids = {str(token): int(number) for token, number in _json(folder / "vocab.json").items()}
        lines = _read(folder / "merges.txt").decode("utf-8").splitlines()
        parts = (line.partition(" ") for line in lines if line and not line.startswith("#version"))
        pairs = [(first, second) for first, _, second in parts]
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
        tokenizer.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        added = _added_tokens(folder)
        tokenizer.add_special_tokens([AddedToken(added[number], normalized=False) for number in sorted(added)])
    for number, token in added.items():
        if (found := tokenizer.token_to_id(token)) != number:
            raise CorruptFile(
                f"{source}: token {token!r} gets the id {found}, expected {number} from the list of added tokens"
            )
    return tokenizer


def _added_tokens(folder: Path) -> dict[int, str]:
    """Return the added tokens by id, from the files that list them. Raises CorruptFile."""
    path = folder / "tokenizer_config.json"
    if path.is_file():
        listed = _json(path).get("added_tokens_decoder")
        if isinstance(listed, dict):
            with convert_errors(lambda problem: CorruptFile(f"{path}: found no list of added tokens: {problem}")):
                return {int(number): str(token["content"]) for number, token in listed.items()}
    added = folder / "added_tokens.json"
    if added.is_file():
        listed = _json(added)
        with convert_errors(lambda problem: CorruptFile(f"{added}: found no list of added tokens: {problem}")):
            return {int(number): str(token) for token, number in listed.items()}
    return {}


def _word_pieces(folder: Path) -> Tokenizer:
    """Build BERT's tokenizer from its vocabulary, one token per line."""
    source = folder / "vocab.txt"
    with convert_errors(lambda problem: CorruptFile(f"{source}: found no vocabulary of BERT: {problem}")):
        tokens = _read(source).decode("utf-8", "replace").splitlines()
        tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
        config = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=bool(config.get("do_lower_case", True)))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special if token in tokens])
    return tokenizer


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path))
    except (RecursionError, UnicodeDecodeError, ValueError) as error:
        raise CorruptFile(f"{path}: found no JSON, expected an object: {error}") from error
    if not isinstance(found, dict):
        raise CorruptFile(f"{path}: found {type(found).__name__}, expected a JSON object")
    return found


def _read(path: Path) -> bytes:
    return read_text_file(path, "a tokenizer")


def _bytes_of(tensor: Tensor, name: str) -> bytes:
    if tensor.dtype != torch.uint8 or tensor.numel() > MAX_TEXT_BYTES:
        raise CorruptFile(f"tensor {name!r}: found {tensor.numel()} of {tensor.dtype}, expected the bytes of a file")
    return tensor.detach().cpu().numpy().tobytes()
