"""``SGLangWrapper`` beside ``vLLMWrapper``: one table of calls, two oracles.

Each row of ``CALLS`` is run on both wrappers and turned into cells, one for each thing
that a caller can observe. Every cell must be what Hugging Face and the contract say it
is, and the same as ``vLLMWrapper``'s unless ``KNOWN_DIFFERENCES`` says why not. A
difference that is listed and cannot be found fails too, so the list stays true.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    lazy_stack,
)
from torch.nn.functional import pad
from torchrl.data.llm import History
from torchrl.modules.llm.policies import (
    ChatHistory,
    LogProbs,
    Masks,
    Text,
    Tokens,
    vLLMWrapper,
)

from torchrl_sglang import SGLangWrapper

TOLERANCE = 1e-4
"""Greatest difference between two log-probabilities, in nats."""

NEW_TOKENS = 8
"""Longest response. One of the texts below ends its turn earlier, in every mode."""

TEXTS = ("A", "what is 2+2?", "hi")
SAME_LENGTH = ("A", "h", "x")

GREEDY = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0}

CONTAINERS: dict[str, type] = {
    "text": Text,
    "masks": Masks,
    "tokens": Tokens,
    "log_probs": LogProbs,
    "history": ChatHistory,
}

FIELDS = {
    "text": ("prompt", "response", "full"),
    "masks": ("all_attention_mask", "all_assistant_mask", "padded"),
    "tokens": ("prompt", "response", "full", "padded"),
    "log_probs": ("prompt", "response", "full", "padded"),
    "history": ("prompt", "response", "full"),
}

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template that is not the tokenizer's."""

Cells = dict[str, Any]
"""What can be observed -> what was observed; a list holds one value for each sample."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A row of the table: a wrapper, its input, and how it is called."""

    mode: str
    """``input_mode``."""
    generate: bool = True
    """Generate, or score."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the wrapper."""
    sampling: Mapping[str, Any] = field(default_factory=lambda: GREEDY)
    """``generate_kwargs``."""
    shape: tuple[int, ...] = (3,)
    """Batch shape of the input."""
    texts: Sequence[str] = TEXTS
    """What the input holds; the first ones, if the batch is smaller."""
    systems: Sequence[bool] = (False, False, False)
    """Which conversations begin with a system message."""
    dense: bool | None = None
    """Whether input tokens are padded; if None, where the output is."""
    beside: bool = False
    """Whether the tokens of a history are there already."""
    target: bool = False
    """Whether ``tensordict_out`` is given."""
    stacked: bool = True
    """Whether the input is a lazy stack."""
    device: str | None = None
    """Device of the input; every row is run with one as well, see ``test_device``."""

    @property
    def samples(self) -> int | None:
        return self.args.get("num_samples", self.sampling.get("n"))

    @property
    def padded(self) -> bool:
        return bool(self.args.get("pad_output"))

    @property
    def log_probs(self) -> bool:
        return self.args.get("return_log_probs") is not False

    @property
    def input_key(self) -> Any:
        default = (self.mode, "prompt" if self.generate else "full")
        return self.args.get("input_key", default)

    @property
    def containers(self) -> list[str]:
        """Containers that are written, in the order of ``out_keys``."""
        absent = {"tokens": ("text", "history"), "text": ("history",)}
        return [
            name
            for name in CONTAINERS
            if name not in absent.get(self.mode, ())
            and (name != "log_probs" or self.log_probs)
        ]

    def key(self, name: str) -> Any:
        return self.args.get(f"{name}_key", name)

    def make(self, wrapper: type, engine: Any) -> Any:
        return wrapper(
            engine,
            input_mode=self.mode,
            generate=self.generate,
            generate_kwargs=dict(self.sampling),
            **self.args,
        )

    def elements(self) -> list[tuple[str, bool]]:
        """Text of each element, flattened, and whether a system message precedes."""
        pairs = list(zip(self.texts, self.systems, strict=True))
        if self.shape == (2, 2):
            return [pairs[0], pairs[1], pairs[1], pairs[2]]
        return pairs[: self.shape[0] if self.shape else 1]

    def chat(self, text: str, system: bool) -> list[dict[str, str]]:
        turns = [{"role": "system", "content": "be brief"}] if system else []
        turns.append({"role": "user", "content": text})
        if not self.generate:
            turns.append({"role": "assistant", "content": text * 2})
        return turns

    def token_ids(self, text: str, system: bool, tokenizer: Any) -> list[int]:
        """Tokens of the prompt, or of the sequence to score."""
        if self.mode != "history":
            return tokenizer.encode(text)
        return tokenizer.apply_chat_template(
            self.chat(text, system),
            add_generation_prompt=self.generate,
            chat_template=self.args.get("chat_template"),
            tokenize=True,
            return_dict=False,
        )

    def input(self, tokenizer: Any) -> TensorDictBase:
        elements = self.elements()
        if not self.stacked:
            plain = self._plain_input(elements, tokenizer)
            return plain.to(self.device) if self.device else plain
        ids = [torch.tensor(self.token_ids(*one, tokenizer)) for one in elements]
        dense = self.padded if self.dense is None else self.dense
        if self.mode == "tokens" and dense:
            ids = pad_left(ids, tokenizer.pad_token_id)
        if self.mode == "history":
            values = [History.from_chats([self.chat(*one)])[0] for one in elements]
        else:
            values = [text for text, _ in elements] if self.mode == "text" else ids
        rows = []
        for index, value in enumerate(values):
            row = TensorDict(other=torch.tensor(index))
            if isinstance(self.input_key, tuple):
                name, part = self.input_key
                row.set(name, CONTAINERS[self.mode](**{part: value}))
            else:
                row.set(self.input_key, value)
            if self.beside:
                row.set("tokens", Tokens(prompt=ids[index]))
            rows.append(row)
        if self.shape == ():
            td = rows[0]
        elif self.shape == (2, 2):
            td = lazy_stack([lazy_stack(rows[:2]), lazy_stack(rows[2:])])
        else:
            td = lazy_stack(rows)
        return td.to(self.device) if self.device else td

    def _plain_input(
        self, elements: Sequence[tuple[str, bool]], tokenizer: Any
    ) -> TensorDict:
        size = len(elements)
        value: Any = [text for text, _ in elements]
        if self.mode == "history":
            value = History.from_chats([self.chat(*one) for one in elements])
        elif self.mode == "tokens":
            ids = [torch.tensor(self.token_ids(*one, tokenizer)) for one in elements]
            value = torch.stack(pad_left(ids, tokenizer.pad_token_id))
        container = CONTAINERS[self.mode](**{self.input_key[1]: value}, batch_size=size)
        return TensorDict(
            {"other": torch.arange(size), self.mode: container}, batch_size=size
        )


