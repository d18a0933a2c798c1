"""Fields of requests: honoured, refused for a reason, or named as without effect."""

from __future__ import annotations

import json
from contextlib import contextmanager

import openai
import pytest
from helpers.fake_server import FakeServer
from helpers.gateway_client import (
    CHAT,
    HELLO,
    MESSAGES,
    anthropic_client,
    openai_client,
    post,
)
from helpers.tool_template import TOOL_TEMPLATE

from torchrl_sglang import AsyncSGLang, Gateway
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.routes.sessions import IGNORED

COUNT = "/v1/messages/count_tokens"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
NAMES = ("weather", "final")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in NAMES
]
AS_ANTHROPIC = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SAID = "<think>hm</think>so" + CALL
KNOWS = (
    "{{ reasoning_effort }}{{ verbosity }}{{ enable_thinking }}{{ thinking_budget }}"
)
BARE = "{% for each in messages %}{{ each.content }}{% endfor %}"
"""The fake server says what it is asked."""

THINKS = BARE.replace(
    "{{ each.content }}",
    "{% if each.reasoning_content %}<think>{{ each.reasoning_content }}</think>"
    "{% endif %}{{ each.content }}",
)


@pytest.fixture
def fake(tiny_model_path):
    with FakeServer(
        tiny_model_path, server_args={"grammar_backend": "xgrammar"}, context=8192
    ) as server:
        yield server


@contextmanager
def gateway_of(fake, **arguments):
    given = {"tool_call_parser": "qwen25", "chat_template": TOOL_TEMPLATE, **arguments}
    with AsyncSGLang.connect(fake.url) as engine, Gateway(engine, **given) as gateway:
        yield gateway


@pytest.fixture
def gateway(fake):
    with gateway_of(fake) as gateway:
        yield gateway


@pytest.fixture
def session(gateway):
    return gateway.session()


def sent(fake):
    """Sampling parameters of the last response, without requests that score it."""
    params = [payload["sampling_params"] for payload in fake.payloads()]
    rows = [each[0] if isinstance(each, list) else each for each in params]
    return [each for each in rows if each["max_new_tokens"]][-1]


def tag_of(fake):
    return json.loads(sent(fake)["structural_tag"])["format"]


def names_in(tag):
    """Names of the tools in a structural tag."""
    return [
        name
        for name in NAMES
        if f'"name": "{name}"' in json.dumps(tag).replace("\\", "")
    ]


# Choices of tools.


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    about = {"mode": mode, "tools": [named(name) for name in names]}
    return {"type": "allowed_tools", "allowed_tools": about}


FORCED, FREE = "tags_with_separator", "triggered_tags"
ONE_CALL = {"parallel_tool_calls": False}
FINAL = ("final",)


def choose(choice, **more):
    return {"tool_choice": choice, **more}


def of_type(kind, **more):
    """A choice of Anthropic's."""
    return {"tool_choice": {"type": kind, **more}}


ALONE = {"disable_parallel_tool_use": True}


