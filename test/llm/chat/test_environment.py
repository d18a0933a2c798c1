"""Templates render what transformers renders, faster."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.chat_families import (
    FAMILIES,
    family_tokenizer,
    render_as_transformers,
)

from torchrl_sglang.chat.declarations import Declaration, known_settings
from torchrl_sglang.chat.environment import quick_template
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": 'Über <"a" & b>',
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "look", "arguments": {"text": "\u4f60", "items": [1, None]}},
}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "4 < 5", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nFour {x}"},
    {"role": "user", "content": "And?"},
]
# Attributes that the sandbox looks at, or that dictionaries have, too.
SOURCES = (
    "{{ messages[0].items }}|{{ messages[0].content.upper() }}|{{ messages[9] }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ messages[0].__class__ }}|{{ messages.append }}|{{ messages[0]['x'] }}",
    "{{ messages[0].pop('role') }}",
    "{% set ns = namespace(f='{}'.format) %}{{ ns.f(messages) }}{{ ns.g }}",
    "{% for m in messages %}{{ loop.index }}{{ loop.previtem.role }}{% endfor %}",
    "{{ messages[0].no }}|{{ messages[0].no.no }}",
    "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop._length }}{% endfor %}",
    "{{ tools[0].text }}|{{ tools[0].function | tojson(indent=2) }}",
    "{{ tools | tojson }}{{ tools[0] | tojson }}",
    "{{ tools[0] | tojson(separators=(',', ':')) }}{{ tools[0].function.items() }}",
)


def outcomes(template: ChatTemplate, messages: Any, setting: Any) -> list[str]:
    """Returns what our way and transformers' render, or their errors."""
    found = []
    plain = PromptSettings(tools=setting.tools, template_kwargs=setting.template_kwargs)
    for render in (template.render, own_way(template)):
        for each in (plain, known_settings(plain), known_settings(plain)):
            try:
                found.append(render(messages, each))
            except Exception as error:
                found.append(str(error).rpartition("Error: ")[2])
    return found


def own_way(template: ChatTemplate) -> Any:
    def render(messages: Any, setting: PromptSettings) -> str:
        return render_as_transformers(
            template.tokenizer,
            [template.call_form.write(each) for each in messages],
            list(setting.tools) or None,
            template.source,
            **setting.template_kwargs,
        )

    return render


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_families_are_rendered_as_by_transformers(name: str, variables: Any) -> None:
    template = ChatTemplate(family_tokenizer(name))
    assert quick_template(template.tokenizer, template.source) is not None
    for tools in ((), (TOOL,)):
        setting = PromptSettings(tools=tools, template_kwargs=variables)
        for count in range(1, len(TALK) + 1):
            assert len(set(outcomes(template, TALK[:count], setting))) == 1


@pytest.mark.parametrize("source", SOURCES)
def test_the_sandbox_holds(source: str) -> None:
    template = ChatTemplate(family_tokenizer("qwen2.5"), source)
    found = outcomes(template, TALK, PromptSettings(tools=[TOOL]))
    assert len({each.partition(" at 0x")[0] for each in found}) == 1


def test_reasoning_has_the_names_that_transformers_gives_it() -> None:
    """gpt-oss reads ``thinking``, which transformers fills from 5.24 on."""
    source = "{% for m in messages %}{{ m.thinking }}|{{ m.content }}{% endfor %}"
    template = ChatTemplate(family_tokenizer("qwen2.5"), source)
    assert template._quick is not None
    talk = [TALK[0], {"role": "assistant", "content": "4", "reasoning_content": "so"}]
    assert len(set(outcomes(template, talk, PromptSettings()))) == 1


@pytest.mark.parametrize("name", ["messages", "tokenize", "conversations"])
def test_variables_of_transformers_are_refused_as_by_it(name: str) -> None:
    template = ChatTemplate(family_tokenizer("qwen2.5"))
    setting = PromptSettings(template_kwargs={name: [1]})
    with pytest.raises(ConfigurationError, match=name):
        template.render(TALK[:1], setting)


def test_equal_settings_are_one_object_apart_from_the_given() -> None:
    given = {"name": "f", "parameters": {"text": "a"}}
    one = known_settings(PromptSettings(tools=[given]))
    assert known_settings(PromptSettings(tools=[dict(given)])) is one
    given["name"] = "g"
    assert one.tools == [{"name": "f", "parameters": {"text": "a"}}]
    assert type(one.tools[0]["parameters"]) is Declaration
    # Equal in Python, and not as JSON.
    others = [
        known_settings(PromptSettings(template_kwargs={"x": x})) for x in (1, True, 1.0)
    ]
    assert len(set(map(id, others))) == 3
    odd = PromptSettings(template_kwargs={"x": object()})
    assert known_settings(odd) is odd
