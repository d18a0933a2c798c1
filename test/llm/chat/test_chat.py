"""Conversations to token ids: templates of many kinds, compared with transformers."""

from __future__ import annotations

import copy
import json
import re
from itertools import groupby

import pytest
from helpers.chat_families import FAMILIES, family_tokenizer
from helpers.talk import ARGUMENTS, call, result
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.data.llm.history import _CHAT_TEMPLATES
from torchrl.modules.llm.policies import ChatHistory
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from torchrl_sglang.chat.choose import choose_template
from torchrl_sglang.chat.masks import encode_full
from torchrl_sglang.chat.messages import read_messages
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.chat.tokens import decode
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.policies.inputs import read_history, to_messages
from torchrl_sglang.testing.tiny_model import CHAT_TEMPLATE, make_tiny_tokenizer

CHATS = [
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes: hi"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hi"},
    ],
    [{"role": "system", "content": "yo"}, {"role": "user", "content": "2+2"}],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
]
UNMARKED = CHAT_TEMPLATE.replace("{% generation %}", "").replace(
    "{% endgeneration %}", ""
)
ASSISTANT_OF_R1 = FAMILIES["deepseek-r1"].special[3]
# Drops what was thought in earlier turns, as templates of reasoning models do.
FORGETFUL = (
    "{% for m in messages %}{{ m['role'] + ': ' }}"
    "{% if m['role'] == 'assistant' and not loop.last and ':' in m['content'] %}"
    "{{ m['content'].split(': ')[-1] }}{% else %}{{ m['content'] }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def marked(ids, mask, tokenizer) -> str:
    return tokenizer.decode([i for i, bit in zip(ids, mask, strict=True) if bit])


def test_markers_are_not_needed(tokenizer):
    """The mask without markers is the one that transformers makes with them."""
    assert "generation %}" not in UNMARKED
    texts, token_ids, masks = encode_full(CHATS, ChatTemplate(tokenizer, UNMARKED))
    reference = tokenizer.apply_chat_template(
        CHATS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert token_ids == reference["input_ids"]
    assert masks == [[bool(bit) for bit in row] for row in reference["assistant_masks"]]
    assert encode_full(CHATS, ChatTemplate(tokenizer, CHAT_TEMPLATE)) == (
        texts,
        token_ids,
        masks,
    )


def test_a_template_that_rewrites_earlier_turns(tokenizer):
    _, token_ids, masks = encode_full(CHATS, ChatTemplate(tokenizer, FORGETFUL))
    found = [
        marked(ids, mask, tokenizer) for ids, mask in zip(token_ids, masks, strict=True)
    ]
    # Also what the template leaves of an earlier turn.
    assert found == ["hi<|im_end|>" * 2, "", "<|im_end|>"]


def between_marks(ids, mask, tokenizer) -> str:
    """Returns the text of tokens, with «» around what is masked."""
    runs = groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])
    texts = [(bit, tokenizer.decode([i for i, _ in pairs])) for bit, pairs in runs]
    return "".join(f"«{text}»" if bit else text for bit, text in texts)


THOUGHT = "<think>\n5=4+1, yes\n</think>\n\n"


