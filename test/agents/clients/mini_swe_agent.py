"""mini-swe-agent with its own configuration, in a folder of this machine."""

from __future__ import annotations

import os
from typing import Any

import yaml
from common import Job, serve
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import builtin_config_dir
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def run(job: Job) -> Any:
    config = yaml.safe_load((builtin_config_dir / "mini.yaml").read_text())
    if job.retries is not None:
        os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = str(1 + job.retries)
    given = job.given(timeout="timeout", retries="max_retries")
    model = LitellmModel(
        model_name="openai/policy",
        cost_tracking="ignore_errors",
        **{
            **config["model"],
            "model_kwargs": {
                **(config["model"].get("model_kwargs") or {}),
                "api_base": job.base_url,
                "api_key": job.key,
                **given,
            },
        },
    )
    environment = LocalEnvironment(cwd=job.folder, **config["environment"])
    templates = {k: v for k, v in config["agent"].items() if k != "mode"}
    try:
        ended = DefaultAgent(model, environment, **templates).run(job.messages[0])
    finally:
        os.environ.pop("MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT", None)
        job.read_calls()
    return ended["submission"].strip()


if __name__ == "__main__":
    serve(run)