def pad_left(rows: Sequence[torch.Tensor], value: int) -> list[torch.Tensor]:
    longest = max(map(len, rows))
    return [pad(row, (longest - len(row), 0), value=value) for row in rows]


def observe(call: Call, wrapper: Any, tokenizer: Any) -> Cells:
    """Runs a call and returns all that is compared."""
    td = call.input(tokenizer)
    target = TensorDict(mark=torch.zeros(call.shape), batch_size=call.shape)
    with warnings.catch_warnings():
        # vLLMWrapper's histories lack a dimension, which ChatHistory adds and says so.
        warnings.filterwarnings("ignore", message="Response history should have one")
        out = wrapper(td, **({"tensordict_out": target} if call.target else {}))
    cells: Cells = {
        "in_keys": wrapper.in_keys,
        "out_keys": wrapper.out_keys,
        "batch": tuple(out.batch_size),
        "keys": sorted(map(str, out.keys())),
        "is": "input" if out is td else "target" if out is target else "new",
        "lazy": isinstance(out, LazyStackedTensorDict),
        "input": sorted(map(str, td.keys())),
        "device": out.device,
    }
    rows = list(out.reshape(-1).unbind(0)) if out.ndim else [out]
    for name in call.containers:
        value = out.get(call.key(name))
        cells[name] = (type(value), tuple(value.batch_size))
        for part in FIELDS[name]:
            cells[f"{name}.{part}"] = [
                plain(getattr(row.get(call.key(name)), part)) for row in rows
            ]
    return cells


def plain(value: Any) -> Any:
    """Returns a value in a form that can be compared."""
    if isinstance(value, History):
        return (tuple(value.batch_size), list(value.role), list(value.content))
    return value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.allclose(one, other, atol=TOLERANCE, rtol=0, equal_nan=True)
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    return bool(type(one) is type(other) and one == other)


def expect(call: Call, reference: Any) -> Cells:
    """Returns what the contract and Hugging Face say about a call."""
    tokenizer = reference.tokenizer
    repeats = (call.samples or 1) if call.generate else 1
    grouped = call.generate and call.samples is not None
    batch = (*call.shape, call.samples) if grouped else call.shape
    samples = []
    for text, system in call.elements():
        ids = call.token_ids(text, system, tokenizer)
        if call.generate:
            sample = expect_generated(call, ids, reference)
        else:
            sample = expect_scored(call, ids, text, system, reference)
        turns = call.chat(text, system)
        if call.mode == "history":
            sample.update(expect_history(call, turns, sample))
        samples += [sample] * repeats
    if call.padded:
        samples = pad_samples(call, samples, tokenizer.pad_token_id)
    cells = expect_output(call, batch)
    for name in call.containers:
        cells[name] = (CONTAINERS[name], batch)
        for part in FIELDS[name]:
            default = call.padded if part == "padded" else None
            cells[f"{name}.{part}"] = [
                sample.get(f"{name}.{part}", default) for sample in samples
            ]
    return cells


def expect_output(call: Call, batch: tuple[int, ...]) -> Cells:
    """Returns what holds for the output as a whole."""
    out_keys = [call.key(name) for name in call.containers]
    written = {root(key) for key in out_keys}
    source = {"other", root(call.input_key), *(["tokens"] if call.beside else ())}
    inplace = call.args.get("inplace", not (call.generate and call.samples))
    where = "target" if call.target else "input" if inplace is True else "new"
    kept = {"input": source, "target": {"mark"}, "new": set()}[where]
    like_input = where == "input" or inplace == "empty"
    return {
        "in_keys": [call.input_key],
        "out_keys": out_keys,
        "batch": batch,
        "keys": sorted(written | kept),
        "is": where,
        "lazy": where != "target" and bool(batch) and (call.stacked or not like_input),
        "input": sorted(source | (written if where == "input" else set())),
        "device": None if call.target or not call.device else torch.device(call.device),
    }


