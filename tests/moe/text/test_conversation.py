"""No message is lost: its text is in the prompt, or the request is refused by its position."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe.errors import RequestError
from moe.helpers import HelperLimitError
from moe.server.anthropic import MessagesRequest
from moe.server.openai.request import ChatRequest
from moe.server.responses import ResponsesRequest
from moe.text.conversation import render_whole
from tests.moe.text.tool_calls.test_calls import renderer
from tests.world.files import LLAMA_CPP

ANY_SYSTEM = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant', 'tool') %}"
    "[{{ m.role }}]{{ m.content }}\n{% endif %}{% endfor %}[assistant]"
)
ONLY_LEADING = (
    "{% if messages[0].role in ('system', 'developer') %}[rules]{{ messages[0].content }}\n"
    "{% endif %}{% for m in messages %}{% if m.role in ('user', 'assistant', 'tool') %}"
    "[{{ m.role }}]{{ m.content }}\n{% endif %}{% endfor %}[assistant]"
)
REFUSES_LATER = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('rules come first') }}"
    "{% elif m.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('who is ' + m.role) }}{% endif %}<{{ m.role }}> {{ m.content }}"
    "{% endfor %}<assistant>"
)
IN_TURNS = (
    "{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}({{ m.role }}: {{ m.content | trim }}){% endfor %}"
)
SYSTEM_WITH_THE_LAST = (
    "{% set rules = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{% if loop.last %}{{ rules }}\n\n{% endif %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
AS_JSON = "{{ messages | map(attribute='content') | list | tojson }} {{ messages[0].role }}:"
GATHERED = (
    "{% for m in messages if m.role == 'system' %}{{ m.content | trim }} {% endfor %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content | upper }}{% endfor %}"
)
TEMPLATES = {
    "any system": ANY_SYSTEM,
    "only leading": ONLY_LEADING,
    "refuses later": REFUSES_LATER,
    "in turns": IN_TURNS,
    "with the last": SYSTEM_WITH_THE_LAST,
    "as json": AS_JSON,
    "gathered": GATHERED,
}


def say(role: str, text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def calls(text: str = "") -> dict[str, Any]:
    function = {"name": "look", "arguments": {"at": 1}}
    return say("assistant", text, tool_calls=[{"id": "abcdefghi", "function": function}])


def told(text: str) -> dict[str, Any]:
    return say("tool", text, tool_call_id="abcdefghi", name="look")


HISTORIES = {
    "system": [say("system", "rule one"), say("user", "a question")],
    "developer": [say("developer", "rule one"), say("user", "a question")],
    "both": [say("system", "rule one"), say("developer", "rule two"), say("user", "a question")],
    "two": [say("system", "rule one"), say("system", "rule two"), say("user", "a question")],
    "later": [
        *(say("system", "rule one"), say("user", "a question"), say("assistant", "an answer")),
        *(say("system", "rule two"), say("user", "another one")),
    ],
    "only later": [say("user", "a question"), say("system", "rule one")],
    "alone": [say("system", "rule one")],
    "after results": [
        *(say("system", "rule one"), say("user", "a question"), calls(), told("the result")),
        say("developer", "rule two"),
    ],
    "among results": [
        *(say("user", "a question"), calls(), say("system", "rule one"), told("the result")),
    ],
}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("template", TEMPLATES)
def test_every_instruction_is_in_the_prompt(template: str, history: str) -> None:
    source, messages = TEMPLATES[template], HISTORIES[history]
    prompt = render_whole(renderer(source), messages, source)
    for message in messages:
        assert message["content"].casefold() in prompt.casefold()


def test_a_developer_is_the_system_where_the_template_does_not_know_the_role() -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = HISTORIES["developer"]
    assert render_whole(renderer(plain), messages, plain).startswith("<system>rule one")
    knows = plain + "{# developer #}"
    assert render_whole(renderer(knows), messages, knows).startswith("<developer>rule one")


def test_where_an_instruction_goes_that_the_template_does_not_take() -> None:
    later = HISTORIES["later"]
    refuses = render_whole(renderer(REFUSES_LATER), later, REFUSES_LATER)
    assert refuses == (
        "<system> rule one<user> a question<assistant> an answer<user> rule two\n\nanother one"
        "<assistant>"
    )
    turns = render_whole(renderer(IN_TURNS), HISTORIES["both"], IN_TURNS)
    assert turns == "(user: rule one\n\nrule two\n\na question)"


@pytest.mark.parametrize("role", ["narrator", "critic"])
@pytest.mark.parametrize("lead", [0, 1])
def test_what_no_template_takes_is_refused_by_its_position(role: str, lead: int) -> None:
    messages = [*HISTORIES["system"][:lead], say("user", "a question"), say(role, "an aside")]
    with pytest.raises(RequestError) as refused:
        render_whole(renderer(ANY_SYSTEM), messages, ANY_SYSTEM)
    assert str(refused.value) == (
        f"chat message {lead + 1} has role {role!r}, and the model's chat template leaves it out "
        "of the prompt; give it a role that the template writes there, or do not send it"
    )
    with pytest.raises(RequestError, match=f"who is {role}"):
        render_whole(renderer(REFUSES_LATER), messages, REFUSES_LATER)


@pytest.mark.parametrize("text", ["a question", "q", "[rules]", "assistant"])
def test_a_lost_text_is_not_found_in_anothers_place(text: str) -> None:
    messages = [say("user", "hello"), say("narrator", text), say("user", text), calls(text)]
    with pytest.raises(RequestError, match="message 1 has role 'narrator'"):
        render_whole(renderer(ONLY_LEADING), messages, ONLY_LEADING)


WRITES_OTHERWISE = {
    "trims": "{% for m in messages %}{{ m.content.strip() }};{% endfor %}",
    "joins lines": "{% for m in messages %}{{ m.content.split() | join(' ') }};{% endfor %}",
    "escapes": "{% for m in messages %}{{ m.content | tojson }};{% endfor %}",
    "escapes twice": "{% for m in messages %}{{ m.content | tojson | tojson }};{% endfor %}",
    "backwards": "{% for m in messages | reverse %}{{ m.content }};{% endfor %}",
    "capitals": "{% for m in messages %}{{ m.content | upper }};{% endfor %}",
    "without thoughts": (
        "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}{% endfor %}"
    ),
    "tool results as objects": (
        "{% for m in messages %}{% if m.role == 'tool' and m.content[0] != '{' %}"
        "{{ raise_exception('an object, please') }}{% endif %}{{ m.content }}{% endfor %}"
    ),
}
AWKWARD = [
    say("system", "  Be brief.\n\n\tAnd  kind. "),
    say("user", 'Is "this"\nwell-formed? <&> \u4f60'),
    say("assistant", "<think>Hm</think>\n Yes.", reasoning_content="Hm"),
    say("user", "   "),
    calls(),
    told('{"a": "b\\"",\n "c": [1]}'),
    say("assistant", ""),
    say("user", "a"),
]


@pytest.mark.parametrize("kind", WRITES_OTHERWISE)
def test_what_a_template_writes_in_its_own_way_is_not_lost(kind: str) -> None:
    source = WRITES_OTHERWISE[kind]
    render = renderer(source)
    assert render_whole(render, AWKWARD, source) == render(AWKWARD)


def test_images_have_no_text_and_all_texts_beside_them_count() -> None:
    parts = [{"type": "text", "text": "one word"}, {"type": "image"}]
    parts += [{"type": "text", "text": "two words"}]
    write = "{% for p in messages[1].content %}{{ p.text or '<image>' }}{% endfor %}"
    whole = "{{ messages[0].content }}" + write
    messages = [say("system", "rule one"), {"role": "user", "content": parts}]
    assert render_whole(renderer(whole), messages, whole) == "rule oneone word<image>two words"
    with pytest.raises(RequestError, match="message 0 has role 'system'"):
        render_whole(renderer(write), messages, write)


LOOKS_AT_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and strict %}"
    "{{ raise_exception('no') }}{% endif %}[call {{ m.tool_calls[0].function.name }}]"
    "{% elif m.role == 'assistant' and strict %}{{ raise_exception('no') }}"
    "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)


def test_text_beside_calls_is_an_answer_of_its_own_where_either_is_written() -> None:
    messages = [say("user", "a question"), calls("Let me see."), told("the result")]
    prompt = render_whole(renderer(LOOKS_AT_CALLS), messages, LOOKS_AT_CALLS)
    assert prompt == "[user]a question[assistant]Let me see.[call look][tool]the result"
    other = LOOKS_AT_CALLS.replace("m.content and strict", "false").replace("strict", "true")
    prompt = render_whole(renderer(other), messages, other)  # it takes no such answer
    assert prompt == "[user]a question[call look][tool]the result"


def counted(source: str) -> tuple[Callable[..., str], list[object]]:
    asked: list[object] = []
    render = renderer(source)

    def counting(messages: Any, **options: Any) -> str:
        asked.append(messages)
        return render(messages, **options)

    return counting, asked


def test_a_usual_conversation_is_rendered_once_and_any_other_a_few_times() -> None:
    turns = [say("user", "a longer question"), say("assistant", "a longer answer")] * 50
    messages = [say("system", "Be kind."), *turns, say("user", "and another question")]
    render, asked = counted(REFUSES_LATER)
    render_whole(render, messages, REFUSES_LATER)
    assert len(asked) == 1
    render_whole(render, [*messages, say("system", "rule two"), say("user", "a")], REFUSES_LATER)
    assert len(asked) == 1 + 2  # refused, then written
    render, asked = counted(ANY_SYSTEM)
    everything = [message for history in HISTORIES.values() for message in history]
    with pytest.raises(RequestError):
        render_whole(render, [*everything, say("narrator", "a word")], ANY_SYSTEM)
    assert len(asked) <= 12


def test_a_template_that_takes_too_long_is_not_asked_again() -> None:
    asked = []

    def render(*_: object, **__: object) -> str:
        asked.append(1)
        raise RequestError("late") from HelperLimitError()

    with pytest.raises(RequestError, match="late"):
        render_whole(render, HISTORIES["later"], "")
    assert len(asked) == 1


QUESTION, RULE, AGAIN, FOUND = "a question", "rule one", "rule two", "found it"
ANTHROPIC = {
    "model": "m",
    "max_tokens": 1,
    "system": RULE,
    "messages": [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": FOUND}],
        },
        {"role": "system", "content": AGAIN},
    ],
}
RESPONSES = {
    "instructions": RULE,
    "input": [
        {"role": "user", "content": QUESTION},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": FOUND},
        {"role": "developer", "content": AGAIN},
    ],
}
CHAT = {
    "messages": [
        *(say("developer", RULE), say("user", QUESTION)),
        say(
            "assistant",
            None,
            tool_calls=[{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
        ),
        *(say("tool", FOUND, tool_call_id="a"), say("system", AGAIN)),
    ]
}


@pytest.mark.parametrize("template", ["any system", "only leading", "refuses later", "in turns"])
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_instructions_arrive_by_all_three_apis(api: str, template: str) -> None:
    chat = {
        "chat": lambda: ChatRequest.model_validate(CHAT),
        "messages": lambda: MessagesRequest.model_validate(ANTHROPIC).chat,
        "responses": lambda: ResponsesRequest.model_validate(RESPONSES).chat,
    }[api]()
    (messages,) = chat.prompts
    source = TEMPLATES[template]
    prompt = render_whole(renderer(source), messages, source)  # type: ignore[arg-type]
    for text in (QUESTION, RULE, AGAIN, FOUND):
        assert text in prompt


TOOL = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": TOOL}}]


@pytest.mark.parametrize(
    "path", sorted(LLAMA_CPP.glob("models/templates/*.jinja")), ids=lambda path: path.stem
)
def test_templates_of_others_write_every_instruction_or_are_refused(path: Path) -> None:
    """A refusal is the template's own, of a conversation that it takes in no order."""
    source = path.read_text(encoding="utf-8")
    render = renderer(source)
    for name, messages in HISTORIES.items():
        tools = TOOLS if "result" in name else None
        try:
            prompt = render_whole(render, messages, source, tools=tools, add_generation_prompt=True)
        except RequestError as error:
            refused = str(error)
        else:
            refused = ""
            for message in messages:
                assert message["content"] in prompt
        if refused and not re.search(r"message \d+ has role 'tool'", refused):
            assert _takes_none(render, name), refused