@pytest.mark.parametrize(
    ("path", "fields", "kind", "single", "names"),
    [
        (CHAT, choose("required"), FORCED, False, NAMES),
        (CHAT, choose(named("final")), FORCED, True, FINAL),
        (CHAT, choose(allowed("auto", "final")), FREE, False, FINAL),
        (CHAT, choose(allowed("required", "final")), FORCED, False, FINAL),
        (CHAT, ONE_CALL, FREE, True, NAMES),
        (CHAT, choose("required", **ONE_CALL), FORCED, True, NAMES),
        (MESSAGES, of_type("any"), FORCED, False, NAMES),
        (MESSAGES, of_type("tool", name="final"), FORCED, True, FINAL),
        (MESSAGES, of_type("auto", **ALONE), FREE, True, NAMES),
        (MESSAGES, of_type("any", **ALONE), FORCED, True, NAMES),
    ],
)
def test_a_choice_of_tools_is_a_grammar(
    fake, session, path, fields, kind, single, names
):
    """The grammars themselves are judged by XGrammar, in test_call_grammars.py."""
    tools = TOOLS if path == CHAT else AS_ANTHROPIC
    answer = post(session, path, tools=tools, **fields)
    assert answer.status_code == 200, answer.text
    assert IGNORED not in answer.headers
    tag = tag_of(fake)
    assert (tag["type"], tag["stop_after_first"]) == (kind, single)
    assert names_in(tag) == list(names)
    # All tools are in the prompt, so that the choice of a turn makes no branch.
    assert len(session.turns[0].prompt.setting.tools) == len(NAMES)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, choose("auto", parallel_tool_calls=True)),
        (CHAT, choose("none", **ONE_CALL)),
        (MESSAGES, of_type("auto")),
        (MESSAGES, of_type("none")),
        (MESSAGES, of_type("auto", disable_parallel_tool_use=False)),
    ],
)
def test_a_model_that_decides_alone_has_no_grammar(fake, session, path, fields):
    answer = post(
        session, path, tools=TOOLS if path == CHAT else AS_ANTHROPIC, **fields
    )
    assert answer.status_code == 200, answer.text
    assert "structural_tag" not in str(sent(fake))
    assert IGNORED not in answer.headers


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, choose(named("other")), "'other', and tools has weather, final"),
        (CHAT, choose(allowed("auto")), "allowed_tools with a mode"),
        (CHAT, choose("any"), "'required'"),
        (CHAT, choose("required", tools=[]), "needs tools"),
        (CHAT, choose("required", regex="a"), "one of its own, regex"),
        (MESSAGES, of_type("tool", name="x"), "names 'x'"),
        (MESSAGES, {**of_type("any"), "tools": []}, "needs tools"),
        (MESSAGES, of_type("all"), "auto, any, tool or none"),
    ],
)
def test_wrong_choices(fake, session, path, fields, words):
    tools = TOOLS if path == CHAT else AS_ANTHROPIC
    answer = post(session, path, **{"tools": tools, **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert not fake.payloads()


def test_how_reasoning_is_shown_is_never_refused(fake, session):
    """A newer client asks for a display that is not known here."""
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "updates"}
    answer = post(session, MESSAGES, thinking=thinking)
    assert answer.status_code == 200
    assert "thinking.display" in answer.headers[IGNORED]
    answer = post(session, "/v1/responses", messages=None, input="a", include=["x"])
    assert answer.status_code == 200, answer.text
    assert "include" in answer.headers[IGNORED]


def test_deferred_tools_are_offered_when_they_were_found(fake, session):
    """The model searches for them, and the result refers to them by name."""
    search, weather, other = (
        {"name": name, "input_schema": SCHEMA, "defer_loading": name != "search"}
        for name in ("search", "weather", "other")
    )
    asks = {"role": "user", "content": "hello"}
    use = {"type": "tool_use", "id": "1", "name": "search", "input": {"city": "a"}}
    found = {"type": "tool_reference", "tool_name": "weather"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [found]}
    before = [asks]
    after = [
        asks,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    offered = []
    for messages in (before, after):
        about = {"messages": messages, "tools": [search, weather, other]}
        answer = post(session, MESSAGES, **about)
        assert answer.status_code == 200, answer.text
        assert IGNORED not in answer.headers
        count = post(session, COUNT, **about).json()["input_tokens"]
        turn = session.turns[-1]
        assert count == turn.prompt.num_tokens
        offered.append([tool["function"]["name"] for tool in turn.tools])
    assert offered == [["search"], ["search", "weather"]]


def nested(levels):
    """Returns a schema of arrays; texts with brackets are no levels."""
    inner = '{"description": "]]}}"}'
    begin = '{"type": "array", "description": "}]}]", "items": '
    return json.loads(begin * levels + inner + "}" * levels)


def of_schema(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def offered(schema):
    function = {"name": "a", "parameters": schema}
    return {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        (CHAT, {"stop_regex": "(?:.|.|\\n)*x"}, "stop_regex is not taken"),
        (CHAT, {"stop_regex": ["a"]}, "Use stop"),
        (CHAT, {"stop": [str(n) for n in range(33)]}, "stop has 33 texts"),
        (MESSAGES, {"stop_sequences": ["a" * 1025]}, "a text of 1025 characters"),
        (CHAT, {"response_format": of_schema(nested(300))}, "levels of brackets"),
        (
            MESSAGES,
            {"output_config": {"format": of_schema(0) | {"schema": nested(300)}}},
            "levels of brackets",
        ),
        (CHAT, {"regex": "(" * 101 + "a" + ")" * 101}, "regex has 101 levels"),
        (CHAT, {"ebnf": 'root ::= ")" ' + "(" * 101}, "ebnf has 101 levels"),
        (CHAT, {"structural_tag": "[" * 101 + "]" * 101}, "levels of brackets"),
        (CHAT, {"regex": "a" * 200_001}, "regex has 200001 characters"),
        (CHAT, offered(nested(150)), "structural_tag has 101 levels"),
    ],
)
def test_work_without_a_bound_is_refused(fake, session, path, fields, words):
    """Servers are shared by all sessions, and a key is of one."""
    answer = post(session, path, **fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert not fake.payloads()


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["a" * 1024] * 32},
        {"response_format": of_schema(nested(40))},
        {"regex": "[(]" * 200 + r"\(" * 200},
        {"ebnf": 'root ::= "' + "(" * 200 + '"'},
    ],
)
def test_work_within_its_bounds_is_not(fake, session, fields):
    answer = post(session, **fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("kind", ["default_sampling_params", "forced_sampling_params"])
def test_the_owner_may_have_patterns_searched_for(fake, kind):
    with gateway_of(fake, **{kind: {"stop_regex": "a+"}}) as gateway:
        assert post(gateway.session()).status_code == 200
        assert sent(fake)["stop_regex"] == ["a+"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tool_call_parser": None}, "tool_call_parser=None"),
        ({"tool_call_parser": "gpt-oss"}, "tool_call_parser='gpt-oss'"),
        ({"reasoning_parser": "gpt-oss"}, "reasoning_parser='gpt-oss'"),
    ],
)
def test_choices_that_no_grammar_is_known_for(fake, arguments, words):
    with gateway_of(fake, **arguments) as gateway:
        answer = post(gateway.session(), tools=TOOLS, tool_choice="required")
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert "tool_choice='auto'" in answer.json()["error"]["message"]


