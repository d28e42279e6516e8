from __future__ import annotations

import itertools
import json
import shutil
import struct
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import gguf_model, modelfiles
from runtime.errors import InvalidRequest, NotFound, PdserveError, Unsupported
from runtime.gguf_header import read_header
from runtime.modelfiles import SHIPPED, ModelFiles

TEXTS = [
    "The capital of France is Paris.",
    "1234567890 3.14159 2026-01-31 x2y3 ½ ² ٣",
    "a  1   22\t\t333\n\n4444 ",
    "it's we'll I'D they'Ve don't",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 \u200b zero width, é vs e\u0301",
    "def f(x):\n    return x ** 2  # comment\r\n\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "日本語のテキスト и русский עברית",
    "<|im_start |> <im_end> <|endoftext|><repo_name>x",
    "\x00\x01\x7f\u2028",
    "",
    " ",
    "\n",
    "word " * 300,
]


opened = cache(ModelFiles.open)


@pytest.fixture(scope="module")
def smollm2() -> ModelFiles:
    return opened("smollm2")


@pytest.fixture(scope="module")
def reference(smollm2: ModelFiles) -> Any:
    """transformers' tokenizer of the same GGUF. It does not know this file's pre-tokenizer ("smollm") and leaves out
    its splitting of digits, so that step, as the model's own tokenizer.json has it, is put in front."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(smollm2.path.parent), gguf_file=smollm2.path.name)
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_the_gguf_tokenizer_gives_the_reference_tokens(smollm2: ModelFiles, reference: Any, text: str) -> None:
    ids = smollm2.encode(text, allow_special=True)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert smollm2.tokenizer().decode(ids, skip_special_tokens=False) == text


def test_other_threads_run_while_a_long_text_is_encoded(smollm2: ModelFiles) -> None:
    text = "".join(chr(0x80 + i * 7919 % 0x2F00) for i in range(100_000))
    smollm2.encode("warm", allow_special=False)
    over = threading.Event()
    ticks: list[float] = []

    def tick() -> None:
        while not over.wait(0.001):
            ticks.append(time.perf_counter())

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.perf_counter()
    smollm2.encode(text, allow_special=False)
    ended = time.perf_counter()
    over.set()
    ticking.join()
    inside = [began, *(t for t in ticks if began < t < ended), ended]
    assert max(b - a for a, b in itertools.pairwise(inside)) < (ended - began) / 2


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=60))
def test_the_gguf_tokenizer_gives_the_reference_tokens_for_any_text(
    smollm2: ModelFiles, reference: Any, text: str
) -> None:
    assert smollm2.encode(text, allow_special=True) == reference.encode(text, add_special_tokens=False)


def test_digits_stand_alone(smollm2: ModelFiles) -> None:
    pieces = [smollm2.tokenizer().decode([token]) for token in smollm2.encode("a  12", allow_special=True)]
    assert pieces == ["a", "  ", "1", "2"]


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("text", TEXTS)
def test_special_tokens_in_a_users_text_are_plain_text(name: str, text: str) -> None:
    files = opened(name)
    tokenizer = files.tokenizer()
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = files.encode(text, allow_special=False)
    assert not special & set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    if not any(token.content in text for token in tokenizer.get_added_tokens_decoder().values()):
        assert ids == files.encode(text, allow_special=True)


def test_a_template_s_special_tokens_are_tokens(smollm2: ModelFiles) -> None:
    assert smollm2.encode("<|im_start|><|im_end|>", allow_special=True) == [1, 2]


@pytest.mark.parametrize(
    ("name", "kind", "vocab", "length", "eos"),
    [
        ("smollm2", "gguf", 49152, 8192, (2,)),
        ("tiny-kimi", "hf", 516, 4096, (2,)),
        ("oracle", "oracle", 259, 8192, (258,)),
    ],
)
def test_the_shipped_models_open(name: str, kind: str, vocab: int, length: int, eos: tuple[int, ...]) -> None:
    files = ModelFiles.open(name)
    assert (files.name, files.kind, files.vocab_size, files.max_model_len) == (name, kind, vocab, length)
    assert files.eos_token_ids == eos
    assert files.chat_template is not None
    assert files.special_tokens["eos_token"] == "<|im_end|>"
    assert files.tokenizer().get_vocab_size() <= vocab


def test_the_gguf_config_has_hugging_face_s_names(smollm2: ModelFiles) -> None:
    expected = {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 1e5, "tie_word_embeddings": True, "attention_bias": False, "max_position_embeddings": 8192,
    }  # fmt: skip
    assert {key: smollm2.config[key] for key in expected} == expected


def test_oracle_tokens_are_the_bytes_of_the_text() -> None:
    files = ModelFiles.open("oracle")
    assert files.encode("añ 🦊\x00", allow_special=False) == list("añ 🦊\x00".encode())


_DIGESTS = """
import sys
from runtime.modelfiles import ModelFiles
for name in ("smollm2", "tiny-kimi", "oracle"):
    files = ModelFiles.open(name)
    files.encode("x", allow_special=False)
    print(files.tokenizer_digest, files.fingerprint())
