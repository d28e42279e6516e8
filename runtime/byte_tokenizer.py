"""The oracle model's tokenizer: token ids 0-255 are the bytes of UTF-8, then three special tokens. No files."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
MAX_MODEL_LEN = 8192
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config() -> dict[str, Any]:
    return {
        "model_type": "oracle",
        "architectures": ["Oracle"],
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_MODEL_LEN,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": TURN_END,
    }


def tokenizer() -> Tokenizer:
    made = Tokenizer(BPE(vocab=_byte_spellings(), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return made


def _byte_spellings() -> dict[str, int]:
    """GPT-2's printable character of each byte -> the byte: printable bytes stand for themselves, the others follow
    from U+0100 on in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