def test_choices_on_a_server_without_grammars(tiny_model_path):
    with FakeServer(tiny_model_path) as fake, gateway_of(fake) as gateway:
        answer = post(gateway.session(), tools=TOOLS, tool_choice="required")
    assert answer.status_code == 400
    assert "tool_choice needs a grammar backend" in answer.json()["error"]["message"]


def test_choices_are_left_to_the_model_if_the_user_says_so(fake, fake_engine):
    """No grammar is needed then, and answers say what was ignored."""
    with Gateway(fake_engine, tool_call_parser="qwen25", tool_choice="auto") as gateway:
        session = gateway.session()
        more = {"tools": TOOLS, "parallel_tool_calls": False}
        for stream in (False, True):
            answer = post(session, tool_choice="required", stream=stream, **more)
            assert answer.headers[IGNORED] == "tool_choice, parallel_tool_calls"
        # This one is the client's to keep.
        answer = post(session, tools=TOOLS, tool_choice="none")
        assert IGNORED not in answer.headers
        assert not session.turns[-1].prompt.setting.tools


def test_a_grammar_of_the_trainer_goes_before_a_choice(fake):
    with gateway_of(fake, forced_sampling_params={"regex": "a+"}) as gateway:
        answer = post(gateway.session(), tools=TOOLS, tool_choice="required")
        assert answer.headers[IGNORED] == "tool_choice"
    assert "structural_tag" not in str(sent(fake))


def test_a_format_beside_tools_leaves_calls_possible(fake, session):
    assert post(session, tools=TOOLS, response_format=of_schema(SCHEMA)).ok
    tag = tag_of(fake)
    assert tag["type"] == "or"
    assert tag["elements"][0] == {"type": "json_schema", "json_schema": SCHEMA}
    assert names_in(tag) == list(NAMES)
    assert "json_schema" not in sent(fake)


def test_a_format_beside_calls_that_are_not_known_is_held_alone(fake):
    for parsers in ({"reasoning_parser": "gpt-oss"}, {"tool_call_parser": "gpt-oss"}):
        with gateway_of(fake, **parsers) as gateway:
            format_ = of_schema(SCHEMA)
            answer = post(gateway.session(), tools=TOOLS, response_format=format_)
        assert answer.status_code == 200, answer.text
        assert json.loads(sent(fake)["json_schema"]) == SCHEMA