@pytest.mark.parametrize("thought", ["", THOUGHT], ids=["plain", "reasoning"])
@pytest.mark.parametrize("answers", [("yes", "no"), ("5", "<third>"), ("<", "Hi\n\na")])
@pytest.mark.parametrize("tail", [0, 1], ids=["assistant last", "user last"])
@pytest.mark.parametrize("name", FAMILIES)
def test_masks_lie_where_the_template_writes_a_turn(name, tail, answers, thought):
    """Other messages have the same texts. Transformers renders them marked."""
    tokenizer, end = family_tokenizer(name), FAMILIES[name].end

    def chat(mark):
        users = ["Say yes or no: 5", "<third> Hi yes</think>no <", "yes"]
        messages = []
        for question, answer in zip(users, answers, strict=False):
            messages.append({"role": "user", "content": question})
            content = thought + mark + answer
            messages.append({"role": "assistant", "content": content})
        return [*messages, {"role": "user", "content": users[-1]}][: 4 + tail]

    expected = tokenizer.apply_chat_template(chat("«"), tokenize=False)
    # The turn also has what the template writes between its header and the answer.
    before = f" ?<think>[^<]*</think>\n*| |{re.escape(ASSISTANT_OF_R1)}\n+"
    expected = re.sub(f"({before})?«", r"«\1", expected)
    expected = expected.replace(f"«{ASSISTANT_OF_R1}", f"{ASSISTANT_OF_R1}«")
    expected = re.sub(f"(«.*?{re.escape(end)})", r"\1»", expected, flags=re.DOTALL)
    template = ChatTemplate(tokenizer)
    (text,), (ids,), (mask,) = encode_full([chat("")], template)
    assert text == tokenizer.apply_chat_template(chat(""), tokenize=False)
    assert between_marks(ids, mask, tokenizer) == expected


@pytest.mark.parametrize("content", [None, ""])
@pytest.mark.parametrize("name", FAMILIES)
def test_masks_of_tool_calls(name, content):
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    template = ChatTemplate(tokenizer)
    reply = {"content": content, "tool_calls": [call(0)]}
    if family.texts:
        arguments = json.dumps(ARGUMENTS, ensure_ascii=False)
        reply["tool_calls"][0]["function"]["arguments"] = arguments
    chat = [
        {"role": "user", "content": "weather sunny?"},
        {"role": "assistant", **reply},
        result(0),
        {"role": "assistant", "content": "sunny"},
        {"role": "user", "content": "sunny"},
    ]
    said = read_messages(chat, "it")
    if not family.around[0] and name != "llama3.1" and "gemma" in name:
        with pytest.raises(ConfigurationError, match="take turns"):
            encode_full([said], template)
        return
    (text,), (ids,), (mask,) = encode_full([said], template)
    if name in ("deepseek-v3", "deepseek-r1"):
        # With a content beside them, the calls would be lost.
        chat[1]["content"] = None
    if not (content is None and name in ("chatml", "qwen3")):
        # These want a text.
        (wanted,), _ = render_jinja_template(
            conversations=[chat],
            chat_template=tokenizer.chat_template,
            **tokenizer.special_tokens_map,
        )
        assert text == wanted
    runs = re.findall("«(.*?)»", between_marks(ids, mask, tokenizer), re.DOTALL)
    written = "" if name == "chatml" else family.write(calls=[call(0)])
    answer = " sunny" if name == "mistral-v3" else "sunny"
    assert runs == [written + family.end, answer + family.end]


