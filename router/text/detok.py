"""Tokens to text, a piece at a time, without broken characters.

A character may be spread over several tokens, and a decoder may change its mind about the tail of a text when more
comes. So only text that cannot change is given out: everything before a trailing run of U+FFFD, and nothing that was
given out is taken back or repeated. Joined pieces are the text; flush() ends it once.

Decoding looks at a window of tokens that starts where the text was last whole, so the cost of a token does not grow
with the length of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

BROKEN = "\ufffd"
WINDOW = 12
CONTEXT = 6
TOGETHER = 32
"""So many tokens at once are decoded once, if their text is whole at the end."""

MAX_BROKEN = 32
"""Tokens that may go by without a whole text. A character has at most 4 bytes, so this is noise and is let go."""

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Incremental decoding of one choice. `decode` maps token ids to text; `context` are tokens that came before (the
    prompt's tail), which decide, for instance, whether the first word keeps its leading space."""

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window: list[int] = list(context[-CONTEXT:])
        self._given = decode(self._window) if self._window else ""
        if not self._given or self._given.endswith(BROKEN):
            self._window, self._given = [], ""
        self._whole = len(self._window)  # tokens of the window when its text was last whole
        self._next_start = 0  # where the window may be cut: whole text on both sides

    def push(self, tokens: Sequence[int]) -> str:
        """The text these tokens add, "" while it is not certain."""
        if len(tokens) == 1:
            return self._push(tokens[0])
        if len(tokens) <= TOGETHER:
            text = self._decode(self._window + list(tokens))
            if text.startswith(self._given) and not text.endswith(BROKEN):
                self._window += tokens
                piece = self._give(text)
                self._advance()
                return piece
        return "".join([self._push(token) for token in tokens])  # singly: a text is whole only at some of them

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        sure = text.rstrip(BROKEN)
        piece = self._give(sure)
        if len(sure) == len(text):
            self._advance()
        elif len(self._window) - self._whole > MAX_BROKEN:  # not a character in the making: the model writes garbage
            piece += self.flush()
        return piece

    def flush(self) -> str:
        """The end: what was held back, with U+FFFD where the last character never became whole."""
        if self._whole == len(self._window):  # nothing is held back: its text is out
            text = self._given
        else:
            text = self._decode(self._window)
        if text.startswith(self._given):
            piece = text[len(self._given) :]
        else:  # the decoder turned a run of bytes into U+FFFD that was whole before
            piece = BROKEN if text.endswith(BROKEN) else ""
        self._window, self._given, self._whole, self._next_start = [], "", 0, 0
        return piece

    def _give(self, text: str) -> str:
        if len(text) <= len(self._given) or not text.startswith(self._given):
            return ""
        piece = text[len(self._given) :]
        self._given = text
        return piece

    def _advance(self) -> None:
        """The text is whole here: remember the place, and cut the window at an earlier such place when it is long."""
        if len(self._window) >= WINDOW and self._next_start:
            rest = self._window[self._next_start :]
            given = self._decode(rest)
            # The cut must not lose what the tail looks like (an all-special context decodes to nothing).
            if given and self._given.endswith(given.lstrip()) and not given.startswith(BROKEN):
                self._window, self._given = rest, given
                self._whole, self._next_start = len(rest), 0
                return
        if len(self._window) - self._next_start > WINDOW // 2:
            self._next_start = self._whole
        self._whole = len(self._window)