@pytest.mark.parametrize("ending", ["", "<think>\n"])
def test_a_forced_call_comes_behind_reasoning(fake, ending):
    """Reasoning that the prompt has begun is ended first."""
    template = BARE + ending
    with gateway_of(fake, chat_template=template, reasoning_parser="qwen3") as gateway:
        post(gateway.session(), tools=TOOLS, tool_choice="required")
    thought, calls = tag_of(fake)["elements"]
    assert calls["type"] == FORCED
    assert thought["type"] == ("sequence" if ending else "or")


# Fields for templates.

WISHES = [
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "low"),
    (CHAT, {"verbosity": "high"}, "verbosity", "high"),
    (CHAT, {"enable_thinking": False}, "enable_thinking", "False"),
    (MESSAGES, {"thinking": {"type": "adaptive"}}, "thinking", "True"),
    (MESSAGES, {"thinking": {"type": "between_tools"}}, "thinking", "True"),
    (MESSAGES, {"thinking": {"type": "disabled"}}, "thinking", "False"),
    (MESSAGES, {"output_config": {"effort": "xhigh"}}, "output_config.effort", "xhigh"),
]


@pytest.mark.parametrize(("path", "fields", "name", "value"), WISHES)
@pytest.mark.parametrize("knows", [True, False])
def test_wishes_reach_a_template_that_knows_them(
    fake, path, fields, name, value, knows
):
    with gateway_of(fake, chat_template=BARE + KNOWS * knows) as gateway:
        session = gateway.session()
        answer = post(session, path, **fields)
        assert answer.status_code == 200, answer.text
        (turn,) = session.turns
        assert turn.prompt.rendered == "hello" + value * knows
        assert answer.headers.get(IGNORED) == (None if knows else name)
        # What has no effect makes no branch either.
        reply = turn.reply["content"]
        more = [*HELLO, {"role": "assistant", "content": reply}, *HELLO]
        post(session, path, messages=more)
        assert session.turns[1].prompt.parent == (None if knows else 0)


def test_variables_of_a_template(fake_engine):
    """Those of tags that only transformers knows, and none of a text or a comment."""
    source = (
        "{% generation %}{{ a if enable_thinking is defined }}{% endgeneration %}"
        "{# thinking #}{{ 'verbosity' }} reasoning_effort"
    )
    found = ChatTemplate(fake_engine.get_tokenizer(), source).variables
    wishes = {"enable_thinking", "thinking", "verbosity", "reasoning_effort"}
    assert wishes & found == {"enable_thinking"}
    with pytest.raises(ConfigurationError, match="Jinja"):
        Gateway(fake_engine, chat_template="{{ a) }}")


def test_a_budget_of_thinking(fake):
    thinking = {"type": "enabled", "budget_tokens": 2048}
    with gateway_of(fake, chat_template=BARE + KNOWS) as gateway:
        session = gateway.session()
        assert IGNORED not in post(session, MESSAGES, thinking=thinking).headers
        assert session.turns[0].prompt.rendered == "helloTrue2048"
    with gateway_of(fake, chat_template=BARE) as gateway:
        answer = post(gateway.session(), MESSAGES, thinking=thinking)
        assert answer.headers[IGNORED] == "thinking, thinking.budget_tokens"


# Fields without effect.

KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}


def edits(*given):
    return {"context_management": {"edits": list(given)}}


def test_ignored_params(fake, caplog):
    with gateway_of(fake, ignored_params=["seed", "num_ctx"]) as gateway:
        session = gateway.session()
        for stream in (False, True):
            answer = post(session, seed=1, num_ctx=5, stream=stream)
            assert answer.status_code == 200, answer.text
            assert answer.headers[IGNORED] == "seed, num_ctx"
        assert "sampling_seed" not in str(sent(fake))
        assert IGNORED not in post(session).headers
        refused = post(session, num_ctxs=5)
        assert "ignored_params=['num_ctxs']" in refused.json()["error"]["message"]
    assert caplog.text.count("num_ctx, which has no effect") <= 1


