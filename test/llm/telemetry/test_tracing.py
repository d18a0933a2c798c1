"""Spans of groups, turns, tools and requests, as OpenTelemetry's exporter has them."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from typing import Any

import pytest
from helpers.fake_server import FakeServer
from helpers.forked_starts import trainer_python
from helpers.tool_template import TOOL_TEMPLATE

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    Gateway,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.support import tracing

pytest.importorskip("opentelemetry.sdk")


@pytest.fixture(scope="module")
def exporter():
    """Keeps the spans of this module. A process sets up a provider once."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
        InMemorySpanExporter,
    )

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace.set_tracer_provider(provider)
    yield kept
    provider.shutdown()


@pytest.fixture
def spans(exporter):
    """Returns the spans of a test so far, in the order in which they ended."""
    exporter.clear()
    return exporter.get_finished_spans


def named(spans: Any, name: str) -> list[Any]:
    return [span for span in spans if span.name == name]


def parent_of(span: Any, spans: Any) -> Any:
    found = [each for each in spans if each.context.span_id == span.parent.span_id]
    assert len(found) == 1
    assert found[0].context.trace_id == span.context.trace_id
    # What is inside begins later and ends before.
    assert found[0].start_time <= span.start_time <= span.end_time <= found[0].end_time
    return found[0]


