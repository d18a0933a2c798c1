"""The clients of the tests, and what each of them has of the scenarios."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from helpers.agent_clients import (
    CLIENT_TIMEOUT,
    CONTEXT,
    HELLO,
    OSLO,
    ROME,
    SCENARIOS,
    SUNNY,
    THINKING,
    WEATHER,
    WORD,
    Program,
)
from helpers.scripted_server import Reply

OPENAI = {
    "overflow": "BadRequestError",
    "limit": "PermissionDeniedError",
    "timeout": "APITimeoutError",
}
LITELLM = {
    "overflow": "ContextWindowExceededError",
    "limit": "APIError",
    "timeout": "Timeout",
}
AI_SDK = {
    "overflow": "AI_APICallError",
    "limit": "AI_APICallError",
    "timeout": "TimeoutError",
}
NO_TOOLS = dict.fromkeys(
    ("tools", "parallel"), "It asks for answers; its calls are the answers."
)


ASKS_ONCE = {"retry": "It asks once, unless it is told to ask again."}


def final(answer):
    """Returns the call that ends a run of smolagents."""
    return Reply(calls=[("final_answer", {"answer": answer})])


def as_answers(name, *, answer=WEATHER):
    """Returns a scenario whose texts are structured answers."""
    scenario = SCENARIOS[name]
    script = [
        reply if reply.hangs else Reply(answer=WEATHER) for reply in scenario.script
    ]
    return replace(
        scenario,
        script=script,
        called=(),
        answer=scenario.answer and answer,
        job={**scenario.job, "structured": True},
    )


def as_final_calls(name):
    """Returns a scenario whose last texts are calls of ``final_answer``."""
    scenario = SCENARIOS[name]
    script = [
        final(reply.text) if reply.text and not reply.calls else reply
        for reply in scenario.script
    ]
    return replace(scenario, script=script)


FINAL_CALLS = {
    **{name: as_final_calls(name) for name in SCENARIOS},
    "structured": replace(SCENARIOS["structured"], script=[final(WEATHER)]),
}
CALLS_AS_TEXT = {
    name: (count, "It sends calls back as text, so that each turn is a row.")
    for name, count in {
        "turns": 3,
        "tools": 4,
        "parallel": 2,
        "stream": 4,
        "refused": 3,
    }.items()
}


def write_code(reply, prompt, params):
    """Returns calls as smolagents' code, which a stop string ends."""
    lines = []
    for name, arguments in reply.calls:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        called = f"{name}({given})"
        lines.append(called if name == "final_answer" else f"print({called})")
    code = "\n".join(lines)
    return f"Thought: {reply.text}\n<code>\n{code}\n</code>"


def write_fields(reply, prompt, params):
    """Returns the fields that DSPy asks for, between its headings."""
    asked = prompt.rsplit("Respond with the corresponding", 1)[1]
    (name, arguments), *_ = *reply.calls, ("finish", {})
    values = {
        "next_thought": reply.text or "I go on.",
        "next_tool_name": name,
        "next_tool_args": json.dumps(arguments),
        "reasoning": "It says so.",
        "answer": reply.text,
        **{key: str(value) for key, value in (reply.answer or {}).items()},
    }
    fields = re.findall(r"`\[\[ ## (\w+) ## \]\]`", asked)
    said = [f"[[ ## {field} ## ]]\n{values.get(field, '')}" for field in fields]
    return "\n\n".join(said)


def react(name, *replies):
    """Returns a scenario of DSPy's ReAct, which calls ``finish`` before it answers."""
    job = {**SCENARIOS[name].job, "style": "react"}
    script = [*replies, Reply(calls=[("finish", {})]), Reply(text=SUNNY)]
    return replace(
        SCENARIOS[name], messages=[HELLO], script=script, called=["Rome"], job=job
    )


def bash(command, text="I look."):
    """Returns a call of mini-swe-agent's only tool."""
    return Reply(text=text, calls=[("bash", {"command": command})])