HEADER, FOOTER = "{% for m in messages %}<{{ m.role }}>", "{{ eos_token }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
NAMES = "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %}"
RESULTS = (
    "{% for t in messages[loop.index:] %}{% if t.role != 'tool' %}{% break %}"
    "{% endif %}[{{ t.content }}]{% endfor %}"
)
CALLER = (
    "{% for o in messages %}{% for c in o.tool_calls if c.id == m.tool_call_id %}"
    "{{ c.function.name }}={% endfor %}{% endfor %}"
)
SPLIT = (
    "{% macro split(x) %}{% for p in x.split('|') %}{{ p }}{% endfor %}{% endmacro %}"
)
REFUSES = (
    "{% if messages | selectattr('role', 'eq', 'user') | list | length == 0 %}"
    "{{ raise_exception('No user query') }}{% endif %}"
)
MERGED = HEADER.replace("messages", "messages[1:]") + (
    "{{ messages[0].content if loop.first else '' }}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            HEADER + "{{ m.content }}" + NAMES + RESULTS + FOOTER,
            "<assistant>«hello.»<user>q.<assistant>«(f)»[r]«.»<tool>r.<assistant>«yes.»",
        ),
        (
            HEADER + CALLER + "{{ m.content }}" + NAMES + FOOTER,
            "<assistant>«hello.»<user>q.<assistant>«(f).»<tool>f=r.<assistant>«yes.»",
        ),
        (
            SPLIT + HEADER + "{{ split(m.content) | trim }}" + NAMES + FOOTER,
            "<assistant>«hello.»<user>q.<assistant>«(f).»<tool>r.<assistant>«yes.»",
        ),
        (
            SPLIT + HEADER + "{% set x = split(m.content) %}{{ x or '-' }}" + FOOTER,
            "<assistant>«hello.»<user>q.<assistant>«-.»<tool>r.<assistant>«yes.»",
        ),
    ],
    ids=["results in the turn", "names of calls", "trimmed macro", "empty macro"],
)
@pytest.mark.parametrize("refuses", ["", REFUSES], ids=["", "no first question"])
@pytest.mark.parametrize("system", [False, True], ids=["", "merged system"])
def test_masks_of_templates_with_loops_in_loops(
    tokenizer, source, expected, refuses, system
):
    chat = [
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call(0)]},
        result(0) | {"content": "r"},
        {"role": "assistant", "content": "yes"},
    ]
    expected = expected.replace("(f)", f"({call(0)['function']['name']})")
    expected = expected.replace("f=", f"{call(0)['function']['name']}=")
    if system:
        chat = [{"role": "system", "content": "S"}, *chat]
        source = source.replace(HEADER, MERGED).replace("[loop.", "[1 + loop.")
        expected = expected.replace("«", "«S", 1)
    template = ChatTemplate(tokenizer, refuses + source + PROMPT)
    _, (ids,), (mask,) = encode_full([chat], template)
    assert between_marks(ids, mask, tokenizer).replace("<|im_end|>", ".") == expected


TURN = (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.function.name }}){% endfor %}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content + eos_token }}{% endif %}"
)
AFTER_RESULTS = "{{ '</tool>' if loop.previtem and loop.previtem.role == 'tool' }}"
NEXT = "{% if loop.nextitem %}<{{ loop.nextitem.role }}>{% endif %}"
NEXT_TEXT = "{{ loop.nextitem.content if loop.nextitem }}"
NEEDS_CALLS = (
    "{% if m.role == 'tool' and not loop.previtem.tool_calls %}"
    "{{ raise_exception('A result without a call') }}{% endif %}"
)


@pytest.mark.parametrize(
    "source",
    [
        HEADER + TURN + "{% if loop.last %}" + PROMPT + "{% endif %}{% endfor %}",
        HEADER.replace("<", "{% if loop.first %}<").replace(">", ">{% endif %}")
        + TURN
        + (NEXT + "{% endfor %}" + PROMPT),
        HEADER
        + TURN.replace("eos_token }}{% endg", "eos_token + '<|end|>' }}{% endg")
        + ("{% endfor %}{{ eos_token }}" + PROMPT),
        HEADER.replace("<", "{{ bos_token or '^' if loop.first }}<")
        + (TURN + "{% endfor %}" + PROMPT),
        HEADER.replace("<", AFTER_RESULTS + "<") + TURN + "{% endfor %}" + PROMPT,
        HEADER + NEEDS_CALLS + TURN + "{% endfor %}" + PROMPT.replace("t>", "t><x>"),
    ],
    ids=[
        "prompt in the last pass",
        "header of the next message",
        "two end tokens",
        "begin of the text in the first pass",
        "end of results in the next pass",
        "results need calls",
    ],
)
@pytest.mark.parametrize("first", [0, 1], ids=["user first", "assistant first"])
def test_masks_of_headers_in_other_passes(tokenizer, source, first):
    """Transformers makes the same masks of the template with ``generation`` blocks."""
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<assistant>hello"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hm", "tool_calls": [call(0)]},
        result(0) | {"content": "<user>"},
        {"role": "assistant", "content": "<|im_end|>"},
        {"role": "user", "content": "<|im_end|>"},
    ][first:]
    reference = tokenizer.apply_chat_template(
        chat,
        chat_template=source,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    unmarked = re.sub("{% (end)?generation %}", "", source)
    template = ChatTemplate(tokenizer, unmarked)
    _, (ids,), (mask,) = encode_full([chat], template)
    assert ids == reference["input_ids"]
    expected = between_marks(ids, reference["assistant_masks"], tokenizer)
    assert between_marks(ids, mask, tokenizer) == expected


LOOP = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for i in range(4) %}{{ messages[i].content }}{% endfor %}", "in 0 passes"),
        (f"{LOOP}{LOOP}", "in 2 passes"),
        (f"{{% set x %}}{LOOP}{{% endset %}}{{{{ x | length }}}}", "other texts"),
        (
            HEADER + "{{ m.content }}" + NEXT_TEXT + FOOTER + PROMPT,
            "message 1 writes other messages",
        ),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}" + PROMPT,
            "message 1 begins without the generation prompt",
        ),
    ],
)
def test_positions_that_a_template_does_not_show(tokenizer, source, reason):
    with pytest.raises(ConfigurationError, match=rf"{reason}.*{{% generation %}}"):
        encode_full(CHATS[:1], ChatTemplate(tokenizer, source))