def root(key: Any) -> str:
    return key if isinstance(key, str) else key[0]


def expect_generated(call: Call, ids: list[int], reference: Any) -> Cells:
    answer = reference.greedy(tuple(ids), call.sampling["max_new_tokens"])
    decode = reference.tokenizer.decode
    before, after = torch.zeros(len(ids)).bool(), torch.ones(len(answer.tokens)).bool()
    log_probs = torch.tensor(answer.log_probs)
    asked = call.sampling.get("prompt_logprobs", False)
    if not asked:
        # What was not asked for is unknown: neither certain, which 0.0 is, nor a guess.
        log_probs[: len(ids)] = torch.nan
    sample = {
        "tokens.prompt": torch.tensor(ids),
        "tokens.response": torch.tensor(answer.tokens),
        "tokens.full": torch.tensor([*ids, *answer.tokens]),
        "masks.all_attention_mask": torch.cat([~before, after]),
        "masks.all_assistant_mask": torch.cat([before, after]),
        "log_probs.response": log_probs[len(ids) :],
        "log_probs.full": log_probs,
        "text.prompt": decode(ids),
        "text.response": decode(answer.tokens),
        "text.full": decode([*ids, *answer.tokens]),
    }
    return sample | ({"log_probs.prompt": log_probs[: len(ids)]} if asked else {})