@pytest.mark.parametrize(
    "names", ["seed", [1], ["messages"], ["seed", "tools"], ["a\nb"], [""]]
)
def test_wrong_ignored_params(fake_engine, names):
    with pytest.raises(ConfigurationError, match="ignored_params"):
        Gateway(fake_engine, ignored_params=names)
    with pytest.raises(ConfigurationError, match="tool_choice='never'"):
        Gateway(fake_engine, tool_choice="never")


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        (edits(), None),
        (edits(KEEP_ALL), None),
        (edits({"type": "clear_tool_uses_20250919"}), "context_management"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_edits_of_a_conversation_are_none(session, fields, ignored, stream):
    """The answer says so in the API's own words, too."""
    with anthropic_client(session) as client:
        asked = {"model": "m", "max_tokens": 4, "messages": HELLO, **fields}
        betas = ["context-management-2025-06-27", "some-beta"]
        if stream:
            with client.beta.messages.stream(**asked, betas=betas) as events:
                done = [each for each in events if each.type == "message_delta"]
                headers, message = events.response.headers, done[0]
        else:
            raw = client.beta.messages.with_raw_response.create(**asked, betas=betas)
            headers, message = raw.headers, raw.parse()
    assert message.context_management.applied_edits == []
    assert headers.get(IGNORED) == ignored


def test_wishes_of_tools(session):
    tools = [
        {**AS_ANTHROPIC[0], "strict": True, "input_examples": [{}], "type": "custom"}
    ]
    answer = post(session, MESSAGES, tools=tools)
    assert answer.headers[IGNORED] == "tools.strict, tools.input_examples"
    answer = post(session, MESSAGES, tools=tools, tool_choice={"type": "any"})
    assert answer.headers[IGNORED] == "tools.input_examples"
    strict = [
        {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    ]
    assert post(session, tools=strict).headers[IGNORED] == "tools.strict"
    assert IGNORED not in post(session, tools=strict, tool_choice="required").headers


# Anthropic's other fields.


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_the_format_of_a_title(fake, session, field):
    format_ = {"type": "json_schema", "schema": SCHEMA}
    given = format_ if field == "output_format" else {"format": format_}
    assert post(session, MESSAGES, **{field: given}).status_code == 200
    assert json.loads(sent(fake)["json_schema"]) == SCHEMA
    for wrong in ({"format": {"type": "xml"}}, {"length": 3}, "low"):
        assert post(session, MESSAGES, output_config=wrong).status_code == 400


def block(kind, **fields):
    return {"type": kind, "cache_control": {"type": "ephemeral"}, **fields}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (block("document", source={"type": "text", "data": "hi"}), "hi"),
        (
            block(
                "document",
                title="T",
                context="C",
                source={"type": "content", "content": [block("text", text="hi")]},
            ),
            "T\nC\nhi",
        ),
        (
            block(
                "search_result",
                title="T",
                source="S",
                content=[block("text", text="hi")],
            ),
            "T\nS\nhi",
        ),
        (block("tool_reference", tool_name="weather"), "weather"),
    ],
)
def test_documents_are_text(session, given, text):
    result = block("tool_result", tool_use_id="a", content=[given, given])
    content = [result, block("text", text="so "), given]
    answer = post(session, MESSAGES, messages=[{"role": "user", "content": content}])
    assert answer.status_code == 200, answer.text
    tool, user = session.turns[0].prompt.messages
    assert (tool["content"], user["content"]) == (text + text, "so " + text)


