"""A wrapper, plain functions and a gateway read a conversation as the same tokens."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from helpers.chat_families import FAMILIES, family_tokenizer, plain_tokenizer
from tensordict import TensorDict, lazy_stack
from tokenizers import AddedToken
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from torchrl_sglang import AsyncSGLang, SGLangWrapper
from torchrl_sglang.backends.fleet.membership import Fleet
from torchrl_sglang.backends.fleet.replica import Replica
from torchrl_sglang.chat.prompt_settings import PromptSettings
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.gateway.session import Session
from torchrl_sglang.gateway.turns import Turn
from torchrl_sglang.policies.turns import TurnCodec
from torchrl_sglang.types import Completion, ServerCapabilities

PLAIN = ("inst", "llama2", "mistral-v0.1")
"""Templates that write ``[INST]`` as a text."""

ROOTS = {"deepseek-r1"}
"""Its prompts end in ``<think>``, which the template never renders again."""


def tokenizer_of(name: str) -> Any:
    return plain_tokenizer(name) if name in PLAIN else family_tokenizer(name)


class ScriptedEngine(AsyncSGLang):
    """An engine whose model writes what the test says."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
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
        response = asyncio.run(codec.respond(prompt, timeout=1.0))
        self.earlier = prompt, response
        return prompt.token_ids, response.message


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
    tokenizer = tokenizer_of("llama3.1")
    doors = GatewayDoor(tokenizer), DOORS[door](tokenizer)
    writes = written(tokenizer, "Hello", "<|eom_id|>")
    for each in doors:
        stop = {"stop_token_ids": [writes[-1]]}
        each.policy = each.policy.get_new_version(generate_kwargs=stop)
        each.ask([user("Hi")], writes)
    wanted, found = (each.ask([user("more")], writes) for each in doors)
    assert found == wanted


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
    if kind == "text":
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
