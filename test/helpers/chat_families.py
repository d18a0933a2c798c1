"""Chat templates of model families, with small tokenizers, and what their models write.

The templates are those that the families publish; only their instructions to the model
are shortened. A tokenizer has the family's special tokens and one token for each byte
or character.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = Path(__file__).parents[1] / "llm/chat/templates"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family of models."""

    special: tuple[str, ...]
    """Special tokens."""
    end: str
    """The token that ends a response."""
    calls: str = ""
    """A tool call of the model, with ``@name``, ``@arguments`` and ``@id``."""
    around: tuple[str, str, str] = ("", "", "")
    """What is before, between and after calls."""
    bos: str | None = None
    """The token that begins a conversation."""
    thinks: bool = False
    """Whether it writes reasoning."""
    pieces: bool = False
    """Whether its tokenizer puts a space before a text, as SentencePiece does."""
    texts: bool = False
    """Whether the template takes arguments as texts, and no content beside calls."""

    def write(
        self,
        content: str = "",
        *,
        reasoning: str | None = None,
        calls: Sequence[Mapping[str, Any]] = (),
        style: str = "",
    ) -> str:
        """Returns what the model writes; ``style`` "odd" is JSON of other habits."""
        text = content
        if reasoning is not None:
            text = f"<think>\n{reasoning}\n</think>\n\n{text}"
        if not calls:
            return text
        if content and self.around[0].startswith("<tool"):
            text += "\n"
        written = [
            self.calls.replace("@name", call["function"]["name"])
            .replace("@id", call["id"])
            .replace("@arguments", _json(call["function"]["arguments"], style))
            for call in calls
        ]
        before, between, after = self.around
        return text + before + between.join(written) + after


def _json(arguments: Any, style: str) -> str:
    if style != "odd":
        return json.dumps(arguments, ensure_ascii=False)
    turned = dict(reversed(arguments.items()))
    return json.dumps(turned, separators=(",", ":"), ensure_ascii=True)


_QWEN = Family(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    end="<|im_end|>",
    calls='<tool_call>\n{"name": "@name", "arguments": @arguments}\n</tool_call>',
    around=("", "\n", ""),
)
_MISTRAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
)


def _deepseek(name: str) -> str:
    """Returns a special token of DeepSeek."""
    return f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")


_DEEPSEEK = {
    "special": tuple(
        _deepseek(name)
        for name in (
            *("begin of sentence", "end of sentence", "User", "Assistant"),
            *("tool calls begin", "tool calls end", "tool call begin"),
            *("tool call end", "tool outputs begin", "tool outputs end"),
            *("tool output begin", "tool output end", "tool sep"),
        )
    ),
    "bos": _deepseek("begin of sentence"),
    "end": _deepseek("end of sentence"),
    "calls": (
        _deepseek("tool call begin")
        + "function"
        + _deepseek("tool sep")
        + "@name\n```json\n@arguments\n```"
        + _deepseek("tool call end")
    ),
    "around": (_deepseek("tool calls begin"), "\n", _deepseek("tool calls end")),
    "texts": True,
}
_MISTRAL_CALL = '{"name": "@name", "arguments": @arguments, "id": "@id"}'
_GEMMA = {
    "special": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    "bos": "<bos>",
    "end": "<end_of_turn>",
}

FAMILIES: dict[str, Family] = {
    "chatml": _QWEN,
    "qwen2.5": _QWEN,
    "qwen3": Family(**{**vars(_QWEN), "thinks": True}),
    "llama3.1": Family(
        special=(
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
        ),
        bos="<|begin_of_text|>",
        end="<|eot_id|>",
        calls='{"name": "@name", "parameters": @arguments}',
    ),
    "mistral-v3": Family(
        special=_MISTRAL_TOKENS,
        bos="<s>",
        end="</s>",
        calls=_MISTRAL_CALL,
        around=("[TOOL_CALLS] [", ", ", "]"),
        pieces=True,
    ),
    "mistral-nemo": Family(
        special=_MISTRAL_TOKENS,
        bos="<s>",
        end="</s>",
        calls=_MISTRAL_CALL,
        around=("[TOOL_CALLS][", ", ", "]"),
    ),
    "deepseek-v3": Family(**_DEEPSEEK),
    "deepseek-r1": Family(**_DEEPSEEK, thinks=True),
    "gemma2": Family(**_GEMMA),
    "gemma3": Family(**_GEMMA),
}


@cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a family, with its template."""
    family = FAMILIES[name]
    backend = _pieces() if family.pieces else _bytes()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos,
        eos_token=family.end,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_tokens([AddedToken(each, special=True) for each in family.special])
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text()
    return tokenizer


PLAIN = {
    "inst": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}"
        "{% endif %}{% endfor %}"
    ),
    "mistral-v0.1": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "{{ ' [INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
    ),
}
"""Templates whose ``[INST]`` is a text, not a token."""


@cache
def plain_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of pieces with one of these templates."""
    # Llama 2's puts a space behind each special token, too.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_pieces("always" if name == "llama2" else "first"),
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    tokens = [AddedToken(each, special=True) for each in ("<s>", "</s>")]
    tokenizer.add_tokens(tokens)
    tokenizer.chat_template = PLAIN[name]
    return tokenizer


def _bytes() -> Tokenizer:
    """Returns a tokenizer of bytes, as Qwen's and Llama's without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _pieces(scheme: str = "first") -> Tokenizer:
    """Returns a tokenizer of characters and bytes that begins texts with a space."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    tokens += string.digits + string.ascii_letters + string.punctuation
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def render_as_transformers(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    source: str | None = None,
    **variables: Any,
) -> str:
    """Returns the text of a prompt for what follows the messages.

    From 5.24 on, ``apply_chat_template`` leaves out what is None, and DeepSeek's
    templates fail without a content that is; what it calls keeps that.
    """
    if any(None in message.values() for message in messages):
        (text,), _ = render_jinja_template(
            conversations=[list(messages)],
            tools=tools,
            chat_template=source or tokenizer.chat_template,
            add_generation_prompt=True,
            **{**tokenizer.special_tokens_map, **variables},
        )
    else:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=source,
            tokenize=False,
            add_generation_prompt=True,
            **variables,
        )
    assert isinstance(text, str)
    return text