def test_an_end_behind_the_loop_and_a_loop_that_is_left(tokenizer):
    source = (
        "{% for m in messages %}{{ m.role + ':' }}{% if not m.content %}{% continue %}"
        "{% endif %}{{ m.content }}{% if loop.last %}{% break %}{% endif %}{{ '\n' }}"
        "{% endfor %}{{ eos_token }}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    _, (ids, *_), (mask, *_) = encode_full(CHATS, ChatTemplate(tokenizer, source))
    found = between_marks(ids, mask, tokenizer)
    assert found == "user:hi\nassistant:«yes: hi»\nuser:hi\nassistant:«hi<|im_end|>»"


def test_a_slow_tokenizer(tokenizer):
    """Without character offsets the pieces are measured."""

    class Slow:
        is_fast = False

        def __getattr__(self, name):
            return getattr(tokenizer, name)

    fast = encode_full(CHATS, ChatTemplate(tokenizer, UNMARKED))
    assert encode_full(CHATS, ChatTemplate(Slow(), UNMARKED)) == fast


def named(tokenizer, name, template):
    other = copy.deepcopy(tokenizer)
    other.name_or_path = name
    other.chat_template = template
    return other


@pytest.mark.parametrize(
    ("name", "own", "chosen"),
    [
        ("my/model", UNMARKED, UNMARKED),  # TorchRL would read it as ChatML.
        ("my/model", CHAT_TEMPLATE, CHAT_TEMPLATE),
        # The trainer uses TorchRL's template for models that it knows.
        ("Qwen/Qwen2.5-0.5B", UNMARKED, _CHAT_TEMPLATES["qwen"]),
        ("tiiuae/falcon-7b", None, _CHAT_TEMPLATES["falcon"]),
    ],
)
def test_which_template(tokenizer, name, own, chosen):
    tokenizer = named(tokenizer, name, own)
    assert choose_template(tokenizer, by_model=True) == chosen
    mine = "{{ messages }}"
    assert choose_template(tokenizer, by_model=True, template=mine) == mine
    with pytest.raises(ConfigurationError, match="the text of a file"):
        choose_template(tokenizer, template="chat.jinja")
    if own is not None:
        # As a gateway chooses.
        assert choose_template(tokenizer) == own
    chatml = choose_template(tokenizer, name="chatml_format")
    assert chatml == _CHAT_TEMPLATES["chatml_format"]


def test_no_template_is_an_error(tokenizer):
    tokenizer = named(tokenizer, "my/model", None)
    with pytest.raises(ConfigurationError, match=r"my/model.*no chat template.*Pass"):
        choose_template(tokenizer, by_model=True)
    with pytest.raises(ConfigurationError, match=r"'qwne' must be one of .*qwen"):
        choose_template(tokenizer, name="qwne")


def test_a_template_that_refuses(tokenizer):
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ConfigurationError, match="roles must alternate"):
        ChatTemplate(tokenizer, strict).render(CHATS[0])


