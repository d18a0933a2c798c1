"""A server whose model writes what a test says, in tokens that no tokenizer would use.

What it was sent and what it wrote is the oracle for what a gateway exports.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from helpers.fake_server import CHANGES_LOGITS, FakeServer, Fault

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MOST_LETTERS = 6
"""Of a piece of text that is tokenized by itself."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the model writes in one turn."""

    text: str = ""
    """Content."""
    reasoning: str = ""
    """What it thinks before."""
    calls: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """Names and arguments of tools that it calls."""
    answer: Mapping[str, Any] | None = None
    """An answer in the form that the request asks for: a call, or JSON."""
    hangs: bool = False
    """Whether nothing comes until the request is aborted."""


Writer = Callable[[Reply, str, Mapping[str, Any]], str | None]
"""The text of a reply, from its prompt's text and its sampling parameters; ``None``: as
:func:`write` does."""


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Returns a call in Qwen's format."""
    called = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{called}\n</tool_call>"


def write(reply: Reply, prompt: str, params: Mapping[str, Any]) -> str:
    """Returns what the model writes."""
    text = f"<think>{reply.reasoning}</think>" if reply.reasoning else ""
    text += reply.text
    if reply.answer is not None:
        name = _answering_tool(reply.answer, prompt, params)
        called = write_call(name, reply.answer) if name else json.dumps(reply.answer)
        text += called
    return text + "\n".join(write_call(*call) for call in reply.calls)


def _answering_tool(
    answer: Mapping[str, Any], prompt: str, params: Mapping[str, Any]
) -> str | None:
    """Returns the tool that takes the answer; none where text is asked for."""
    if params.get("json_schema"):
        return None
    tag = json.loads(params.get("structural_tag") or "{}").get("format", {})
    if tag.get("type") == "or":
        return None
    declared = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    for line in declared[1].splitlines() if declared else ():
        function = json.loads(line)["function"]
        taken = function.get("parameters", {}).get("properties", {})
        if set(answer) <= set(taken):
            return str(function["name"])
    return None


def make_scripted_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose merges are learnt from texts."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
        clean_up_tokenization_spaces=False,
    )


def save_scripted_model(folder: Path, *, texts: Sequence[str]) -> Path:
    """Writes what a client reads of a model: a tokenizer with merges, and a config."""
    tokenizer = make_scripted_tokenizer(texts)
    tokenizer.save_pretrained(folder)
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2**17,
        "eos_token_id": tokenizer.eos_token_id,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def log_prob(token: int) -> float:
    """Returns the model's log-prob of a token, which tells it from most others."""
    return -(token * 37 % 101 + 1) / 101


class ScriptedServer(FakeServer):
    """Answers requests with replies, one after the other.

    Args:
        folder: of :func:`save_scripted_model`.
        tokenizer: its tokenizer.
        script: the replies.
        writer: writes some of them in another way.

    Attributes:
        generated (list): prompt and response of each reply, as tokens.
        script (list): replies that are left.
        missing (int): requests that came when there was none left.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        script: Sequence[Reply],
        *,
        writer: Writer | None = None,
        context: int = 2**17,
    ) -> None:
        super().__init__(
            folder, context=context, server_args={"grammar_backend": "xgrammar"}
        )
        self._tokenizer = tokenizer
        self._writer = writer
        self._aborts = False
        self.script = list(script)
        self.generated: list[tuple[list[int], list[int]]] = []
        self.missing = 0

    def fault_of(self, path: str, content: Any) -> Fault | None:
        asks = path == "/generate" and _generates(content)
        if asks and self.script and self.script[0].hangs:
            self.script.pop(0)
            return "hang"
        return super().fault_of(path, content)

    def generate(self, content: Any, fault: Fault | None = None) -> web.StreamResponse:
        self._aborts = fault is not None
        return super().generate(content, fault)

    def reply(self, item: dict[str, Any]) -> dict[str, Any]:
        reply = super().reply(item)
        meta, params = reply["meta_info"], item["sampling_params"]
        if params.get("max_new_tokens", 128) and not self._aborts:
            tokens, end = self._write(item)
            reply["output_ids"] = tokens
            meta["finish_reason"] = end
            meta["completion_tokens"] = len(tokens)
            meta["weight_versions"][0]["end"] = len(tokens)
            self.generated.append((item["input_ids"], tokens))
        if item["return_logprob"]:
            changed = any(params.get(name) for name in CHANGES_LOGITS)
            for entry in meta["input_token_logprobs"][1:]:
                entry[0] = log_prob(entry[1])
            meta["output_token_logprobs"] = [
                [log_prob(token) - 0.25 * changed, token, None]
                for token in reply["output_ids"]
            ]
        return reply

    def _write(self, item: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """Returns the tokens of the next reply, and how it ends."""
        if not self.script:
            self.missing += 1
        reply = self.script.pop(0) if self.script else Reply(text="There is no more.")
        prompt, params = (
            self._tokenizer.decode(item["input_ids"]),
            item["sampling_params"],
        )
        text = self._writer(reply, prompt, params) if self._writer else None
        text = write(reply, prompt, params) if text is None else text
        tokens: list[int] = []
        stops = params.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        for token in self._tokenize(text):
            tokens.append(token)
            said = self._tokenizer.decode(tokens) if stops else ""
            for stop in stops:
                if stop in said:
                    return tokens, {"type": "stop", "matched": stop}
        end = self._tokenizer.eos_token_id
        tokens.append(end)
        most = params["max_new_tokens"]
        if len(tokens) > most:
            return tokens[:most], {"type": "length", "length": most}
        return tokens, {"type": "stop", "matched": end}

    def _tokenize(self, text: str) -> Iterator[int]:
        """Yields tokens of a text that is cut where no tokenizer would."""
        rng = random.Random(len(self.generated))
        while text:
            length = rng.randint(1, MOST_LETTERS)
            yield from self._tokenizer.encode(text[:length], add_special_tokens=False)
            text = text[length:]


def _generates(content: Any) -> bool:
    """Whether a request asks for tokens, not for log-probs alone."""
    params = content["sampling_params"]
    params = params if isinstance(params, list) else [params]
    return any(each.get("max_new_tokens", 128) for each in params)