def test_counts_need_no_answer(session):
    """Claude Code counts tools, and conversations that end anywhere."""
    said = [*HELLO, {"role": "assistant", "content": "I"}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    counted = post(session, COUNT, messages=said, tools=AS_ANTHROPIC, thinking=thinking)
    alone = post(session, COUNT)
    assert counted.json()["input_tokens"] > alone.json()["input_tokens"] > 0
    assert not session.turns


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_is_left_out_joins(fake, stream):
    """Its signature stands for it, and what the model wrote goes on."""
    with gateway_of(fake, chat_template=THINKS, reasoning_parser="qwen3") as gateway:
        session = gateway.session()
        asked = [{"role": "user", "content": "<think>hm</think>42"}]
        thinking = {"type": "adaptive", "display": "omitted"}
        given = {"max_tokens": 19, "model": "m", "thinking": thinking}
        with anthropic_client(session) as client:
            if stream:
                with client.messages.stream(messages=asked, **given) as events:
                    answer = events.get_final_message()
            else:
                answer = client.messages.create(messages=asked, **given)
            thought, text = answer.content
            assert (thought.thinking, text.text) == ("", "42")
            assert thought.signature
            said = {"role": "assistant", "content": answer.content}
            client.messages.create(messages=[*asked, said, *HELLO], **given)
        assert session.turns[0].reply["reasoning_content"] == "hm"
        assert session.turns[1].prompt.parent == 0


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_streamed_and_not_are_recorded_alike(fake, path):
    """A forced call, as far as a server that computes nothing goes."""
    tools, choice = (
        (TOOLS, "required") if path == CHAT else (AS_ANTHROPIC, {"type": "any"})
    )
    asked = [{"role": "user", "content": SAID}]
    found = []
    with gateway_of(fake, chat_template=BARE, reasoning_parser="qwen3") as gateway:
        for stream in (False, True):
            session = gateway.session()
            post(
                session,
                path,
                messages=asked,
                tools=tools,
                tool_choice=choice,
                max_tokens=len(SAID),
                stream=stream,
            )
            (turn,) = session.turns
            calls = [each["function"] for each in turn.reply["tool_calls"]]
            reply = {**turn.reply, "tool_calls": calls}
            found.append((turn.token_ids, turn.completion.log_probs, reply))
    assert found[0] == found[1]
    assert found[0][2]["tool_calls"][0]["name"] == "weather"


def test_a_conversation_of_claude_code(fake):
    """All that it sends at once, twice; its body without the 100 kB of tools."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {
        "model": "claude-opus-4-7",
        "system": [{"type": "text", "text": "<think>hm</think>", **mark}],
        "tools": [{**each, "eager_input_streaming": True} for each in AS_ANTHROPIC],
        "metadata": {"user_id": "user_1_account__session_2"},
        "max_tokens": len("<think>hm</think>42"),
        "thinking": {"type": "adaptive"},
        **edits(KEEP_ALL),
        "output_config": {"effort": "xhigh"},
    }
    betas = ["claude-code-20250219", "interleaved-thinking-2025-05-14"]
    parts = [block("text", text="4"), block("text", text="2")]
    messages = [{"role": "user", "content": parts}]
    with gateway_of(fake, chat_template=THINKS, reasoning_parser="qwen3") as gateway:
        session = gateway.session()
        with anthropic_client(session) as client:
            for _ in range(2):
                with client.beta.messages.stream(
                    messages=messages, betas=betas, **body
                ) as events:
                    answer = events.get_final_message()
                    ignored = events.response.headers[IGNORED]
                said = [each.to_dict() for each in answer.content]
                messages += [{"role": "assistant", "content": said}, *HELLO]
        assert ignored == "thinking, output_config.effort"
        assert said[0]["type"] == "thinking"
        assert session.turns[1].prompt.parent == 0


def test_a_signature_proves_nothing(fake):
    """Reasoning that is not the model's is an edit, whatever its signature says."""
    with gateway_of(fake, chat_template=THINKS, reasoning_parser="qwen3") as gateway:
        session = gateway.session()
        asked = [{"role": "user", "content": "<think>hm</think>42"}]
        given = {"messages": asked, "max_tokens": 19}
        content = post(session, MESSAGES, **given).json()["content"]
        for edit in ({"thinking": "ah"}, {"signature": "bm8="}, {"signature": ""}):
            said = [{**content[0], **edit}, *content[1:]]
            more = [*asked, {"role": "assistant", "content": said}, *HELLO]
            post(session, MESSAGES, messages=more)
    assert [turn.prompt.parent for turn in session.turns] == [None, None, 0, 0]


# Models.


def test_a_model_by_its_name(gateway, session):
    (name,) = gateway.models
    with openai_client(session) as client:
        assert client.models.retrieve(name).id == name
        assert [model.id for model in client.models.list()] == [name]
        with pytest.raises(openai.NotFoundError, match="there is one policy"):
            client.models.retrieve("gpt-4")
    with anthropic_client(session) as client:
        assert client.models.retrieve(name).display_name == name
        assert [each.id for each in client.models.list()] == [name]