def test_a_group_with_turns_tools_and_rewards(engine, spans):
    seen = []

    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: a number.
            b: a number.
        """
        from opentelemetry import trace

        # In a thread of the collector.
        seen.append(trace.get_current_span().get_span_context().span_id)
        return a + b

    def fail() -> int:
        """Fails."""
        raise ValueError("out of order")

    def parse(response: str) -> dict[str, Any]:
        from types import SimpleNamespace

        first = not seen
        call = SimpleNamespace(tool="add", args={"a": 1, "b": 2}, tag=None)
        wrong = SimpleNamespace(tool="fail", args={}, tag=None)
        return {"calls": [call, wrong] if first else []}

    def reward(conversation: Any, task: Any) -> float:
        return 1.0

    policy = SGLangWrapper(
        engine,
        input_mode="history",
        generate_kwargs={"max_new_tokens": 5},
        chat_template=TOOL_TEMPLATE,
        return_log_probs=True,
    )
    with AsyncLLMCollector(
        policy=policy,
        prompts=[{"query": "1+2="}],
        rewards=reward,
        tools=[add, fail],
        tool_parser=parse,
        group_size=1,
        groups_per_batch=1,
        total_groups=1,
    ) as collector:
        batch = next(iter(collector))
    found = spans()
    (group,) = named(found, "group")
    assert group.parent is None
    assert group.attributes["torchrl_sglang.prompt"] == 0
    assert group.attributes["torchrl_sglang.turns"] == len(batch) == 2
    (conversation,) = named(found, "conversation")
    assert parent_of(conversation, found) is group
    turns = named(found, "turn")
    assert [span.attributes["torchrl_sglang.number"] for span in turns] == [0, 1]
    assert all(parent_of(turn, found) is conversation for turn in turns)
    requests = named(found, "POST /generate")
    assert [parent_of(request, found) for request in requests] == turns
    for request, row in zip(requests, batch, strict=True):
        assert request.kind.name == "CLIENT"
        tokens = request.attributes["gen_ai.usage.output_tokens"]
        assert tokens == len(row["tokens", "response"])
        prompt = request.attributes["gen_ai.usage.input_tokens"]
        assert prompt == len(row["tokens", "prompt"])
        (url,) = engine.control.urls
        assert request.attributes["url.full"] == f"{url}/generate"
        version = request.attributes["torchrl_sglang.weight_version"]
        assert version == engine.weight_version
    (tool,) = named(found, "execute_tool add")
    assert parent_of(tool, found) is conversation
    assert tool.attributes["gen_ai.tool.name"] == "add"
    assert seen == [tool.context.span_id]
    (wrong,) = named(found, "execute_tool fail")
    assert wrong.status.status_code.name == "ERROR"
    assert "out of order" in wrong.status.description
    assert tool.status.status_code.name == "UNSET"
    (rewards,) = named(found, "rewards")
    assert parent_of(rewards, found) is group


def test_a_group_whose_function_raises(engine, spans):
    calls = []

    def reward(conversation: Any, task: Any) -> float:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("no number")
        return 1.0

    policy = SGLangWrapper(
        engine,
        input_mode="history",
        generate_kwargs={"max_new_tokens": 2},
        return_log_probs=True,
    )
    with AsyncLLMCollector(
        policy=policy,
        prompts=[{"query": "1+2="}],
        rewards=reward,
        group_size=1,
        groups_per_batch=1,
        total_groups=1,
    ) as collector:
        next(iter(collector))
    failed, whole = named(spans(), "group")
    assert failed.status.status_code.name == "ERROR"
    (event,) = failed.events
    assert event.name == "exception"
    assert "no number" in event.attributes["exception.message"]
    assert whole.status.status_code.name == "UNSET"
    assert failed.context.trace_id != whole.context.trace_id


TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
"""Of the example in W3C Trace Context."""


def test_a_gateway_continues_the_trace_of_a_client(engine, spans):
    with Gateway(engine) as gateway:
        session = gateway.session()
        for headers in ({"TraceParent": f"00-{TRACE}-{PARENT}-01"}, {}):
            request = urllib.request.Request(
                f"{session.base_url}/chat/completions",
                data=json.dumps(
                    {
                        "model": "policy",
                        "max_tokens": 3,
                        "messages": [{"role": "user", "content": "Hi"}],
                    }
                ).encode(),
                headers={
                    "Authorization": f"Bearer {session.key}",
                    "Content-Type": "application/json",
                    **headers,
                },
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.status == 200
    continued, own = named(spans(), "chat")
    assert f"{continued.context.trace_id:032x}" == TRACE
    assert f"{continued.parent.span_id:016x}" == PARENT
    assert continued.kind.name == "SERVER"
    assert continued.attributes["torchrl_sglang.session"] == session.name
    assert own.parent is None
    first, second = named(spans(), "POST /generate")
    assert parent_of(first, spans()) is continued
    assert parent_of(second, spans()) is own


def test_an_agents_requests_belong_to_its_group(engine, spans):
    async def agent(task: Any, *, base_url: str, api_key: str) -> float:
        import openai

        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        async with client:
            await client.chat.completions.create(
                model="policy",
                max_tokens=3,
                messages=[{"role": "user", "content": task["query"]}],
            )
        return 1.0

    policy = SGLangWrapper(engine, input_mode="history", return_log_probs=True)
    with (
        Gateway(engine) as gateway,
        AsyncLLMCollector(
            policy=policy,
            prompts=[{"query": "1+2="}],
            agent=agent,
            gateway=gateway,
            group_size=1,
            groups_per_batch=1,
            total_groups=1,
        ) as collector,
    ):
        next(iter(collector))
    found = spans()
    (chat,) = named(found, "chat")
    (agents,) = named(found, "agent")
    assert parent_of(chat, found) is agents
    assert parent_of(agents, found).name == "group"


@pytest.mark.parametrize("takes", [True, False])
def test_servers_get_a_trace_only_if_they_take_it(tiny_model_path, spans, takes):
    with (
        FakeServer(tiny_model_path, server_args={"enable_trace": takes}) as fake,
        AsyncSGLang.connect(fake.url) as engine,
        tracing.span("mine"),
    ):
        engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 2})
        sent = fake.headers["/generate"].get("traceparent")
    (request,) = named(spans(), "POST /generate")
    (mine,) = named(spans(), "mine")
    assert parent_of(request, spans()) is mine
    context = request.context
    if not takes:
        assert sent is None
        return
    version, trace_id, span_id, flags = sent.split("-")
    assert (version, trace_id, span_id) == (
        "00",
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
    )
    assert int(flags, 16) & 1


def test_a_weight_update(restored_engine, hf_model, spans):
    scheme = SGLangWeightSyncScheme(restored_engine, hf_model)
    report = scheme.create_sender().update_weights()
    scheme.shutdown()
    (update,) = named(spans(), "weight_update")
    assert update.attributes["torchrl_sglang.bytes"] == report.num_bytes
    assert update.attributes["torchrl_sglang.version"] == report.version
    assert update.attributes["torchrl_sglang.send_seconds"] > 0


def test_nothing_is_imported_and_nothing_happens_without_a_provider():
    code = """
import sys
from torchrl_sglang.support import tracing
with tracing.span("a", number=1) as span:
    span.set(b=2)
    span.fail("c")
assert tracing.traced_headers() == {}
assert not any(name.startswith("opentelemetry") for name in sys.modules)
import opentelemetry.trace
with tracing.span("a"):
    assert not opentelemetry.trace.get_current_span().get_span_context().is_valid
    assert tracing.traced_headers() == {}
"""
    done = subprocess.run(
        [trainer_python(), "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