assert not {"torch", "transformers", "gguf"} & set(sys.modules)
"""


def test_digests_agree_between_processes_that_import_neither_torch_nor_transformers() -> None:
    runs = [
        subprocess.run([sys.executable, "-c", _DIGESTS], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    here = [ModelFiles.open(name) for name in SHIPPED]
    assert runs[0] == runs[1] == "".join(f"{f.tokenizer_digest} {f.fingerprint()}\n" for f in here)
    assert len({f.fingerprint() for f in here}) == len({f.tokenizer_digest for f in here}) == 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of tiny-kimi that a test may change."""
    target = tmp_path / "copy"
    shutil.copytree(ModelFiles.open("tiny-kimi").path, target)
    return target


def test_a_copied_folder_has_the_same_revision_and_its_own_name(folder: Path) -> None:
    copy, original = ModelFiles.open(str(folder)), ModelFiles.open("tiny-kimi")
    assert (copy.name, copy.fingerprint()) == ("copy", original.fingerprint())
    assert copy.tokenizer_digest == original.tokenizer_digest


@pytest.mark.parametrize("change", ["config.json", "tokenizer.json", "weights", "header"])
def test_a_change_of_config_tokenizer_or_weights_is_another_revision(folder: Path, change: str) -> None:
    before = ModelFiles.open("tiny-kimi").fingerprint()
    if change in ("weights", "header"):
        file = folder / "model.safetensors"
        data = bytearray(file.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        data[8 + length if change == "weights" else 8 + length // 2] ^= 1
        file.write_bytes(bytes(data))
    else:
        file = folder / change
        file.write_text(file.read_text() + "\n")
    assert ModelFiles.open(str(folder)).fingerprint() != before


def test_the_template_may_stand_in_the_tokenizer_config(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    assert ModelFiles.open(str(folder)).chat_template is None
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for value in ("T", [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]):
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": value}))
        assert ModelFiles.open(str(folder)).chat_template == "T"


def test_several_end_tokens_are_joined(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 0], "temperature": 0.5}')
    files = ModelFiles.open(str(folder))
    assert files.eos_token_ids == (0, 1, 2)  # 2: the tokenizer's own
    assert files.generation_config["temperature"] == 0.5


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.json", "{"), ("config.json", "[]"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "\x00"),
     ("config.json", None), ("tokenizer.json", None)],
)  # fmt: skip
def test_a_broken_folder_is_refused_naming_the_model(folder: Path, name: str, content: str | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(InvalidRequest) as caught:
        ModelFiles.open(str(folder)).tokenizer()
    assert caught.value.field == "model"
    assert str(folder) not in caught.value.message


@pytest.mark.parametrize("content", [b"{}", b"[]", b"{", b'{"model": {"type": "BPE", "vocab": {"a": -1}}}'])
def test_what_the_library_finds_wrong_in_a_tokenizer_is_a_broken_model(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        ModelFiles.open(str(folder)).tokenizer()


def test_a_tokenizer_that_is_no_text_cannot_be_read(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        ModelFiles.open(str(folder)).tokenizer()


def test_a_fault_that_is_not_the_tokenizers_is_not_taken_for_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: str) -> None:
        raise MemoryError

    monkeypatch.setattr(modelfiles, "Tokenizer", SimpleNamespace(from_str=broken))
    with pytest.raises(MemoryError):
        ModelFiles.open(str(folder)).tokenizer()


@pytest.mark.parametrize("name", ["", "no-such-model", "gpt-4"])
def test_an_unknown_model_is_not_found(name: str) -> None:
    with pytest.raises((NotFound, InvalidRequest)) as caught:
        ModelFiles.open(name or "./nothing/here")
    assert caught.value.field == "model"


def test_the_header_reader_agrees_with_the_gguf_package(smollm2: ModelFiles) -> None:
    header, full = read_header(smollm2.path), GGUFReader(smollm2.path)
    theirs = {key: item.contents() for key, item in full.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    assert [(t.name, t.shape) for t in header.tensors] == [(t.name, tuple(t.shape.tolist())) for t in full.tensors]
    assert 0 <= full.data_offset - header.length < 32


@pytest.mark.parametrize("size", [0, 3, 4, 20, 1000, 100_000])
def test_a_truncated_gguf_is_refused(smollm2: ModelFiles, tmp_path: Path, size: int) -> None:
    file = tmp_path / "cut.gguf"
    with smollm2.path.open("rb") as whole:
        file.write_bytes(whole.read(size))
    with pytest.raises(InvalidRequest):
        ModelFiles.open(str(file))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_no_bytes_crash_the_header_reader(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    for version in (2, 3):
        file.write_bytes(b"GGUF" + struct.pack("<I", version) + data)
        try:
            read_header(file)
        except PdserveError as exc:
            assert exc.field == "model"  # noqa: PT017  an accepted header is fine too


def write_gguf(path: Path, arch: str, pre: str, **extra: bool | float) -> Path:
    """A tiny GGUF with a byte vocabulary, one merge and two special tokens."""
    from runtime.byte_tokenizer import _byte_spellings

    writer = GGUFWriter(path, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-6)
    spellings = sorted(_byte_spellings(), key=_byte_spellings().__getitem__)
    tokens = [*spellings, "ab", "<s>", "</s>", "<think>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3, 3, 4])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    for key, value in extra.items():
        name = key.replace("__", ".")
        writer.add_bool(name, value) if isinstance(value, bool) else writer.add_float32(name, value)
    writer.add_tensor("blk.0.attn_q.bias", np.zeros(8, np.float32))
    writer.add_tensor("output.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_other_architectures_map_too(tmp_path: Path, arch: str) -> None:
    files = ModelFiles.open(str(write_gguf(tmp_path / "m.gguf", arch, "qwen2")))
    assert files.config["model_type"] == arch
    assert files.config["attention_bias"]
    assert not files.config["tie_word_embeddings"]
    assert (files.config["head_dim"], files.config["rope_theta"]) == (4, 10000.0)
    assert (files.name, files.vocab_size, files.eos_token_ids) == ("m", 260, (258,))


def test_the_bos_flag_is_honoured_and_user_defined_tokens_stay_whole(tmp_path: Path) -> None:
    plain = ModelFiles.open(str(write_gguf(tmp_path / "a.gguf", "llama", "llama-bpe")))
    marked = ModelFiles.open(
        str(write_gguf(tmp_path / "b.gguf", "llama", "llama-bpe", tokenizer__ggml__add_bos_token=True))
    )
    assert plain.encode("ab", allow_special=False, add_special_tokens=True) == [256]
    assert marked.encode("ab", allow_special=False, add_special_tokens=True) == [257, 256]
    assert marked.encode("ab", allow_special=False) == [256]
    assert marked.encode("<think>", allow_special=False) == [259]
    assert marked.encode("<s>", allow_special=False) == list(b"<s>")


@pytest.mark.parametrize(("arch", "pre"), [("gemma3", "default"), ("llama", "who-knows")])
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, arch: str, pre: str) -> None:
    with pytest.raises(Unsupported) as caught:
        ModelFiles.open(str(write_gguf(tmp_path / "m.gguf", arch, pre))).tokenizer()
    assert (arch if arch != "llama" else pre) in caught.value.message


def test_rope_scaling_is_taken_over() -> None:
    meta = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    assert gguf_model._rope_scaling(meta, "llama") == {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(Unsupported):
        gguf_model._rope_scaling({"llama.rope.scaling.type": "longrope"}, "llama")
