"""A wrapper, plain functions and a gateway read a conversation as the same tokens."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers.chat_families import (
    FAMILIES,
    family_tokenizer,
    plain_tokenizer,
    render_as_transformers,
)
from tensordict import TensorDict, lazy_stack
from tokenizers import AddedToken
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from torchrl_sglang import AsyncSGLang, SGLangWrapper
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.chat.messages import check_last_message
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.collectors.groups.conversations import (
    Conversation,
    Conversations,
)
from torchrl_sglang.collectors.runtime.contract import ConversationSetting
from torchrl_sglang.collectors.timeouts import CollectorTimeouts
from torchrl_sglang.errors import ConfigurationError, TaskError
from torchrl_sglang.gateway.dialects.openai import read_chat
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.policies.turns import TurnCodec
from torchrl_sglang.support.blocking import BlockingCalls
from torchrl_sglang.types import Completion, ServerCapabilities

PLAIN = ("inst", "llama2", "mistral-v0.1")
"""Templates that write ``[INST]`` as a text."""

ROOTS = {"deepseek-r1"}
"""Its prompts end in ``<think>``, which the template never renders again."""


def tokenizer_of(name: str) -> Any:
    return plain_tokenizer(name) if name in PLAIN else family_tokenizer(name)


class ScriptedEngine(AsyncSGLang):
    """An engine whose model writes what the test says."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        super().__init__(
            Fleet(replicas=[Replica(url="http://127.0.0.1:1")], weight_version="0"),
            ServerCapabilities(
                version="none",
                model_path="",
                tokenizer_path="",
                vocab_size=len(tokenizer),
                max_context=10_000,
                max_prompt=9_999,
                dtype=torch.float32,
                tp_size=1,
                pp_size=1,
                dp_size=1,
                needs_update_session=False,
                load_route="/v1/loads",
                has_tokenizer=True,
                eos_token_ids=tuple(eos_token_ids),
                has_grammar=False,
                weight_version="0",
            ),
        )
        self._tokenizer = tokenizer
        self.writes: list[int] = []

    def generate_requests(self, requests: Any, **options: Any) -> list[Completion]:
        return [
            Completion(
                token_ids=list(self.writes),
                log_probs=[-1.0] * len(self.writes),
                finish_reason="stop",
            )
            for _ in requests
        ]

    async def agenerate_requests(
        self, requests: Any, **options: Any
    ) -> list[Completion]:
        return self.generate_requests(requests)


class Door:
    """One way to the model; ``ask`` returns the tokens of a prompt."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.engine = ScriptedEngine(tokenizer, eos_token_ids)
        self.policy = SGLangWrapper(
            self.engine, tokenizer=tokenizer, prefer_tokens=True
        )
        self.messages: list[Mapping[str, Any]] = []

    def ask(self, said: Sequence[Mapping[str, Any]], writes: list[int]) -> list[int]:
        self.messages += said
        self.engine.writes = writes
        prompt, reply = self.respond(writes)
        self.messages.append({"role": "assistant", "content": reply})
        return prompt


class GatewayDoor(Door):
    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        super().__init__(tokenizer, eos_token_ids)
        self.session = Session("it")
        self.template = ChatTemplate(tokenizer)

    def respond(self, writes: list[int]) -> tuple[list[int], str]:
        prompt = self.session.prompt(self.messages, PromptSettings(), self.template)
        ended = writes[-1] in self.template.special.values()
        text = self.template.decode(writes[:-1] if ended else writes)
        turn = Turn(
            number=self.session.next_number(),
            prompt=prompt,
            completion=Completion(token_ids=writes, finish_reason="stop"),
            text=text,
            reply={"role": "assistant", "content": text},
            ended=ended,
        )
        self.session.add(turn)
        return prompt.token_ids, text


class FunctionsDoor(Door):
    earlier: Any = None

    def respond(self, writes: list[int]) -> tuple[list[int], str]:
        codec = TurnCodec(self.policy)
        prompt = codec.encode(self.messages, self.earlier)
        answer = codec.respond(prompt, policy_version=0, timeout=1.0)
        self.earlier = asyncio.run(answer)
        return prompt.token_ids, self.earlier.message


class WrapperDoor(Door):
    tokens: Any = None

    def respond(self, writes: list[int]) -> tuple[list[int], str]:
        history = History.from_chats([list(self.messages)])
        td = TensorDict(history=ChatHistory(prompt=history), batch_size=1)
        td = lazy_stack(list(td.unbind(0)))
        if self.tokens is not None:
            td.set("tokens", self.tokens)
        out = self.policy(td)
        self.tokens = out.select("tokens").get("tokens")
        (ids,) = out.get(("tokens", "prompt"), as_list=True)
        return ids.tolist(), out["history"].response[0].content[0]


class DoorOfACollector(WrapperDoor):
    """Rows are padded."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        super().__init__(tokenizer, eos_token_ids)
        self.policy = self.policy.get_new_version(pad_output=True)