LOOK = bash("echo Rome >>calls; cat calls")
SUBMIT = bash(f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{SUNNY}'")
NO_STREAM = {"stream": "It reads whole responses."}
NO_ANSWERS = {"structured": "It has no structured answers."}


def shell(tool, key, command, **more):
    """Returns a call of a coding agent's shell."""
    return Reply(text="I look.", calls=[(tool, {key: command, **more})])


def coding(tool, key, **more):
    """Returns scenarios whose tool is a coding agent's shell."""
    rome = shell(tool, key, "echo Rome >>calls; cat calls", **more)
    oslo = shell(tool, key, "echo Oslo >>calls; cat calls", **more)
    thinking = replace(rome, reasoning="They want to know.")
    tools = [thinking, Reply(text="It is 21."), thinking, Reply(text=SUNNY)]
    both = replace(rome, calls=[*rome.calls, *oslo.calls])
    wrong = Reply(text="I look.", calls=[(tool, {"town": "Rome"})])
    return {
        "tools": replace(SCENARIOS["tools"], script=tools),
        "stream": replace(SCENARIOS["stream"], script=tools),
        "parallel": replace(SCENARIOS["parallel"], script=[both, Reply(text=SUNNY)]),
        "refused": replace(
            SCENARIOS["refused"], script=[wrong, rome, Reply(text=SUNNY)]
        ),
    }


def steps(name, *script, **fields):
    """Returns a scenario of one task, whose turns are the agent's steps."""
    return replace(SCENARIOS[name], messages=[HELLO], script=list(script), **fields)


def submit(answer=SUNNY):
    """Returns the call that ends a run of Inspect's agent."""
    return Reply(calls=[("submit", {"answer": answer})])


def edit(old, new):
    """Returns an edit in aider's format of a file that is empty."""
    return (
        f"weather.txt\n```\n<<<<<<< SEARCH\n{old}\n=======\n{new}\n>>>>>>> REPLACE\n```"
    )


CLAUDE_CODE = Program(
    file="claude_code.py",
    environment="claude_code",
    errors={
        "overflow": "PromptTooLongError",
        "limit": "ClaudeCodeError",
        "timeout": "ClaudeCodeError",
    },
    instead={
        **coding("Bash", "command", description="Look"),
        # It waits five minutes for more of a stream, so that the gateway's time-out
        # is first, and then asks again without a stream.
        "timeout": replace(
            SCENARIOS["timeout"],
            script=[*SCENARIOS["timeout"].script, Reply(hangs=True)],
            gateway={"request_timeout": CLIENT_TIMEOUT},
        ),
        "retry": replace(
            SCENARIOS["retry"], gateway={"request_timeout": CLIENT_TIMEOUT}
        ),
    },
)


PROGRAMS = {
    "openai": Program(file="openai_sdk.py", environment="", errors=OPENAI),
    "anthropic": Program(file="anthropic_sdk.py", environment="", errors=OPENAI),
    "openai-agents": Program(
        file="openai_agents.py",
        environment="openai_agents",
        variant="chat",
        errors=OPENAI,
    ),
    "openai-agents-responses": Program(
        file="openai_agents.py",
        environment="openai_agents",
        variant="responses",
        errors=OPENAI,
    ),
    "pydantic-ai": Program(
        file="pydantic_ai_agent.py",
        environment="pydantic_ai",
        variant="openai",
        errors={**OPENAI, "limit": "ModelHTTPError", "overflow": "ModelHTTPError"},
    ),
    "pydantic-ai-anthropic": Program(
        file="pydantic_ai_agent.py",
        environment="pydantic_ai_anthropic",
        variant="anthropic",
        errors={**OPENAI, "limit": "ModelHTTPError", "overflow": "ModelHTTPError"},
    ),
    "langchain-openai": Program(
        file="langchain_agent.py",
        environment="langchain",
        variant="openai",
        errors={**OPENAI, "overflow": "ContextOverflowError"},
    ),
    "langchain-anthropic": Program(
        file="langchain_agent.py",
        environment="langchain",
        variant="anthropic",
        errors={**OPENAI, "overflow": "ContextOverflowError"},
    ),
    "langchain-responses": Program(
        file="langchain_agent.py",
        environment="langchain",
        variant="responses",
        errors={**OPENAI, "overflow": "ContextOverflowError"},
    ),
    "litellm-openai": Program(
        file="litellm_loop.py", environment="litellm", variant="openai", errors=LITELLM
    ),
    "litellm-hosted-vllm": Program(
        file="litellm_loop.py",
        environment="litellm",
        variant="hosted_vllm",
        errors=LITELLM,
        without=ASKS_ONCE,
    ),
    "litellm-anthropic": Program(
        file="litellm_loop.py",
        environment="litellm",
        variant="anthropic",
        errors=LITELLM,
        without=ASKS_ONCE,
    ),
    "smolagents": Program(
        file="smolagents_agent.py",
        environment="smolagents",
        errors=OPENAI,
        rows=CALLS_AS_TEXT,
        instead=FINAL_CALLS,
    ),
    "smolagents-code": Program(
        file="smolagents_agent.py",
        environment="smolagents",
        variant="code",
        errors=OPENAI,
        instead=FINAL_CALLS,
        writer=write_code,
    ),
    "instructor": Program(
        file="instructor_client.py",
        environment="instructor",
        errors=OPENAI,
        without=NO_TOOLS,
        rows={
            "turns": (3, "Its user puts its answers back as text."),
            "stream": (2, "Its user puts its answers back as text."),
        },
        instead={
            **{name: as_answers(name) for name in SCENARIOS},
            "stream": replace(as_answers("stream"), script=[Reply(answer=WEATHER)] * 2),
            "refused": replace(
                as_answers("refused"),
                script=[
                    Reply(answer={"city": "Rome", "degrees": "many"}),
                    Reply(answer=WEATHER),
                ],
            ),
        },
    ),
    "autogen": Program(file="autogen_agent.py", environment="autogen", errors=OPENAI),
    "dspy": Program(
        file="dspy_program.py",
        environment="dspy",
        errors={
            "overflow": "ContextWindowExceededError",
            "limit": "LMError",
            "timeout": "LMTransportError",
        },
        without={"parallel": "Its ReAct calls one tool at a time."},
        rows={
            name: (count, "Each step of ReAct is a prompt of its own.")
            for name, count in {"tools": 3, "stream": 3, "refused": 4}.items()
        },
        instead={
            "tools": react("tools", Reply(calls=[ROME])),
            "stream": react("stream", Reply(calls=[ROME])),
            "refused": react(
                "refused",
                Reply(calls=[("get_weather", {"town": "Rome"})]),
                Reply(calls=[ROME]),
            ),
        },
        writer=write_fields,
    ),
    "mini-swe-agent": Program(
        file="mini_swe_agent.py",
        environment="mini_swe_agent",
        errors=LITELLM,
        without={
            **NO_STREAM,
            **NO_ANSWERS,
            "limit": "LiteLLM has no error for 403, so that it asks for four minutes.",
        },
        rows={"refused": (2, "It drops the response whose call it refuses.")},
        instead={
            "turns": steps("turns", bash("true"), bash("true"), SUBMIT),
            "tools": steps("tools", LOOK, LOOK, SUBMIT),
            "parallel": steps(
                "parallel",
                replace(LOOK, calls=[*LOOK.calls, *bash("echo Oslo >>calls").calls]),
                SUBMIT,
            ),
            "refused": steps("refused", Reply(calls=[("bash", {})]), LOOK, SUBMIT),
            "overflow": steps("overflow", bash("seq 3000"), context=5000),
            "timeout": steps("timeout", bash("true"), Reply(hangs=True)),
            "retry": steps("retry", Reply(hangs=True), SUBMIT),
        },
    ),
    "crewai": Program(
        file="crewai_agent.py",
        environment="crewai",
        errors=OPENAI,
        without={"overflow": "It summarises the conversation in parts, and goes on."},
        rows={
            **{
                name: (count, "It writes 'Current Task' before the newest message.")
                for name, count in {"turns": 3, "tools": 4, "stream": 4}.items()
            },
            "parallel": (2, "It leaves out the text beside calls."),
            "refused": (2, "It leaves out the text beside calls."),
        },
    ),
    "inspect-ai": Program(
        file="inspect_task.py",
        environment="inspect_ai",
        variant="openai-api/gateway/policy",
        errors=dict.fromkeys(OPENAI, "SampleError"),
        without={**NO_ANSWERS, **NO_STREAM},
        rows={"overflow": (0, "Its task alone is too long.")},
        instead={
            "turns": steps("turns", Reply(text="It rains."), submit()),
            "tools": steps("tools", THINKING, THINKING, submit()),
            "parallel": steps(
                "parallel", Reply(text="Both.", calls=[ROME, OSLO]), submit()
            ),
            "refused": steps("refused", *SCENARIOS["refused"].script[:2], submit()),
            "limit": steps("limit", Reply(text="It rains.")),
            "overflow": replace(
                SCENARIOS["overflow"], messages=[WORD * CONTEXT], script=[]
            ),
            "timeout": steps("timeout", Reply(text="It rains."), Reply(hangs=True)),
            "retry": steps("retry", Reply(hangs=True), submit()),
        },
    ),
    "ai-sdk": Program(
        file="ai_sdk.mjs",
        environment="ai_sdk",
        variant="openai",
        errors=AI_SDK,
        without={"retry": "Its time-out is one of all attempts."},
    ),
    "ai-sdk-compatible": Program(
        file="ai_sdk.mjs",
        environment="ai_sdk",
        variant="compatible",
        errors=AI_SDK,
        without={"retry": "Its time-out is one of all attempts."},
    ),
    "ai-sdk-anthropic": Program(
        file="ai_sdk.mjs",
        environment="ai_sdk",
        variant="anthropic",
        errors=AI_SDK,
        without={"retry": "Its time-out is one of all attempts."},
    ),
    "claude-code": CLAUDE_CODE,
    "claude-agent-sdk": replace(
        CLAUDE_CODE,
        environment="claude_agent_sdk",
        variant="sdk",
        # A refused prompt has it summarise the turns before, in tags that it looks for,
        # and ask once more.
        instead={
            **CLAUDE_CODE.instead,
            "overflow": replace(
                SCENARIOS["overflow"],
                script=[
                    *SCENARIOS["overflow"].script,
                    Reply(text="<summary>It rains.</summary>"),
                ],
            ),
        },
        rows={"overflow": (2, "The summary's request is a conversation of its own.")},
        repeats={"overflow": "It asks again with a summary of the turns before."},
    ),
    "codex": Program(
        file="codex.py",
        environment="codex",
        errors={
            "overflow": "ContextExhaustedError",
            "limit": "CodexError",
            "timeout": "CodexError",
        },
        repeats={"limit": "It reconnects five times, within seconds."},
        instead=coding("exec_command", "cmd"),
    ),
    "aider": Program(
        file="aider_session.py",
        environment="aider",
        errors={"overflow": "ContextWindowExhaustedError"},
        without={
            **NO_ANSWERS,
            **dict.fromkeys(("tools", "parallel"), "It has no tools, but edits."),
            "timeout": "It asks again for a minute.",
            "limit": "It tells its user, and ends without an error.",
        },
        rows={
            name: (count, "Its reminder stands behind the newest message only.")
            for name, count in {"turns": 3, "stream": 3, "refused": 2}.items()
        },
        instead={
            "stream": replace(SCENARIOS["turns"], job={"stream": True}),
            "refused": steps(
                "refused",
                Reply(text=edit("It hails.", "It rains.")),
                Reply(text=SUNNY),
                called=(),
            ),
        },
    ),
}
__all__ = ["PROGRAMS", "SUNNY"]
