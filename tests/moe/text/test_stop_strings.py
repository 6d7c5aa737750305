"""Stop strings against a search in the whole text."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from moe.text.detokenize import StopStrings


def first_match(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Text before the match that ends first (the longest of those), and the match."""
    for end in range(1, len(text) + 1):
        matches = [string for string in stop if text[:end].endswith(string)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@example(["a", "ab"], ["aab", "ab"])
@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=6), max_size=3),
)
def test_stop_strings_are_those_of_a_search_in_the_whole(
    pieces: list[str], stop: list[str]
) -> None:
    expected, match = first_match("".join(pieces), stop)
    stop_strings, text = StopStrings(stop), ""
    for piece in pieces:
        text += stop_strings.push(piece)
        assert expected.startswith(text)
        if stop_strings.matched is not None:
            break
    assert text + stop_strings.finish() == expected
    assert stop_strings.matched == match


def test_only_what_could_begin_a_stop_string_is_held_back() -> None:
    stop_strings = StopStrings(["</end>", "\n\nUser:"])
    assert [
        stop_strings.push(piece) for piece in ("x <", "/b> y\n", "\nUs", "e r", "\n\nUser: z")
    ] == [
        "x ",
        "</b> y",
        "",
        "\n\nUse r",
        "",
    ]
    assert stop_strings.matched == "\n\nUser:"
    assert stop_strings.finish() == ""


def test_without_stop_strings_text_passes_through() -> None:
    stop_strings = StopStrings([])
    assert stop_strings.push("abc") == "abc"
    assert stop_strings.finish() == ""
