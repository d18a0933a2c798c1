"""A trainer on a host, run by ``test_hosts.py``: answers one task after another.

Each line of the input is a JSON list: the name of a function below, and its keyword
arguments. Each line of the output is its result, or the error that it raised.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers.log_probs import PROMPT, batch_difference, response_difference

from torchrl_sglang import AsyncSGLang, RayLauncher, SGLangWeightSyncScheme
from torchrl_sglang.gateway.gateway import Gateway

STATE: dict[str, Any] = {}


def set_clock(ahead: float) -> None:
    """Makes the clock of this process wrong by so many seconds."""
    right = time.time
    time.time = lambda: right() + ahead


def use(engine: AsyncSGLang, model: str) -> list[str]:
    STATE["engine"] = engine
    STATE["model"] = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return sorted(server.url for server in engine.stats().servers)


def connect(model: str, **arguments: Any) -> list[str]:
    return use(AsyncSGLang.connect(**arguments), model)


def start_on_ray(model: str, **arguments: Any) -> list[str]:
    launcher = RayLauncher(strategy="SPREAD")
    engine = AsyncSGLang.from_pretrained(model, launcher=launcher, **arguments)
    return use(engine, model)


def statistics() -> list[dict[str, Any]]:
    return [asdict(server) for server in STATE["engine"].stats().servers]


def generate(count: int, length: int) -> dict[str, Any]:
    """Generates; the difference of the log-probs from the model's is its result."""
    start = time.monotonic()
    responses = STATE["engine"].generate(
        input_ids=[[*PROMPT, number] for number in range(count)],
        sampling_params={"max_new_tokens": length, "ignore_eos": True},
        return_logprobs=True,
    )
    seconds = time.monotonic() - start
    differences = [
        response_difference(response, [*PROMPT, number], STATE["model"])
        for number, response in enumerate(responses)
    ]
    return {
        "difference": max(differences),
        "tokens": sum(len(response.token_ids) for response in responses),
        "versions": sorted({response.weight_version for response in responses}),
        "seconds": seconds,
    }


def make_sender(**arguments: Any) -> None:
    scheme = SGLangWeightSyncScheme(STATE["engine"], **arguments)
    STATE["sender"] = scheme.create_sender()


@torch.no_grad()
def update(scale: float) -> dict[str, Any]:
    """Changes the model and sends its weights."""
    for parameter in STATE["model"].parameters():
        parameter.mul_(scale)
    start = time.monotonic()
    report = STATE["sender"].update_weights(STATE["model"])
    return {"version": report.version, "seconds": time.monotonic() - start}


def recover() -> None:
    STATE["sender"].recover()


def open_gateway(host: str) -> dict[str, str]:
    STATE["gateway"] = gateway = Gateway(STATE["engine"], host=host, api_key="sk-agent")
    gateway.start()
    session = STATE["session"] = gateway.session()
    return {"base_url": session.base_url, "key": session.key}


def recorded() -> dict[str, Any]:
    """The turns of the session, and the difference of their log-probs."""
    gateway, session = STATE["gateway"], STATE["session"]
    batch = gateway.to_tensordict([session])
    return {
        "texts": [turn.text for turn in session.turns],
        "difference": batch_difference(batch, STATE["model"]),
    }


def main() -> None:
    # Gloo writes to the standard output, too.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"value": "ready"}), file=answers)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": globals()[name](**arguments)}
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), file=answers)
    # As a run that was ended.
    os._exit(0)


if __name__ == "__main__":
    main()
