"""Shape an answer's text while it grows: cut it at stop strings, leave white space around it out."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Cuts a growing text at the first stop string, also one that spans several pieces."""

    def __init__(self, stop: Sequence[str]) -> None:
        """Watch for any of `stop`."""
        self._stop = tuple(stop)
        self._held = ""
        self.hit = False

    def push(self, piece: str) -> str:
        """The text that can be shown now; what might be the start of a stop string is held back."""
        self._held += piece
        # The stop string that is complete first decides, as it would letter by letter.
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.hit = True
            shown, self._held = self._held[: min(found)[1]], ""
            return shown
        keep = max(
            (
                n
                for stop in self._stop
                for n in range(1, len(stop))
                if self._held.endswith(stop[:n])
            ),
            default=0,
        )
        shown, self._held = (
            self._held[: len(self._held) - keep],
            self._held[len(self._held) - keep :],
        )
        return shown

    def flush(self) -> str:
        """The rest, once no more text comes."""
        rest, self._held = self._held, ""
        return rest


class TrimmedText:
    """Leaves out the white space around a growing text; inside, it waits for what follows it."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._begun, self._space = False, ""

    def push(self, piece: str) -> str:
        """The text that can be shown now, perhaps none."""
        piece = self._space + piece if self._begun else piece.lstrip()
        shown = piece.rstrip()
        self._space = piece[len(shown) :]
        self._begun = self._begun or bool(shown)
        return shown
