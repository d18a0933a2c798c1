"""How conversations of several model families go on by tokens.

The table of ``docs/source/reference/gateway.rst`` says what these tests show. Each
prompt is compared with what ``transformers`` renders.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
from helpers.chat_families import FAMILIES, family_tokenizer
from helpers.talk import ARGUMENTS, TOOLS, Talk, call, result, user
from jinja2 import TemplateError

from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError

families = pytest.mark.parametrize("name", FAMILIES)


def expect(outcome: str, **others: str) -> Any:
    """Parametrizes with all families and what is expected of each."""
    table = {name.replace("-", "_").replace(".", "_"): name for name in FAMILIES}
    rows = [(name, others.get(key, outcome)) for key, name in table.items()]
    assert set(others) <= set(table)
    return pytest.mark.parametrize(("name", "outcome"), rows)


R1 = {"deepseek_r1": "root"}
"""Its prompts end in ``<think>``, which the template never renders again."""
NO_TOOLS = {"gemma2": "refused", "gemma3": "refused"}
"""Their templates have no role for results."""


@expect("joins 0", **R1)
def test_a_second_turn(name: str, outcome: str) -> None:
    talk = Talk(name)
    first = [user("Hi")]
    reply = talk.ask(first, "Hello, Zoë! \U0001f600").reply
    assert talk.outcome([*first, reply, user("more")]) == outcome


# Mistral's stands in the last message only, if that is the user's.
@expect("joins 0", **R1, mistral_v3="root", mistral_nemo="root", gemma2="refused")
def test_a_system_prompt(name: str, outcome: str) -> None:
    talk = Talk(name)
    first = [{"role": "system", "content": "Be brief."}, user("Hi")]
    if outcome == "refused":
        assert talk.outcome(first) == outcome
        return
    reply = talk.ask(first, "Hello").reply
    assert talk.outcome([*first, reply, user("more")]) == outcome


def use_tool(
    name: str,
    *numbers: int,
    style: str = "",
    content: str = "",
    reasoning: str | None = None,
    end: str | None = "",
) -> tuple[Talk, list[Mapping[str, Any]]]:
    """Returns a session whose model has called tools, and its messages."""
    talk = Talk(name, TOOLS)
    calls = [call(number) for number in numbers]
    written = talk.family.write(content, reasoning=reasoning, calls=calls, style=style)
    reply: dict[str, Any] = {"content": content, "tool_calls": calls}
    if reasoning is not None:
        reply["reasoning_content"] = reasoning
    asked = [user("What is the weather?")]
    return talk, [*asked, talk.ask(asked, written, reply, end=end).reply]


# ChatML's template drops calls.
@pytest.mark.parametrize("style", ["", "odd"])
@expect("joins 0", **R1, **NO_TOOLS, chatml="root")
def test_a_tool_call(name: str, outcome: str, style: str) -> None:
    talk, messages = use_tool(name, 0, style=style)
    messages.append(result(0))
    assert talk.outcome(messages) == outcome


# Mistral's template writes the tools before the user's last message only. Behind a
# result, R1's does not ask the model to think.
@expect("joins 1", mistral_v3="root", mistral_nemo="root")
def test_an_answer_after_a_tool_call(name: str, outcome: str) -> None:
    if name.startswith("gemma"):
        return
    talk, messages = use_tool(name, 0)
    messages.append(result(0))
    messages.append(talk.ask(messages, "It is sunny.").reply)
    assert talk.outcome([*messages, user("And tomorrow?")]) == outcome


@pytest.mark.parametrize("style", ["", "odd"])
@expect("joins 0", **R1, **NO_TOOLS, chatml="root", llama3_1="refused")
def test_parallel_tool_calls(name: str, outcome: str, style: str) -> None:
    talk, messages = use_tool(name, 0, 1, style=style)
    messages += [result(0), result(1, "rainy")]
    assert talk.outcome(messages) == outcome


@expect(
    "joins 0",
    **{**R1, **NO_TOOLS, "chatml": "root", "llama3_1": "root"},
    mistral_v3="root",
    mistral_nemo="root",
    deepseek_v3="root",
)
def test_content_beside_a_tool_call(name: str, outcome: str) -> None:
    talk, messages = use_tool(name, 0, content="I")
    messages.append(result(0))
    assert talk.outcome(messages) == outcome


@expect("joins 0", **R1)
def test_a_response_that_is_cut_off(name: str, outcome: str) -> None:
    talk = Talk(name)
    first = [user("Hi")]
    reply = talk.ask(first, "Once upon a \n", end=None).reply
    assert talk.outcome([*first, reply, user("go on")]) == outcome


@expect("joins 0", **R1)
def test_a_response_that_a_stop_string_ends(name: str, outcome: str) -> None:
    talk = Talk(name)
    first = [user("Hi")]
    turn = talk.ask(first, "I look.\nObservation:\n", end=None, stop="Observation:")
    assert turn.reply["content"] == "I look.\n"
    assert talk.outcome([*first, turn.reply, user("go on")]) == outcome


@pytest.mark.parametrize("text", ["", " ", "\n\n", "  Hi  \n", "\tx"])
@expect("joins 0", **R1)
def test_white_space(name: str, outcome: str, text: str) -> None:
    # The template may trim what the model wrote, and so may the client.
    talk = Talk(name)
    first = [user("Hi")]
    reply = talk.ask(first, text).reply
    echo = {**reply, "content": reply["content"].strip()}
    assert talk.outcome([*first, echo, user("more")]) == outcome


CLIENTS = {
    "ids": lambda calls: [{**c, "id": f"toolu_{i}"} for i, c in enumerate(calls)],
    "order": lambda calls: [
        {
            **c,
            "function": {
                **c["function"],
                "arguments": dict(reversed(ARGUMENTS.items())),
            },
        }
        for c in calls
    ],
    "numbers": lambda calls: [
        {**c, "function": {**c["function"], "arguments": {**ARGUMENTS, "days": 2.0}}}
        for c in calls
    ],
}
"""What clients change in tool calls."""


@pytest.mark.parametrize("client", CLIENTS)
@expect("joins 0", **R1, **NO_TOOLS, chatml="root")
def test_a_client_that_changes_calls(name: str, outcome: str, client: str) -> None:
    talk, (asked, reply) = use_tool(name, 0)
    calls = CLIENTS[client](reply["tool_calls"])
    echo = {**reply, "tool_calls": calls}
    answer = {**result(0), "tool_call_id": calls[0]["id"]}
    if outcome == "root" and client == "ids":
        return
    assert talk.outcome([asked, echo, answer]) == outcome
    if outcome == "joins 0":
        # The result has the id of the call that the model knows.
        assert talk.session.turns[-1].prompt.messages[-1] == result(0)


def test_results_of_exchanged_calls_are_an_edit() -> None:
    talk, messages = use_tool("qwen2.5", 0, 1)
    first = [*messages, result(0, "sunny"), result(1, "rainy")]
    said = talk.ask(first).reply
    other = [*messages, result(1, "sunny"), result(0, "rainy")]
    assert talk.outcome([*first, said, user("more")]) == "joins 1"
    assert talk.outcome([*other, said, user("more")]) == "joins 0"


# Qwen's template keeps the reasoning of the last user's turn only.
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize(
    ("name", "by_tool", "by_user"),
    [("qwen3", "joins 0", "root"), ("deepseek-r1", "root", "root")],
)
def test_reasoning(name: str, by_tool: str, by_user: str, kept: bool) -> None:
    talk, (asked, reply) = use_tool(name, 0, reasoning="r")
    if not kept:
        reply = {k: v for k, v in reply.items() if k != "reasoning_content"}
    known = [asked, reply, result(0)]
    if name == "deepseek-r1":
        known[1] = {k: v for k, v in reply.items() if k != "reasoning_content"}
    assert talk.outcome(known) == by_tool
    assert talk.outcome([asked, reply, user("stop")]) == by_user


def test_other_reasoning_is_an_edit() -> None:
    talk, (asked, reply) = use_tool("qwen3", 0, reasoning="one")
    edited = {**reply, "reasoning_content": "two"}
    assert talk.outcome([asked, edited, result(0)]) == "root"
    # Reasoning of an earlier response is compared, too.
    talk.ask([asked, reply, result(0)])
    said = talk.session.turns[-1].reply
    assert talk.outcome([asked, edited, result(0), said, result(0)]) == "joins 1"


def test_reasoning_that_is_cut_off() -> None:
    talk = Talk("qwen3", TOOLS)
    reply = {"content": "", "reasoning_content": "So I"}
    asked = [user("Hi")]
    talk.ask(asked, "<think>\nSo I", reply, end=None)
    said = talk.session.turns[-1].reply
    assert talk.outcome([*asked, said, result(0)]) == "joins 0"


def test_a_template_that_closes_the_reasoning_is_a_root_each_time() -> None:
    talk = Talk("qwen3", PromptSettings(template_kwargs={"enable_thinking": False}))
    reply = talk.ask([user("Hi")], "Hello").reply
    assert talk.outcome([user("Hi"), reply, user("more")]) == "root"


@expect("joins 0", **R1)
def test_an_edited_history(name: str, outcome: str) -> None:
    talk = Talk(name)
    messages: list[Mapping[str, Any]] = [user("one")]
    messages.append(talk.ask(messages, "1").reply)
    edited = [*messages, user("zwei")]
    messages.append(user("two"))
    messages.append(talk.ask(messages, "2").reply)
    talk.ask([*messages, user("three")], "3")
    assert talk.outcome(edited) == outcome
    # Siblings have the same parent.
    assert talk.outcome(edited) == outcome
    assert talk.outcome([{**user("one"), "name": "Zoë"}, *messages[1:]]) == "root"


@families
def test_other_tools_are_a_root(name: str) -> None:
    talk = Talk(name, TOOLS)
    reply = talk.ask([user("Hi")]).reply
    talk.setting = PromptSettings()
    assert talk.outcome([user("Hi"), reply, user("more")]) == "root"


def test_among_equal_responses_the_one_that_the_client_echoes() -> None:
    talk = Talk("qwen2.5", TOOLS)
    asked = [user("Hi")]
    for text in ("a", " a", "a"):
        talk.ask(asked, text)
    first, second, _ = (turn.reply for turn in talk.session.turns)
    assert talk.outcome([*asked, second, user("more")]) == "joins 1"
    assert talk.outcome([*asked, dict(first), user("more")]) == "joins 2"
    # A turn's own message names that turn.
    assert talk.outcome([*asked, first, user("more")]) == "joins 0"
    written = talk.family.write(calls=[call(0)])
    for number in (5, 6):
        talk.ask(asked, written, {"content": "", "tool_calls": [call(number)]})
    fifth = talk.session.turns[-2]
    assert talk.outcome([*asked, fifth.reply, result(5)]) == f"joins {fifth.number}"


@pytest.mark.parametrize(("end", "number"), [("<|eom_id|>", 3), ("!", 4)])
def test_another_end_than_the_templates(end: str, number: int) -> None:
    # A model's end stands for the template's; a token that a request stops at does not.
    talk = Talk("llama3.1")
    reply = talk.ask([user("Hi")], "Hello", end=end).reply
    assert talk.outcome([user("Hi"), reply, user("more")]) == "joins 0"
    text = talk.template.decode(talk.session.turns[-1].prompt.token_ids)
    assert text.count("<|eot_id|>") == number


def test_a_template_without_ends_is_a_root_each_time() -> None:
    talk = Talk("mistral-nemo")
    talk.tokenizer = copy.copy(talk.tokenizer)
    talk.tokenizer.chat_template = (
        "{% for m in messages %}[INST]{{ m.role + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[INST]assistant{% endif %}"
    )
    talk.template = ChatTemplate(talk.tokenizer)
    reply = talk.ask([user("Hi")], "Hello").reply
    # The token behind the response begins the next message.
    assert talk.outcome([user("Hi"), reply, user("more")]) == "root"
    reply = talk.ask([user("Hi")], "Hello", end=None).reply
    assert talk.outcome([user("Hi"), reply, user("more")]) == "joins 2"


@families
def test_ids_that_the_template_does_not_take(name: str) -> None:
    if name.startswith("gemma"):
        return
    template = ChatTemplate(family_tokenizer(name))
    long = [{**call(0), "id": "call_0123456789abcdef"}]
    messages = [
        user("Hi"),
        {"role": "assistant", "content": "", "tool_calls": long},
        {"role": "tool", "content": "x", "tool_call_id": long[0]["id"]},
    ]
    text = template.render(messages, TOOLS)
    ids = re.findall(r'"(?:call_)?id": "([a-z0-9]*)"', text)
    assert len(set(ids)) == (1 if name.startswith("mistral") else 0)
    assert all(len(each) == 9 for each in ids)
    assert name == "chatml" or '"days": 2' in text


def test_ids_that_the_model_did_not_write() -> None:
    # Which of several calls a result belongs to is told by ids it does not know.
    talk = Talk("mistral-nemo", TOOLS)
    calls = [call(0), call(1)]
    written = talk.family.write(calls=calls).replace("callid", "other0")
    asked = [user("Hi")]
    reply = talk.ask(asked, written, {"content": "", "tool_calls": calls}).reply
    assert talk.outcome([*asked, reply, result(0), result(1)]) == "root"


TEXTS = [
    *(
        "",
        " ",
        "Hi",
        "Zoë \U0001f600\u200b",
        "a\r\n\x1cb\n",
        '{"a": "\\"b\\""}',
        "</think>",
    ),
    *("<think>x</think>", "<|im_end|>", "</s>[INST] x", "<end_of_turn>\n", "\ufffd"),
    *(
        "<tool_call>\n{}\n</tool_call>",
        "{{ messages }}",
        "<|eot_id|>",
        "QxmarkZ0QxmarkZ",
    ),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "probe", "user", "assistant\n"),
]


@families
@pytest.mark.parametrize("seed", range(8))
def test_random_conversations(name: str, seed: int) -> None:
    """Each prompt is checked, whatever model and client say."""
    draw = random.Random(f"{name} {seed}")
    talk = Talk(name, draw.choice([TOOLS, PromptSettings()]))
    talk.strict = False
    for _ in range(6):
        messages = _random_history(talk, draw)
        text, reply = _random_response(talk, draw)
        end = draw.choice(["", "", "", None])
        try:
            talk.ask(messages, text, reply, end=end)
        except ConfigurationError:
            # The template does not take these roles, whoever renders them.
            with pytest.raises((TypeError, TemplateError)):
                talk.render(messages)


def _random_history(talk: Talk, draw: random.Random) -> list[Mapping[str, Any]]:
    turns = talk.session.turns
    if not turns or draw.random() < 0.1:
        return [user(draw.choice(TEXTS))]
    turn = draw.choice(turns[-2:])
    messages = [*turn.prompt.messages, turn.reply]
    if draw.random() < 0.2:
        index = draw.randrange(len(messages))
        messages[index] = {**messages[index], "content": draw.choice(TEXTS)}
    last = messages[-1]
    if last.get("tool_calls"):
        ids = [each["id"] for each in last["tool_calls"]]
        return [
            *messages,
            *({**result(0, draw.choice(TEXTS)), "tool_call_id": each} for each in ids),
        ]
    return [*messages, user(draw.choice(TEXTS))]


def _random_response(
    talk: Talk, draw: random.Random
) -> tuple[str, Mapping[str, Any] | None]:
    content = draw.choice(TEXTS) + draw.choice(TEXTS)
    kind = draw.choice(["text", "call", "reasoning", "calls"])
    if kind == "text":
        return content, None
    reply: dict[str, Any] = {"content": content}
    calls = []
    if kind.startswith("call"):
        number = len(talk.session.turns) * 2
        calls = [call(number, **{draw.choice(TEXTS): draw.choice(TEXTS), "b": 1})]
        calls += [call(number + 1, c=[draw.choice(TEXTS)])] * (kind == "calls")
        reply["tool_calls"] = calls
    reasoning = draw.choice(TEXTS) if kind == "reasoning" else None
    if reasoning:
        reply["reasoning_content"] = reasoning
    style = draw.choice(["", "odd"])
    text = talk.family.write(content, reasoning=reasoning, calls=calls, style=style)
    return text, reply