@pytest.mark.parametrize(
    "extra", [{}, {"tool_calls": [{"name": "f", "arguments": {"x": 1}}]}]
)
def test_messages_are_those_of_torchrl(extra):
    message = {"role": "assistant", "content": "a", **extra}
    history = History.from_chats([[{"role": "user", "content": "hi"}, message]])[0]
    wanted = history.tolist(tolist_first=True)
    if extra:
        # In OpenAI's form, from which each template gets its own.
        (own,) = wanted[1]["tool_calls"]
        wanted[1]["tool_calls"] = [{"id": "", "type": "function", "function": own}]
    assert to_messages(history) == wanted
    padded = history.append(
        History(role="<none>", content="", batch_size=()), inplace=False, dim=-1
    )
    assert to_messages(padded) == to_messages(history)


def said(text):
    return [{"role": "user", "content": text}]


def go_on(text, known, tokenizer):
    return ChatTemplate(tokenizer).go_on(text, said(text), known)


def merging_tokenizer():
    """The tiny tokenizer, to which ``12`` is one token, as to most tokenizers."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["12"])
    return tokenizer


def test_generated_tokens_are_not_tokenized_again():
    tokenizer = merging_tokenizer()
    one, two, twelve = (
        tokenizer.convert_tokens_to_ids(token) for token in ("1", "2", "12")
    )
    text = "12<|im_end|>\n"
    fresh = tokenizer.encode(text)
    assert fresh[0] == twelve
    kept = go_on(text, [one, two], tokenizer)
    assert kept == [one, two, *fresh[1:]]
    assert tokenizer.decode(kept) == text


def test_known_tokens_of_something_else_are_not_used():
    tokenizer = make_tiny_tokenizer()
    assert go_on("abc", tokenizer.encode("abx"), tokenizer) is None
    assert go_on("abc", tokenizer.encode("ab"), tokenizer) == tokenizer.encode("abc")
    # Nothing that is known, and white space, are the beginning of anything.
    assert go_on("abc", [], tokenizer) is None
    assert go_on("abc", tokenizer.encode("\n"), tokenizer) is None


@pytest.mark.parametrize("padded", [False, True])
def test_known_tokens_stay(tokenizer, padded):
    """Padding behind them is not meant."""
    template = ChatTemplate(tokenizer)
    known = tokenizer.encode(template.render(CHATS[0][:1]) + "yes: hi<|im_end|>")
    td = TensorDict(
        history=ChatHistory(prompt=History.from_chats([CHATS[0][:3]])), batch_size=1
    )
    found = read_history(
        td,
        ("history", "prompt"),
        template=template,
        known_tokens=[[*known, *[tokenizer.pad_token_id] * padded]],
        padding_value=tokenizer.pad_token_id,
        generate=True,
    )
    assert found.token_ids == [tokenizer.encode(template.render(CHATS[0][:3]))]


@pytest.mark.parametrize("skip", [False, True])
def test_text_is_that_of_the_tokenizer(tokenizer, skip):
    rows = [[*tokenizer.encode("a , b"), tokenizer.eos_token_id], [], [5]]
    texts = tokenizer.batch_decode(
        rows, skip_special_tokens=skip, clean_up_tokenization_spaces=False
    )
    assert decode(tokenizer, rows, skip_special_tokens=skip) == texts


def test_text_of_a_tokenizer_with_a_decoder_of_its_own():
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *arguments, **options):
            return super()._decode(*arguments, **options).upper()

    shouting = Shouting(tokenizer_object=make_tiny_tokenizer().backend_tokenizer)
    assert decode(shouting, [shouting.encode("abc")]) == ["ABC"]
