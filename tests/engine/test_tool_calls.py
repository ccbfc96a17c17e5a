"""Calls read out of answers: whatever models write, as a whole and as it grows."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coinrag_integrations.engine import CallReader, Parsed, ToolCall, parse_calls
from coinrag_integrations.engine.handles import strip_handles
from coinrag_integrations.engine.tool_calls import InvalidCall, tool_names, write_call, write_tools
from coinrag_integrations.errors import ConfigError

NAMES = ("search", "add")
CALL = ToolCall(name="search", arguments={"query": "Who?"})
WRITTEN = '<tool_call>\n{"name": "search", "arguments": {"query": "Who?"}}\n</tool_call>'
AS_JSON = '{"name": "search", "parameters": {"query": "Who?"}}'

# Handles are left out of calls: see below.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).map(strip_handles)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Tags inside strings end nothing.
    | texts
    | st.sampled_from(["</tool_call>", "<tool_call>", '"}}', "\\", "{x}", "%s", "<|im_end|>"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(
    ToolCall,
    name=st.sampled_from(NAMES) | texts.filter(str.strip),
    arguments=st.dictionaries(texts, values, max_size=3),
)
# What models could write, whole and in halves.
scraps = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "<tool", "_call>", "\n", " ", "{", "}", "[", "]", "<"),
            *('{"name": "search", "arguments": ', '{"query": "Who?"}', AS_JSON, WRITTEN, ", ", '"'),
            *("I look. ", "\\ud800", "NaN", "1e999", "[" * 200, '{"name": "add"}'),
        ]
    )
    | st.text(max_size=4),
    max_size=8,
).map("".join)


@given(st.lists(calls, min_size=1, max_size=3), st.sampled_from(["", "I look.", "{x} <tool 50%"]))
def test_what_is_written_is_read(made, words):
    """Law: an answer of words and calls is these words and these calls."""
    text = "\n".join([words, *map(write_call, made)]).lstrip()
    assert parse_calls(text, NAMES) == Parsed(text=words, calls=tuple(made))


@given(st.text() | scraps)
@example("[" * 100_000)
@example('<tool_call>{"name": "search", "arguments": ' + '{"a":' * 100_000)
@example('<tool_call>{"name": "search", "arguments": {"n": ' + "1" * 5000 + "}}")
def test_no_answer_raises(text):
    """Law: every text is taken apart, into what can be written down again and sent."""
    found = parse_calls(text, NAMES)
    for call in found.calls:
        json.dumps(dict(call.arguments), allow_nan=False, ensure_ascii=False).encode()
        call.name.encode()
    for invalid in found.invalid:
        assert invalid.text.startswith("<tool_call>")
        assert invalid.error


@given(scraps, st.data())
def test_a_growing_answer_is_read_as_a_whole_one(text, data):
    """Law: however an answer is cut, what was shown and the rest are its text, and the calls the same."""
    reader, shown, at = CallReader(NAMES), "", 0
    while at < len(text):
        step = data.draw(st.integers(1, 6))
        shown += reader.push(text[at : at + step])
        at += step
    rest, parsed = reader.end()
    assert (shown + rest, parsed) == (parsed.text, parse_calls(text, NAMES))


def test_words_are_shown_as_they_come_and_calls_are_not():
    reader = CallReader(NAMES)
    pieces = [
        "I ",
        "look <",
        "b> ",
        "<tool",
        "_ca",
        "ll>\n{",
        '"name": "add"}',
        "\n</tool_call> Done.",
    ]
    shown = [reader.push(piece) for piece in pieces]
    assert shown == ["I", " look", " <b>", "", "", "", "", ""]
    rest, parsed = reader.end()
    assert rest == "  Done."
    assert parsed.calls == (ToolCall(name="add", arguments={}),)


@pytest.mark.parametrize("begin", ["{", "[", " {"])
def test_what_may_be_a_call_as_a_whole_is_held_back(begin):
    reader = CallReader(NAMES)
    assert reader.push(begin) + reader.push("no call at all") == ""
    assert reader.end()[0] == f"{begin}no call at all".strip()


def test_without_tools_everything_is_text():
    reader = CallReader(())
    assert reader.push(f" {WRITTEN}") == f" {WRITTEN}"
    assert reader.end() == ("", Parsed(text=f" {WRITTEN}"))
    assert parse_calls(AS_JSON, ()) == Parsed(text=AS_JSON)


@pytest.mark.parametrize(
    "text",
    [
        WRITTEN,
        WRITTEN.removesuffix("\n</tool_call>"),
        WRITTEN.replace("arguments", "parameters"),
        WRITTEN.replace('{"query": "Who?"}', json.dumps('{"query": "Who?"}')),
        "  " + WRITTEN.replace("\n", "") + "\n",
        AS_JSON,
        f"\n[{AS_JSON}]\n",
    ],
)
def test_a_call_may_look_like(text):
    assert parse_calls(text, NAMES) == Parsed(text="", calls=(CALL,))


@pytest.mark.parametrize("text", [WRITTEN * 2, f"{AS_JSON}\n{AS_JSON}", f"[{AS_JSON}, {AS_JSON}]"])
def test_there_may_be_several(text):
    assert parse_calls(text, NAMES) == Parsed(text="", calls=(CALL, CALL))
    unclosed = WRITTEN.replace("\n</tool_call>", "")
    assert parse_calls(f"a {unclosed}{WRITTEN} b", NAMES) == Parsed(text="a  b", calls=(CALL, CALL))


def test_a_broken_line_in_a_string_is_read():
    text = WRITTEN.replace("Who?", "Who\nand when?")
    assert parse_calls(text, NAMES).calls[0].arguments == {"query": "Who\nand when?"}


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "other", "arguments": {}}',
        '{"name": "search"}',
        '{"name": "search", "arguments": "Who?"}',
        f"{AS_JSON} is how I would call it",
        f"[{AS_JSON}, 1]",
        '{"query": "Who?"}',
        "{x}",
        "I would call search.",
    ],
)
def test_json_that_is_no_call_of_a_tool_is_text(text):
    assert parse_calls(text, NAMES) == Parsed(text=text)


@pytest.mark.parametrize(
    ("inner", "name", "error"),
    [
        ('{"name": "search", "arguments": {', "", "Expecting"),
        ('{"name": "search", "arguments": [1]}', "search", "no JSON object"),
        ('{"name": "search", "arguments": "Who?"}', "search", "Expecting value"),
        ('{"name": "search", "arguments": {"a": NaN}}', "search", "too large or none"),
        (f'{{"name": "search", "arguments": {{"a": {2**63}}}}}', "search", "too large or none"),
        ('{"name": "search", "arguments": {"a": "\\ud800"}}', "search", "half a character"),
        (
            f'{{"name": "search", "arguments": {{"a": {"[" * 99}{"]" * 99}}}}}',
            "search",
            "too deeply",
        ),
        ('{"name": "\\ud800", "arguments": {}}', "", "half a character"),
        ('{"arguments": {}}', "", "does not name a tool"),
        ('{"name": "search", "arguments": {}} or so', "search", "more text"),
        ('["search"]', "", "a call is a JSON object"),
        ("search(query)", "", "Expecting value"),
    ],
)
def test_what_was_meant_as_a_call_is_an_invalid_one(inner, name, error):
    text = f"<tool_call>{inner}</tool_call>"
    found = parse_calls(f"I look. {text} {WRITTEN} Done.", NAMES)
    (invalid,) = found.invalid
    assert (invalid.text, invalid.name) == (text, name)
    assert error in invalid.error
    assert (found.text, found.calls) == ("I look.   Done.", (CALL,))


def test_a_call_that_was_cut_off_is_invalid():
    text = '<tool_call>\n{"name": "search", "arguments": {"query": "Wh'
    (invalid,) = parse_calls(text, NAMES).invalid
    assert isinstance(invalid, InvalidCall)
    assert invalid.text == text


def test_a_tool_that_was_not_offered_may_be_called_between_tags():
    """Agents tell the model that it does not exist."""
    found = parse_calls(WRITTEN.replace("search", "fly"), NAMES)
    assert found.calls[0].name == "fly"


# -- tools -----------------------------------------------------------------------------------------


def tool(name: object, **more: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name, **more}}


def test_tools_have_names_of_their_own():
    assert tool_names([tool("a"), tool("b")]) == ("a", "b")
    assert tool_names([]) == ()
    with pytest.raises(ConfigError, match="several tools of the name a, so that"):
        tool_names([tool("a"), tool("b"), tool("a")])
    for odd in (tool(""), tool(None), {"type": "web_search"}, {"function": "search"}):
        with pytest.raises(ConfigError, match="no tool that a local model can call"):
            tool_names([odd])


def test_tools_are_written_as_they_are():
    odd = tool("a", description='{x} %s "q" é {{y}}', parameters={"n": (1, None, object)})
    (line,) = [it for it in write_tools([odd]).splitlines() if it.startswith('{"type"')]
    assert json.loads(line)["function"]["description"] == '{x} %s "q" é {{y}}'
    assert json.loads(line)["function"]["parameters"] == {"n": [1, None, "<class 'object'>"]}


def test_handles_in_calls_and_tools_are_left_out():
    marked = "⟦k:" + "a" * 24 + "⟧words⟦/k⟧"
    call = ToolCall(name="search", arguments={marked: [marked]})
    assert parse_calls(write_call(call), NAMES).calls[0].arguments == {"words": ["words"]}
    assert "⟦" not in write_tools([tool("a", description=marked)])
