"""The README's code blocks, by the words after their fence: `sh`, `python`, `sh up` ..."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
_FENCE = re.compile(r"^```(?P<info>.*?)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """Every fenced block as (info, text), in order."""
    found = [(match["info"].strip(), match["text"]) for match in _FENCE.finditer(README.read_text(encoding="utf-8"))]
    assert found, "the README has no code"
    return found


def block(info: str) -> str:
    """The one block with that info string."""
    (text,) = [text for found, text in blocks() if found == info]
    return text