def expect_scored(
    call: Call, ids: list[int], text: str, system: bool, reference: Any
) -> Cells:
    sample = {
        "tokens.full": torch.tensor(ids),
        "masks.all_attention_mask": torch.ones(len(ids)).bool(),
        "log_probs.full": reference.score(ids),
        "text.full": reference.tokenizer.decode(ids),
    }
    if call.mode == "history":
        templated = reference.tokenizer.apply_chat_template(
            call.chat(text, system),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        mask = torch.tensor(templated["assistant_masks"]).bool()
        sample["masks.all_assistant_mask"] = mask
    return sample


def expect_history(
    call: Call, turns: Sequence[Mapping[str, str]], sample: Cells
) -> Cells:
    def record(turns: Sequence[Mapping[str, str]]) -> tuple[Any, ...]:
        roles = [turn["role"] for turn in turns]
        return ((len(turns),), roles, [turn["content"] for turn in turns])

    if not call.generate:
        return {"history.full": record(turns)}
    # The template writes the end of the turn; in the content it would come back twice.
    content = sample["text.response"].removesuffix("<|im_end|>")
    answer = {"role": "assistant", "content": content}
    return {
        "history.prompt": record(turns),
        "history.response": record([answer]),
        "history.full": record([*turns, answer]),
    }


def pad_samples(call: Call, samples: Sequence[Cells], pad_id: int) -> list[Cells]:
    """Pads prompts on the left and responses on the right."""
    begin = "tokens.prompt" if call.generate else "tokens.full"
    left = max(len(sample[begin]) for sample in samples)
    right = max(len(sample.get("tokens.response", ())) for sample in samples)
    padded = []
    for sample in samples:
        before = left - len(sample[begin])
        after = right - len(sample.get("tokens.response", ()))
        around = {"prompt": (before, 0), "response": (0, after)}
        padded.append(
            {
                name: pad(
                    value,
                    around.get(name.split(".")[1], (before, after)),
                    value=pad_id if name.startswith("tokens") else 0,
                )
                if isinstance(value, torch.Tensor)
                else value
                for name, value in sample.items()
            }
        )
    return padded


CALLS: dict[str, Call] = {}
"""Name -> row. The first block is a small product, what follows stands for itself."""

MODES = ("history", "text", "tokens")


def add_calls(name: str, **options: Any) -> None:
    """Adds a row for each mode."""
    for mode in MODES:
        CALLS[f"{mode}-{name}".replace(" ", "")] = Call(mode=mode, **options)


for _pad in (False, True):
    _name, _args = ("padded" if _pad else "ragged"), {"pad_output": _pad}
    for _n in (None, 1, 3):
        add_calls(f"{_name}-{_n}", args={**_args, "num_samples": _n})
    add_calls(f"{_name}-score", generate=False, args=_args)
    _asking = {**GREEDY, "prompt_logprobs": True}
    add_calls(f"{_name}-prompt_logprobs", args=_args, sampling=_asking)
for _shape in ((), (2, 2)):
    for _n in (None, 2):
        add_calls(f"batch{_shape}-{_n}", shape=_shape, args={"num_samples": _n})
    add_calls(f"score-batch{_shape}", generate=False, shape=_shape)
for _inplace in (True, False, "empty"):
    add_calls(f"inplace={_inplace}", args={"inplace": _inplace})
    _args = {"pad_output": True, "inplace": _inplace}
    add_calls(f"plain-{_inplace}", stacked=False, dense=True, args=_args)
add_calls("plain-score", generate=False, stacked=False)
_renamed = {f"{_key}_key": f"my_{_key}" for _key in CONTAINERS}
_nested = {f"{_key}_key": ("agent", _key) for _key in CONTAINERS}
add_calls("tensordict_out", target=True)
add_calls("renamed", args=_renamed)
add_calls("renamed-padded", args={**_renamed, "pad_output": True})
add_calls("renamed-score", generate=False, args=_renamed)
add_calls("nested", args=_nested)
add_calls("nested-2", args={**_nested, "num_samples": 2})
add_calls("nested-score", generate=False, args=_nested)
add_calls("input_key", args={"input_key": "question"})
add_calls("no_log_probs", args={"return_log_probs": False})
add_calls("batching", args={"batching": True})
add_calls("on-device", device="cpu")
CALLS |= {
    "history-score-inplace=False": Call(
        mode="history", generate=False, args={"inplace": False}
    ),
    "history-tensordict_out-score": Call(mode="history", generate=False, target=True),
    "tokens-tensordict_out-batch()": Call(mode="tokens", shape=(), target=True),
    "tokens-tensordict_out-batch(2,2)": Call(mode="tokens", shape=(2, 2), target=True),
    "history-batching-max": Call(mode="history", args={"max_batch_size": 2}),
    "history-batching-batch()": Call(mode="history", shape=(), args={"batching": True}),
    "history-batching-batch(2,2)": Call(
        mode="history", shape=(2, 2), args={"batching": True}
    ),
    "tokens-prompt_logprobs-2": Call(
        mode="tokens",
        args={"num_samples": 2},
        sampling={**GREEDY, "prompt_logprobs": True},
    ),
    "tokens-to-device": Call(
        mode="tokens",
        device="cpu",
        args={"inplace": False, "device": torch.device("cpu")},
    ),
    "history-n": Call(mode="history", sampling={**GREEDY, "n": 2}),
    "history-system": Call(mode="history", systems=(True, True, True)),
    "history-system-score": Call(
        mode="history", generate=False, systems=(True, True, True)
    ),
    "history-uneven": Call(mode="history", systems=(True, False, False)),
    "history-uneven-score": Call(
        mode="history", generate=False, systems=(True, False, False)
    ),
    "history-chat_template": Call(mode="history", args={"chat_template": TEMPLATE}),
    "history-prefer_tokens": Call(
        mode="history",
        texts=SAME_LENGTH,
        beside=True,
        args={"prefer_tokens": True},
    ),
    "history-prefer_tokens-uneven": Call(
        mode="history", beside=True, args={"prefer_tokens": True}
    ),
    "history-prefer_tokens-none-there": Call(
        mode="history", args={"prefer_tokens": True}
    ),
    "tokens-padded-input": Call(mode="tokens", dense=True),
    "tokens-padded-input-score": Call(mode="tokens", generate=False, dense=True),
    "tokens-ragged-input": Call(mode="tokens", dense=False, args={"pad_output": True}),
    "tokens-ragged-input-score": Call(
        mode="tokens", generate=False, dense=False, args={"pad_output": True}
    ),
    "tokens-pad-within": Call(
        mode="tokens", texts=("a<|endoftext|>b", "ab<|endoftext|>", "x")
    ),
    "tokens-pad-within-score": Call(
        mode="tokens", generate=False, texts=("a<|endoftext|>b", "ab<|endoftext|>", "x")
    ),
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that the two wrappers do differently, on purpose."""

    why: str
    """What vLLMWrapper does, and what this one does."""
    cells: tuple[str, ...]
    """Cells that differ; all of them do."""
    when: Callable[[Call, Cells], bool]
    """Whether a row is concerned, which is also told what is expected of it."""


KNOWN_DIFFERENCES = (
    Difference(
        why="It lets vLLM tokenize texts and leaves empty what it was not told: here "
        "prompt, both together and masks are filled in as in the other modes.",
        cells=(
            "masks.all_attention_mask",
            "masks.all_assistant_mask",
            "tokens.prompt",
            "tokens.full",
        ),
        when=lambda call, _: call.generate and call.mode == "text",
    ),
    Difference(
        why="Its full log-probs of a text are those of the response, and shorter than "
        "tokens.full; here the prompt's part is there, NaN unless it was asked for.",
        cells=("log_probs.full",),
        when=lambda call, _: call.generate and call.mode == "text" and call.log_probs,
    ),
    Difference(
        why="It never returns a text prompt's log-probs; here they come if asked for.",
        cells=("log_probs.prompt",),
        when=lambda call, _: call.mode == "text" and asks_for_prompt(call),
    ),
    Difference(
        why="It writes no full log-probs for several samples; here they are written as "
        "for one, so that they are as long as tokens.full.",
        cells=("log_probs.full",),
        when=lambda call, _: (
            call.generate
            and call.mode != "text"
            and call.log_probs
            and call.samples is not None
        ),
    ),
    Difference(
        why="It forgets the prompt's log-probs with several samples; here they come if "
        "asked for.",
        cells=("log_probs.prompt",),
        when=lambda call, _: (
            call.mode != "text" and asks_for_prompt(call) and call.samples is not None
        ),
    ),
    Difference(
        why="It writes NaN on the padding of a prompt that was not scored; here it is "
        "0.0 as on all padding, and NaN marks tokens only.",
        cells=("log_probs.full",),
        when=lambda call, cells: (
            call.generate
            and call.padded
            and call.mode != "text"
            and call.log_probs
            and call.samples is None
            and not asks_for_prompt(call)
            and not all(mask[0] for mask in cells["masks.all_attention_mask"])
        ),
    ),
    Difference(
        why="It pads the prompt's log-probs on the right and its tokens on the left; "
        "here both are padded on the left.",
        cells=("log_probs.prompt", "log_probs.full"),
        when=lambda call, _: (
            call.padded and call.mode != "text" and asks_for_prompt(call)
        ),
    ),
    Difference(
        why="It keeps the generated end of turn in the history's content, where the "
        "template writes it a second time; here the content goes without.",
        cells=("history.response", "history.full"),
        when=lambda call, cells: (
            call.generate
            and call.mode == "history"
            and any(text.endswith("<|im_end|>") for text in cells["text.response"])
        ),
    ),
    Difference(
        why="It fills the input but returns another TensorDict, where the batch has "
        "two dimensions or calls are batched; here inplace=True returns the input.",
        cells=("is",),
        when=lambda call, cells: (
            cells["is"] == "input"
            and (len(call.shape) > 1 or bool(call.args.get("batching")))
            and call.shape != ()
        ),
    ),
    Difference(
        why='Its inplace="empty" is a lazy stack whatever the input is; here it is '
        "empty and like the input.",
        cells=("lazy",),
        when=lambda call, _: not call.stacked and call.args.get("inplace") == "empty",
    ),
    Difference(
        why="It takes every padding token for padding; here one that stands within a "
        "sequence or at its end is a token.",
        cells=("tokens.full", "masks.all_attention_mask", "log_probs.full"),
        when=lambda call, _: any("<|endoftext|>" in text for text in call.texts),
    ),
    Difference(
        why="So it continues another prompt than the one that it was given.",
        cells=(
            "tokens.prompt",
            "tokens.response",
            "log_probs.response",
            "masks.all_assistant_mask",
        ),
        when=lambda call, _: (
            call.generate and any("<|endoftext|>" in text for text in call.texts)
        ),
    ),
)

FAILURES: tuple[tuple[str, type[Exception], str, Callable[[Call], bool]], ...] = (
    # What vLLMWrapper cannot do and this one can, its error, and the rows concerned.
    (
        "batching of a batch with two dimensions",
        ValueError,
        "Batching not supported for batch_dims > 1",
        lambda call: bool(call.args.get("batching")) and len(call.shape) > 1,
    ),
    (
        "max_batch_size without min_batch_size",
        TypeError,
        "'>=' not supported",
        lambda call: "max_batch_size" in call.args and "batching" not in call.args,
    ),
    (
        "tensordict_out for a batch of other than one dimension",
        ValueError,
        "tensordict_out must not be provided",
        lambda call: call.target and len(call.shape) != 1,
    ),
    (
        "several samples for a batch of two dimensions",
        RuntimeError,
        "Cannot call `view`",
        lambda call: len(call.shape) > 1 and bool(call.generate and call.samples),
    ),
    (
        "another tokens_key than 'tokens' for ragged responses",
        KeyError,
        'key "tokens" not found',
        lambda call: (
            call.generate
            and call.mode != "text"
            and not call.padded
            and call.key("tokens") != "tokens"
        ),
    ),
    (
        "known tokens of different lengths",
        RuntimeError,
        "Failed to stack tensors",
        lambda call: call.beside and call.texts == TEXTS,
    ),
    (
        "ragged tokens to be padded",
        RuntimeError,
        "Failed to stack tensors",
        lambda call: call.mode == "tokens" and call.padded and call.dense is False,
    ),
)


def asks_for_prompt(call: Call) -> bool:
    return bool(call.sampling.get("prompt_logprobs"))


@pytest.mark.parametrize("name", CALLS)
def test_call(engine, vllm_engine, reference, name):
    call = CALLS[name]
    expected = expect(call, reference)
    ours = observe(call, call.make(SGLangWrapper, engine), reference.tokenizer)
    assert ours.keys() == expected.keys()
    wrong = {cell for cell in expected if not same(ours[cell], expected[cell])}
    assert not wrong, {cell: (ours[cell], expected[cell]) for cell in wrong}

    def theirs() -> Cells:
        wrapper = call.make(vLLMWrapper, vllm_engine)
        return observe(call, wrapper, reference.tokenizer)

    for _, error, words, concerns in FAILURES:
        if concerns(call):
            with pytest.raises(error, match=words):
                theirs()
            return
    other = theirs()
    differ = {cell for cell in ours if not same(ours[cell], other[cell])}
    known = {
        cell
        for difference in KNOWN_DIFFERENCES
        if difference.when(call, expected)
        for cell in difference.cells
    }
    assert differ == known


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if index % 3 else [])
        for index, name in enumerate(CALLS)
    ],
)
def test_device(engine, reference, name):
    """The same with an input that has a device: so have the results, all through."""
    call = replace(CALLS[name], device="cpu")
    expected = expect(call, reference)
    wrapper = call.make(SGLangWrapper, engine)
    cells = observe(call, wrapper, reference.tokenizer)
    wrong = {cell for cell in expected if not same(cells[cell], expected[cell])}
    assert not wrong, {cell: (cells[cell], expected[cell]) for cell in wrong}


@pytest.mark.parametrize("args", [{}, {"inplace": False}, {"num_samples": 2}])
def test_results_are_on_the_device_of_the_input(engine, args):
    """Every TensorDict in them, so that they can be put together with others."""
    td = conversation().to("cpu")
    policy = SGLangWrapper(
        engine, generate_kwargs=GREEDY, return_generation_info=True, **args
    )
    out = policy(td)
    assert set(devices(out)) == {torch.device("cpu")}
    elsewhere = policy.get_new_version(device="meta", inplace=False)(conversation())
    assert set(devices(elsewhere)) == {torch.device("meta")}
    # As the loop of a collector does.
    again = policy(lazy_stack([td[0], *conversation().to("cpu").unbind(0)]))
    assert set(devices(again)) == {torch.device("cpu")}


def devices(value: Any) -> Iterator[torch.device | None]:
    """Yields the device of a TensorDict and of all that is in it."""
    yield value.device
    if is_tensor_collection(value):
        inner = getattr(value, "_tensordict", value)
        parts = inner.tensordicts if isinstance(inner, LazyStackedTensorDict) else ()
        values = () if parts else inner.values()
        for part in (*parts, *values):
            yield from devices(part)


def test_responses_of_the_table_differ_in_length(reference):
    """Otherwise neither the padding of responses nor the end of a turn were seen."""
    for mode in ("history", "text", "tokens"):
        cells = expect(Call(mode=mode), reference)
        assert {3, NEW_TOKENS} == set(map(len, cells["tokens.response"]))
        assert len(set(map(len, cells["tokens.prompt"]))) == 3


def test_signatures():
    theirs = inspect.signature(vLLMWrapper).parameters
    ours = inspect.signature(SGLangWrapper).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in ours.items():
        if name in theirs:
            assert parameter.default == theirs[name].default, name
            assert parameter.kind is theirs[name].kind, name
        else:
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, name
            assert parameter.default is not inspect.Parameter.empty, name
    for name in ("forward", "get_new_version", "set_tokenizer", "log_prob"):
        kinds = [
            [
                (p.name, p.default, p.kind)
                for p in inspect.signature(of).parameters.values()
            ]
            for of in (getattr(SGLangWrapper, name), getattr(vLLMWrapper, name))
        ]
        assert kinds[0] == kinds[1], name


ATTRIBUTES = (
    "attention_mask_key",
    "batching",
    "chat_template",
    "chat_template_name",
    "collector",
    "dist_sample_keys",
    "generate",
    "history_key",
    "in_keys",
    "inplace",
    "input_key",
    "input_mode",
    "layout",
    "log_prob_keys",
    "log_probs_key",
    "masks_key",
    "num_samples",
    "out_keys",
    "pad_output",
    "padding_value",
    "prefer_tokens",
    "return_history",
    "return_log_probs",
    "return_masks",
    "return_text",
    "return_tokens",
    "text_key",
    "tokenizer",
    "tokens_key",
)
"""What TorchRL, or a caller who knows vLLMWrapper, may read."""

WRAPPERS: dict[str, tuple[Mapping[str, Any], Mapping[str, Any] | None, set[str]]] = {
    # name: (arguments, those of get_new_version or None, attributes that differ)
    "default": ({}, None, set()),
    "text": ({"input_mode": "text"}, None, set()),
    "tokens": ({"input_mode": "tokens"}, None, set()),
    # It scores by generating one token, which is no business of the caller's.
    "score": ({"generate": False}, None, {"max_tokens"}),
    "score text": ({"generate": False, "input_mode": "text"}, None, {"max_tokens"}),
    "no log-probs": ({"return_log_probs": False}, None, set()),
    "input key": ({"input_key": "question"}, None, set()),
    "keys": ({"history_key": "h", "tokens_key": "i"}, None, set()),
    "padded": ({"pad_output": True}, None, set()),
    "layout": ({"layout": torch.jagged}, None, set()),
    "padded layout": ({"pad_output": True, "layout": torch.jagged}, None, set()),
    "not in place": ({"inplace": False}, None, set()),
    "empty": ({"inplace": "empty"}, None, set()),
    "one sample": ({"num_samples": 1}, None, set()),
    "samples": ({"num_samples": 2}, None, set()),
    "n": ({"generate_kwargs": {"n": 2}}, None, set()),
    "n of one": ({"generate_kwargs": {"n": 1}}, None, set()),
    "old names win": (
        {"generate_kwargs": {"max_tokens": 3, "max_new_tokens": 9}},
        None,
        set(),
    ),
    "greedy": ({"generate_kwargs": {"do_sample": False}}, None, set()),
    "temperature": ({"generate_kwargs": {"temperature": 0.5}}, None, set()),
    "prefer tokens": ({"prefer_tokens": True}, None, set()),
    "template": ({"chat_template": TEMPLATE}, None, set()),
    "batching": ({"batching": True}, None, set()),
    "no batching": ({"batching": False}, None, set()),
    "batching by size": ({"min_batch_size": 2}, None, set()),
    # Scoring knows no samples: it may write in place. vLLMWrapper fails when called.
    "score samples": (
        {"generate": False, "num_samples": 2},
        None,
        {"inplace", "max_tokens"},
    ),
    "same": ({}, {}, set()),
    "to score": ({}, {"generate": False}, {"max_tokens"}),
    "to generate": ({"generate": False}, {"generate": True}, set()),
    "to text": ({}, {"input_mode": "text"}, set()),
    "to score tokens": (
        {},
        {"input_mode": "tokens", "generate": False},
        {"max_tokens"},
    ),
    "other mode, own key": ({"input_key": "q"}, {"input_mode": "text"}, set()),
    # It forgets a key that was given, though it still fits.
    "same mode, own key": (
        {"input_key": "q"},
        {"prefer_tokens": True},
        {"in_keys", "input_key"},
    ),
    # It keeps the layout that it chose for ragged output.
    "to padded": ({}, {"pad_output": True}, {"layout"}),
    "to ragged": ({"pad_output": True}, {"pad_output": False}, set()),
    "to no log-probs": ({}, {"return_log_probs": False}, set()),
    "keeps no log-probs": ({"return_log_probs": False}, {}, set()),
    "scores all the same": (
        {"return_log_probs": False},
        {"generate": False},
        {"max_tokens"},
    ),
    "to samples": ({"inplace": False}, {"num_samples": 2}, set()),
    "keeps samples": ({"num_samples": 2}, {}, set()),
    "other samples": ({"generate_kwargs": {"n": 2}}, {"num_samples": 3}, set()),
    "other keys": ({"tokens_key": "t"}, {"tokens_key": "u"}, set()),
    "keeps keys": ({"tokens_key": "t", "text_key": ("a", "b")}, {}, set()),
    # It loses what was asked of batching and of sampling.
    "keeps batching": ({"batching": True}, {}, {"batching"}),
    "keeps sampling": (
        {"generate_kwargs": {"max_new_tokens": 3, "temperature": 0.5}},
        {},
        {"max_tokens", "temperature"},
    ),
    "other sampling": ({}, {"generate_kwargs": {"max_new_tokens": 3}}, set()),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_attributes(engine, vllm_engine, name):
    arguments, changes, differ = WRAPPERS[name]

    def attributes(wrapper: type, engine: Any) -> Cells:
        made = wrapper(engine, **arguments)
        if changes is not None:
            made = made.get_new_version(**changes)
        cells = {name: getattr(made, name) for name in ATTRIBUTES}
        # Each engine brings its own copy.
        cells["tokenizer"] = type(made.tokenizer)
        cells["batching_state"] = made.get_batching_state()
        for parameter in ("max_tokens", "n", "temperature"):
            cells[parameter] = getattr(made.sampling_params, parameter)
        return cells

    ours = attributes(SGLangWrapper, engine)
    theirs = attributes(vLLMWrapper, vllm_engine)
    state = {"batching_state"} if "batching" in differ else set()
    assert {key for key in ours if ours[key] != theirs[key]} == differ | state


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A row of the table of errors: a wrong argument or a wrong input."""

    args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the wrapper."""
    td: Callable[[], Any] | None = None
    """Makes the input; by default one that is right in history mode."""
    call: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the call."""
    method: str = "__call__"
    """What is called."""
    message: str | None = None
    """Beginning of our message, where it is not vLLMWrapper's."""
    error: type[Exception] | None = None
    """Our error, where it is not vLLMWrapper's or vLLMWrapper raises none."""


def conversation() -> TensorDict:
    history = History.from_chats([[{"role": "user", "content": "hi"}]])
    container = ChatHistory(prompt=history, full=history, batch_size=1)
    return TensorDict(history=container, batch_size=1)


def something() -> TensorDict:
    return TensorDict(x=torch.zeros(1, 2), batch_size=1)


def sampling(**generate_kwargs: Any) -> Refusal:
    return Refusal(args={"generate_kwargs": generate_kwargs})


REFUSALS = {
    "mode": Refusal(args={"input_mode": "speech"}),
    "pad_model_input": Refusal(args={"pad_model_input": True}),
    "pad_model_input=False": Refusal(args={"pad_model_input": False}),
    "pad_output": Refusal(
        args={"pad_output": 1}, message="pad_output must be a bool, got 1"
    ),
    "score without log-probs": Refusal(
        args={"generate": False, "return_log_probs": False}
    ),
    # Other engines are possible.
    "model": Refusal(args={"model": 3}, message="model must be an RLSGLangEngine"),
    "tokenizer": Refusal(args={"tokenizer": "/no/where"}),
    "unknown argument": Refusal(args={"nonsense": 1}),
    "temperature": sampling(temperature=-1),
    # It compares the text with 0 and says that this cannot be done.
    "temperature's type": Refusal(
        args={"generate_kwargs": {"temperature": "hot"}},
        message="temperature must be a number, got 'hot'.",
        error=ValueError,
    ),
    "top_p": sampling(top_p=2),
    "top_k": sampling(top_k=0),
    "repetition_penalty": sampling(repetition_penalty=0),
    "greedy with temperature": sampling(do_sample=False, temperature=0.5),
    "n differs": Refusal(args={"num_samples": 2, "generate_kwargs": {"n": 3}}),
    "samples in place": Refusal(args={"num_samples": 2, "inplace": True}),
    "one sample in place": Refusal(args={"num_samples": 1, "inplace": True}),
    "samples into empty": Refusal(args={"num_samples": 2, "inplace": "empty"}),
    "n in place": Refusal(args={"generate_kwargs": {"n": 2}, "inplace": True}),
    # vLLM's own class is what refuses these; the name is the caller's here.
    "no samples": Refusal(
        args={"num_samples": 0},
        message="num_samples must be an integer of at least 1, got 0.",
    ),
    "fewer samples": Refusal(
        args={"num_samples": -1}, message="num_samples must be an integer of at least 1"
    ),
    "samples as a float": Refusal(
        args={"num_samples": 2.0},
        message="num_samples must be an integer of at least 1",
    ),
    # It takes it for one sample.
    "true samples": Refusal(
        args={"num_samples": True},
        message="num_samples must be an integer of at least 1, got True.",
        error=ValueError,
    ),
    "n of 0": Refusal(
        args={"generate_kwargs": {"n": 0}},
        message="num_return_sequences must be an integer of at least 1, got 0.",
    ),
    "max_tokens": Refusal(
        args={"generate_kwargs": {"max_tokens": -1}},
        message="The sampling parameter max_new_tokens=-1 is out of range",
    ),
    "batching with a size": Refusal(args={"batching": False, "min_batch_size": 1}),
    "batching with a limit": Refusal(args={"batching": False, "max_batch_size": 1}),
    "batch sizes": Refusal(args={"min_batch_size": 3, "max_batch_size": 2}),
    # It raises a RuntimeError, mostly without a word. All errors of arguments are
    # ValueErrors here.
    "attention mask": Refusal(
        args={"tokenizer_kwargs": {"return_attention_mask": False}},
        message="tokenizer_kwargs['return_attention_mask'] must be True",
        error=ValueError,
    ),
    "padding": Refusal(
        args={"tokenizer_kwargs": {"padding": True}},
        message="tokenizer_kwargs['padding'] must be False",
        error=ValueError,
    ),
    "padding side": Refusal(
        args={"tokenizer_kwargs": {"padding_side": "right"}},
        message="tokenizer_kwargs['padding_side'] must be 'left'",
        error=ValueError,
    ),
    # It drops a name that it does not know without a word.
    "unknown name": Refusal(
        args={"generate_kwargs": {"temprature": 1}},
        message="'temprature' is not a generation argument",
        error=ValueError,
    ),
    **{
        f"no {mode}, {generate=}": Refusal(
            args={"input_mode": mode, "generate": generate}, td=something
        )
        for mode in ("history", "text", "tokens")
        for generate in (True, False)
    },
    "other key": Refusal(args={"input_key": ("history", "response")}, td=something),
    "no History": Refusal(args={"input_key": "x"}, td=something),
    "no History to score": Refusal(
        args={"input_key": "x", "generate": False}, td=something
    ),
    # It fails on the way, with whatever error comes first.
    "no text": Refusal(
        args={"input_mode": "text", "input_key": "x"},
        td=something,
        message="Expected strings for 'x'",
    ),
    "no integers": Refusal(
        args={"input_mode": "tokens", "input_key": "x"},
        td=something,
        message="Expected one-dimensional integer tensors for 'x'",
        error=TypeError,
    ),
    "nothing": Refusal(
        td=lambda: TensorDict(batch_size=0),
        message="The batch of shape (0,) is empty",
        error=ValueError,
    ),
    # It fails on the way, with an AttributeError.
    "no TensorDict": Refusal(
        td=lambda: "hi", message="A policy takes a TensorDict", error=ValueError
    ),
    # Its keywords go to vLLM's class, where a wrong one is a TypeError.
    "unknown keyword": Refusal(
        call={"nonsense": 1},
        message="'nonsense' is not a generation argument",
        error=ValueError,
    ),
    # It ignores the request.
    "logits only": Refusal(
        call={"logits_only": True},
        message="SGLang does not return logits",
        error=NotImplementedError,
    ),
    **{
        method: Refusal(method=method, message="SGLang does not return logits")
        for method in (
            "get_dist",
            "get_dist_with_prompt_mask",
            "_get_dist_with_assistant_mask",
            "_get_dist_with_attention_mask",
            "_get_sft_dist",
            "_get_rlhf_dist",
            "_get_generic_dist",
        )
    },
    "custom mask": Refusal(
        method="_get_dist_with_custom_mask",
        call={"mask": None},
        message="SGLang does not return logits",
    ),
    "log_prob": Refusal(method="log_prob"),
    "log_prob without input": Refusal(
        method="log_prob", args={"generate": False}, td=something
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(engine, vllm_engine, name):
    case = REFUSALS[name]

    def attempt(wrapper: type, engine: Any) -> Exception | None:
        arguments = {"model": engine, **case.args}
        td = (case.td or conversation)()
        try:
            getattr(wrapper(**arguments), case.method)(td, **case.call)
        except Exception as error:
            return error
        return None

    ours = attempt(SGLangWrapper, engine)
    theirs = attempt(vLLMWrapper, vllm_engine)
    expected = str(theirs).replace("vLLMWrapper", "SGLangWrapper")
    message = expected if case.message is None else case.message
    if case.error is None:
        assert theirs is not None
        assert isinstance(ours, type(theirs))
    else:
        assert isinstance(ours, case.error)
        assert not isinstance(theirs, case.error)
    assert str(ours).startswith(message)
