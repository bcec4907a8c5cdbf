"""Breaks streamed text between words at the edge of a terminal, which by itself breaks within them."""

import re

from rich.cells import cell_len

# A word with the white space before it, which is complete only once something follows.
_PIECE = re.compile(r"\n|[^\S\n]*[^\s]+|[^\S\n]+")


class WordWrapper:
    """Wraps one text that comes in parts.

    Args:
        width: columns of the terminal.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._held = ""

    def add(self, text: str) -> str:
        """Takes more text.

        Args:
            text: continues what was added before.

        Returns:
            What can be printed now. The last word is held back: it may not be complete.
        """
        pieces = _PIECE.findall(self._held + text)
        self._held = pieces.pop() if pieces and pieces[-1] != "\n" else ""
        return "".join(self._place(piece) for piece in pieces)

    def finish(self) -> str:
        """Returns what was held back."""
        held, self._held = self._held, ""
        return self._place(held)

    def _place(self, piece: str) -> str:
        if piece == "\n":
            self._column = 0
            return piece
        word = piece.lstrip()
        if word and self._column and self._column + cell_len(piece) > self._width:
            self._column = cell_len(word)
            return "\n" + word
        self._column += cell_len(piece)
        return piece