DOORS: dict[str, Callable[..., Any]] = {
    "functions": FunctionsDoor,
    "wrapper": WrapperDoor,
    "padded wrapper": DoorOfACollector,
}

TALKS = {
    "short": [("Hi", "Hello"), ("more", "fine"), ("and?", "done")],
    "odd": [("Zoë 12", "1 2 [INST] x"), ("a  b\n c", "x\n\ny"), ("?", "{}"), ("", "a")],
    "white space": [("Hi", "  Hello \n"), ("more", "\tx "), ("a", "\n\n"), ("b", "c")],
}


def written(tokenizer: Any, text: str, end: str | None) -> list[int]:
    template = ChatTemplate(tokenizer)
    ids = template.encode_behind(text)
    return ids if end is None else [*ids, tokenizer.convert_tokens_to_ids(end)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "cut off"])
@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", [*FAMILIES, *PLAIN])
def test_prompts_are_the_same(name: str, door: str, talk: str, ends: bool) -> None:
    tokenizer = tokenizer_of(name)
    doors = GatewayDoor(tokenizer), DOORS[door](tokenizer)
    before: list[int] = []
    for question, answer in TALKS[talk]:
        writes = written(tokenizer, answer, tokenizer.eos_token if ends else None)
        wanted, found = (each.ask([user(question)], writes) for each in doors)
        assert found == wanted
        assert name in ROOTS or found[: len(before)] == before
        before = [*found, *writes]


@pytest.mark.parametrize("door", ["gateway", *DOORS])
@pytest.mark.parametrize("name", PLAIN)
def test_a_turn_adds_what_the_template_writes(name: str, door: str) -> None:
    """No further piece at a join, though a text would begin with one."""
    tokenizer = tokenizer_of(name)
    talk = {"gateway": GatewayDoor, **DOORS}[door](tokenizer)
    first = talk.ask([user("Hi")], written(tokenizer, "Hello", "</s>"))
    second = talk.ask([user("more")], written(tokenizer, "fine", "</s>"))
    known = [*first, *written(tokenizer, "Hello", "</s>")]
    assert second[: len(known)] == known
    whole = tokenizer.apply_chat_template(
        talk.messages[:-1],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    last_end = len(whole) - 1 - whole[::-1].index(tokenizer.eos_token_id)
    assert second[len(known) :] == whole[last_end + 1 :]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["qwen2.5", *PLAIN])
@pytest.mark.parametrize("edited", ["if  x:\n  y", "if x:\n y", "other"])
def test_an_edited_conversation_is_read_anew(name: str, door: str, edited: str) -> None:
    tokenizer = tokenizer_of(name)
    talk = DOORS[door](tokenizer)
    talk.ask([user("if x:\n  y")], written(tokenizer, "Hello", tokenizer.eos_token))
    talk.messages[0] = user(edited)
    found = talk.ask([user("more")], written(tokenizer, "a", tokenizer.eos_token))
    assert found == tokenizer.apply_chat_template(
        talk.messages[:-1],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )


@pytest.mark.parametrize("name", PLAIN)
def test_a_reply_with_further_fields(name: str) -> None:
    """A function may keep what it found in a response beside it."""
    tokenizer = tokenizer_of(name)
    doors = FunctionsDoor(tokenizer), FunctionsDoor(tokenizer)
    writes = written(tokenizer, "Hello", "</s>")
    for each in doors:
        each.ask([user("Hi")], writes)
    calls = [{"name": "f", "arguments": {"x": 1}}]
    doors[1].messages[-1] = {**doors[1].messages[-1], "tool_calls": calls}
    wanted, found = (each.ask([user("more")], writes) for each in doors)
    assert found == wanted


@pytest.mark.parametrize("door", DOORS)
def test_another_end_than_the_templates(door: str) -> None:
    """A model with several ends of sequence: each stands for the template's."""
    tokenizer = tokenizer_of("llama3.1")
    writes = written(tokenizer, "Hello", "<|eom_id|>")
    doors = [each(tokenizer, (writes[-1],)) for each in (GatewayDoor, DOORS[door])]
    for each in doors:
        each.ask([user("Hi")], writes)
    wanted, found = (each.ask([user("more")], writes) for each in doors)
    assert found == wanted


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1"])
def test_a_response_that_was_cut_off_behind_a_special_token(
    name: str, door: str
) -> None:
    """The template's end follows it, as the model reads the turn later."""
    tokenizer = tokenizer_of(name)
    talk = DOORS[door](tokenizer)
    token = {"qwen2.5": "<|endoftext|>", "llama3.1": "<|eom_id|>"}[name]
    writes = written(tokenizer, "Hello", token)
    known = [*talk.ask([user("Hi")], writes), *writes]
    found = talk.ask([user("more")], writes)
    assert found[: len(known)] == known
    assert tokenizer.decode(found) == tokenizer.apply_chat_template(
        talk.messages[:-1], tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("chosen", ["ids", "text"])
@pytest.mark.parametrize("kind", ["text", "special", "end of sequence"])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "mistral-v3", "deepseek-v3"])
def test_a_stop_token_that_the_template_does_not_write_stays(
    name: str, door: str, kind: str, chosen: str
) -> None:
    tokenizer = copy.deepcopy(tokenizer_of(name))
    tokenizer.add_tokens([AddedToken("</tool_call>", special=kind != "text")])
    token = tokenizer.convert_tokens_to_ids("</tool_call>")
    talk = DOORS[door](tokenizer, (token,) if kind == "end of sequence" else ())
    stop = (
        {"stop_token_ids": [tokenizer.eos_token_id, token]}
        if chosen == "ids"
        else {"stop": ["\n\n", "</tool_call>"]}
    )
    talk.policy = talk.policy.get_new_version(generate_kwargs=stop)
    content = "<tool_call>{}</tool_call>"
    writes = [*written(tokenizer, content.removesuffix("</tool_call>"), None), token]
    before = [*talk.ask([user("Hi")], writes), *writes]
    if kind == "end of sequence":
        # The template's end stands for it.
        content = content.removesuffix("</tool_call>")
    assert talk.messages[-1]["content"] == content
    writes = written(tokenizer, "fine", tokenizer.eos_token)
    after = [*talk.ask([user("more")], writes), *writes]
    assert talk.messages[-1]["content"] == "fine"
    assert after[: len(before)] == before
    last = talk.ask([user("and?")], writes)
    assert last[: len(after)] == after
    if kind != "end of sequence":
        rendered = tokenizer.apply_chat_template(
            talk.messages[:-1], tokenize=False, add_generation_prompt=True
        )
        assert "".join(tokenizer.decode(last).split()) == "".join(rendered.split())


@pytest.mark.parametrize("door", DOORS)
def test_turns_after_an_empty_response(door: str) -> None:
    # Its end stands directly behind the token that begins a turn.
    tokenizer = tokenizer_of("deepseek-v3")
    talk = DOORS[door](tokenizer)
    before: list[int] = []
    for answer in ("Hello", "", "done"):
        writes = written(tokenizer, answer, tokenizer.eos_token)
        prompt = talk.ask([user("Hi")], writes)
        assert prompt[: len(before)] == before
        before = [*prompt, *writes]


