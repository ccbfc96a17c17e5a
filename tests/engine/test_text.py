from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coinrag_integrations.engine.text import TrimmedText

PIECES = st.lists(st.text(alphabet=" \n\tab", max_size=4), max_size=8)


@given(PIECES)
def test_trimmed_pieces_joined_are_the_stripped_text(pieces: list[str]):
    trimmed = TrimmedText()
    shown = [trimmed.push(piece) for piece in pieces]
    assert "".join(shown) == "".join(pieces).strip()


def test_white_space_inside_waits_for_what_follows_it():
    trimmed = TrimmedText()
    assert [trimmed.push(p) for p in (" ", "\n a", " ", " b ", "c", "\n")] == [
        "",
        "a",
        "",
        "  b",
        " c",
        "",
    ]