def _takes_none(render: Callable[..., str], name: str) -> bool:
    """Whether a template takes no conversation, or no tools."""
    tools = TOOLS if "result" in name else None
    turns = (
        [say("user", "a question"), calls(), told("the result")] if tools else [say("user", "a")]
    )
    try:
        render(turns, tools=tools, add_generation_prompt=True)
    except RequestError:
        return True
    return False


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([say("user", "One."), say("user", "Two.")], "(user: One.\n\nTwo.)"),
        (
            [
                say("user", "One."),
                say("assistant", "Yes."),
                say("assistant", "No."),
                say("user", "?"),
            ],
            "(user: One.)(assistant: Yes.\n\nNo.)(user: ?)",
        ),
        (
            [say("system", "Be kind."), say("user", "One."), say("user", "Two.")],
            "(user: Be kind.\n\nOne.\n\nTwo.)",
        ),
        ([say("user", "One."), say("user", "Two.", name="b")], None),
        ([say("assistant", "Yes."), say("user", "One.")], None),
    ],
)
def test_neighbours_are_joined_where_turns_alternate(messages: Any, prompt: str | None) -> None:
    """As Mixtral's template wants it, and Anthropic's API does."""
    if prompt is None:
        with pytest.raises(RequestError, match="take turns"):
            render_whole(renderer(IN_TURNS), messages, IN_TURNS)
    else:
        assert render_whole(renderer(IN_TURNS), messages, IN_TURNS) == prompt