def test_the_first_token_that_a_text_begins_with() -> None:
    # What these tests are about: such tokenizers begin each text with a piece.
    tokenizer = tokenizer_of("inst")
    piece, *ids = tokenizer.encode("[INST]", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(piece) == "▁"
    assert ChatTemplate(tokenizer).encode_behind("[INST]") == ids


# Messages in other forms than the gateway's.


def encode_of_gateway(tokenizer: Any, messages: Any) -> list[int]:
    said = read_chat({"messages": messages}).messages
    check_last_message(said)
    template = ChatTemplate(tokenizer)
    return Session("it").prompt(said, PromptSettings(), template).token_ids


def encode_of_wrapper(tokenizer: Any, messages: Any) -> list[int]:
    policy = SGLangWrapper(ScriptedEngine(tokenizer), tokenizer=tokenizer)
    history = History.from_chats([messages])
    td = TensorDict(history=ChatHistory(prompt=history), batch_size=1)
    return policy.begin(td)[0].token_ids[0]


def encode_of_scores(tokenizer: Any, messages: Any) -> list[int]:
    policy = SGLangWrapper(
        ScriptedEngine(tokenizer), tokenizer=tokenizer, generate=False
    )
    history = History.from_chats([messages])
    td = TensorDict(history=ChatHistory(full=history), batch_size=1)
    return policy.begin(td)[0].token_ids[0]


def encode_of_codec(tokenizer: Any, messages: Any) -> list[int]:
    policy = SGLangWrapper(ScriptedEngine(tokenizer), tokenizer=tokenizer)
    return TurnCodec(policy).encode(messages).token_ids


def conversations(tokenizer: Any, **options: Any) -> Conversations:
    policy = SGLangWrapper(ScriptedEngine(tokenizer), tokenizer=tokenizer)
    functions = {"system_prompt": None, "step": None, "tools": None, "max_turns": None}
    return Conversations(
        TurnCodec(policy),
        query_key="query",
        timeouts=CollectorTimeouts(),
        blocking=BlockingCalls("it", 1),
        **{**functions, **options},
    )


def encode_of_collector(tokenizer: Any, messages: Any) -> list[int]:
    (only,) = conversations(tokenizer).begin({"query": messages}, 1)
    return only.opening.token_ids


def encode_of_reply(tokenizer: Any, messages: Any) -> list[int]:
    """A prompt with what ``step`` says behind a first turn."""
    said = []

    def step(conversation: Conversation, task: Any) -> Any:
        del conversation.messages[:]
        return None if said or said.append(1) else messages

    talk = conversations(tokenizer, step=step)
    (only,) = talk.begin({"query": "Hi"}, 1)
    setting = ConversationSetting(session_id="it", policy_version=lambda: 0)
    asyncio.run(talk.run(only, setting))
    return only.turns[-1].prompt.token_ids


PROMPTS = {
    "gateway": encode_of_gateway,
    "wrapper": encode_of_wrapper,
    "turns": encode_of_codec,
    "collector": encode_of_collector,
    "step": encode_of_reply,
}
"""Ways to the model, by which messages become a prompt."""

CALL = {"name": "add", "arguments": {"a": 1, "b": "2"}}
AS_TEXT = {**CALL, "arguments": '{"a": 1, "b": "2"}'}


def called(call: Any, content: Any = None, **fields: Any) -> list[dict[str, Any]]:
    """A conversation with a tool call, for the next response."""
    return [
        user("Add"),
        {"role": "assistant", "content": content, "tool_calls": [call], **fields},
        {"role": "tool", "content": "3"},
    ]


def function(given: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "call12345", "type": "function", "function": given, **fields}


TEXTS = [{"type": "text", "text": text} for text in ("a", "b")]
SYSTEM = [{"role": "system", "content": text} for text in ("Be", "brief.")]
NO_ARGUMENTS = {**CALL, "arguments": {}}

FORMS: dict[str, tuple[Any, Any]] = {
    "text parts": ([{"role": "user", "content": TEXTS}], [user("ab")]),
    "one part": ([{"role": "user", "content": TEXTS[0]}], [user("a")]),
    "no parts": ([{"role": "user", "content": []}], [user("")]),
    "none": (
        [user("a"), {"role": "assistant", "content": None}, user("b")],
        [user("a"), {"role": "assistant", "content": ""}, user("b")],
    ),
    "an empty list of calls": (
        [user("a"), {"role": "assistant", "content": "b", "tool_calls": []}, user("c")],
        [user("a"), {"role": "assistant", "content": "b"}, user("c")],
    ),
    "another name of a role": (
        [{"role": "developer", "content": "Be"}, user("a")],
        [SYSTEM[0], user("a")],
    ),
    "two system messages": ([*SYSTEM, user("a")], [*SYSTEM, user("a")]),
    "OpenAI's calls": (called(function(AS_TEXT)), CALL),
    "an object of arguments": (called(function(CALL), ""), CALL),
    "a flat call": (called(AS_TEXT), CALL),
    "null in a text": (
        called(function({**CALL, "arguments": '{"a": null}'})),
        {**CALL, "arguments": {"a": None}},
    ),
    "an empty text": (called(function({**CALL, "arguments": ""})), NO_ARGUMENTS),
    "no arguments": (called(function({**CALL, "arguments": None})), NO_ARGUMENTS),
    "null": (called(function({**CALL, "arguments": "null"})), NO_ARGUMENTS),
    "a text in a text": (
        called(function({**CALL, "arguments": json.dumps(AS_TEXT["arguments"])})),
        CALL,
    ),
    "OpenAI's old call": (
        [
            user("Add"),
            {"role": "assistant", "content": None, "function_call": AS_TEXT},
            {"role": "function", "content": "3"},
        ],
        CALL,
    ),
}
"""Messages, and the same in the form of transformers; for calls, the call."""


def right_form(family: str, wanted: Any) -> list[dict[str, Any]]:
    if isinstance(wanted, list):
        return wanted
    if not FAMILIES[family].texts:
        return called(function(wanted), "")
    return called(function({**wanted, "arguments": json.dumps(wanted["arguments"])}))


def has_no_place(messages: Any) -> bool:
    """Whether TorchRL's ``History`` cannot hold the messages."""
    known = {"role", "content", "tool_calls"}
    return any(each.keys() - known for each in messages)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("door", PROMPTS)
@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_every_door_reads_messages_alike(family: str, door: str, form: str) -> None:
    tokenizer = family_tokenizer(family)
    messages, wanted = FORMS[form]
    if door == "wrapper" and has_no_place(messages):
        pytest.skip("a History has no such field")
    text = render_as_transformers(tokenizer, right_form(family, wanted), None)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert PROMPTS[door](tokenizer, messages) == expected


@pytest.mark.parametrize("door", ["wrapper", "collector"])
def test_rows_of_datasets(door: str) -> None:
    """They have None for each key that only other rows have."""
    tokenizer = family_tokenizer("qwen3")
    arguments = {**CALL["arguments"], "c": None, "content": None}
    messages = called(function({**CALL, "arguments": arguments}))
    messages[0]["tool_calls"] = messages[2]["tool_calls"] = None
    text = render_as_transformers(tokenizer, right_form("qwen3", CALL), None)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert PROMPTS[door](tokenizer, messages) == expected


def test_null_in_messages_of_different_keys() -> None:
    tokenizer = family_tokenizer("qwen3")
    call = {**CALL, "arguments": {"a": None, "b": "2"}}
    text = render_as_transformers(tokenizer, right_form("qwen3", call), None)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert encode_of_collector(tokenizer, called(function(call), "")) == expected


def test_a_complete_message_of_the_assistant_at_the_end_of_a_history() -> None:
    """TorchRL's wrappers close it, and let the model write another one."""
    tokenizer = family_tokenizer("qwen2.5")
    messages = [user("a"), {"role": "assistant", "content": "b"}]
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert encode_of_wrapper(tokenizer, messages) == expected
    for door in PROMPTS.keys() - {"wrapper"}:
        with pytest.raises(ConfigurationError, match="ends in a message of the assist"):
            PROMPTS[door](tokenizer, messages)


@pytest.mark.parametrize("form", FORMS)
def test_a_scored_history_is_read_alike(form: str) -> None:
    tokenizer = family_tokenizer("qwen2.5")
    messages, wanted = FORMS[form]
    if has_no_place(messages):
        pytest.skip("a History has no such field")
    text = tokenizer.apply_chat_template(right_form("qwen2.5", wanted), tokenize=False)
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert encode_of_scores(tokenizer, messages) == expected


HALF = "cut \ud83d"
REFUSED = {
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        "'image_url'; the policy takes text only",
    ),
    "another part": (
        [{"role": "user", "content": [{"type": "new", "new": "x"}]}],
        "'new'; the policy takes text only",
    ),
    "a part without a type": (
        [{"role": "user", "content": ["a"]}],
        "has 'a' as a part of its content, and a part has a type",
    ),
    "a part without its text": (
        [{"role": "user", "content": [{"type": "text", "content": "a"}]}],
        "type 'text' without 'text'; it has type, content",
    ),
    "another name of arguments": (
        called({"name": "add", "parameters": {"a": 1}}),
        "'parameters' instead of 'arguments'",
    ),
    "a number": ([{"role": "user", "content": 5}], "must be a text or a list"),
    "another role": ([{"role": "human", "content": "a"}], "has the role 'human'"),
    "a beginning": (
        [user("a"), {"role": "assistant", "content": "b", "is_complete": False}],
        "beginnings of responses",
    ),
    "a call at the end": (
        called(function(AS_TEXT), is_complete=False)[:2],
        "beginnings of responses",
    ),
    "a call without a name": (called(function({"arguments": "{}"})), "with a name"),
    "half of a character": ([user(HALF)], r"half of a character in 'cut \\ud83d'"),
    "half of one in arguments": (
        called(function({**CALL, "arguments": {"a": HALF}})),
        "half of a character",
    ),
    "half of one in their text": (
        called(function({**CALL, "arguments": json.dumps({"a": HALF})})),
        "half of a character",
    ),
    "no content": ([{"role": "user", "text": "a"}], "has no content"),
    "no role": ([{"from": "human", "value": "a"}], "with a role"),
    "no message": (["a", "b"], "with a role"),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("door", PROMPTS)
def test_every_door_refuses_messages_alike(door: str, reason: str) -> None:
    messages, words = REFUSED[reason]
    if door == "wrapper" and reason.startswith("no "):
        pytest.skip("a History has a role and a content")
    with pytest.raises(ConfigurationError, match=words):
        PROMPTS[door](family_tokenizer("qwen2.5"), messages)


def test_two_system_messages_of_which_one_is_the_runs() -> None:
    tokenizer = family_tokenizer("qwen2.5")
    task = {"query": [*SYSTEM[:1], user("a")]}
    with pytest.raises(TaskError, match="system message of its own, beside system_pro"):
        conversations(tokenizer, system_prompt="Be long.").begin(task, 1)
    with pytest.raises(ConfigurationError, match="system_prompt has half of a charact"):
        conversations(tokenizer, system_prompt=HALF)


def test_variables_of_the_template() -> None:
    tokenizer = family_tokenizer("qwen3")
    policy = SGLangWrapper(
        ScriptedEngine(tokenizer),
        tokenizer=tokenizer,
        chat_template_kwargs={"enable_thinking": False},
    )
    variables = {"enable_thinking": False}
    text = render_as_transformers(tokenizer, [user("a")], None, **variables)
    assert text != render_as_transformers(tokenizer, [user("a")], None)
    assert TurnCodec(policy).encode([user("a")]).text == text
    history = ChatHistory(prompt=History.from_chats([[user("a")]]))
    prompts, _ = policy.begin(TensorDict(history=history, batch_size=1))
    assert prompts.texts == [text]
    for name in ("enable_thinkin", "tools"):
        with pytest.raises(ConfigurationError, match=f"{name}.* no variable of the"):
            policy.get_new_version(chat_template_kwargs={name: True})
