"""Engine, policy and gateway of a run, as its arguments ask for them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from torchrl_sglang.backends.async_sglang import AsyncSGLang
from torchrl_sglang.backends.client.model_info import (
    find_experts,
    load_model_config,
    unreadable,
)
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.launch.gpus import visible_devices
from torchrl_sglang.backends.launch.server_command import make_server_command
from torchrl_sglang.chat.choose import check_template, choose_template
from torchrl_sglang.chat.messages import Message
from torchrl_sglang.chat.template import ChatTemplate
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.gateway.gateway import Gateway
from torchrl_sglang.policies.sampling import translate
from torchrl_sglang.policies.sglang_wrapper import SGLangWrapper
from torchrl_sglang.requests.token_columns import check_columns, find_columns
from torchrl_sglang.support.checks import check_keywords
from torchrl_sglang.trainers.arguments import (
    check_gpus,
    check_sampling,
    check_sampling_of_agents,
    connect_arguments,
    server_arguments,
)
from torchrl_sglang.trainers.progress import tell
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.types import LogProbsMode

OF_A_SERVER = {"api_key", "device", "dp_size", "python", "tp_size"}
"""Parameters of ``from_pretrained`` that each server gets as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What generates; all ``None`` on other ranks than the first."""

    engine: Any = None
    """The engine."""
    policy: SGLangWrapper | None = None
    """Wrapper that generates with it."""
    gateway: Gateway | None = None
    """Endpoint of an agent; ``None`` without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What generates for a run, and where. The arguments are those of ``GRPO``."""

    model: Any
    engine: Any
    sampling: Mapping[str, Any]
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    opening: Sequence[Message]
    """Messages of the first prompt; empty if they are not known."""
    token_columns: tuple[str, ...]
    """Names of what the servers report of each token, beside its log-prob."""
    logprobs_mode: LogProbsMode
    has_agent: bool
    gateway: Mapping[str, Any] | None
    colocated: bool
    lora: Mapping[str, Any] | None
    weights_by_file: bool
    seed: int
    deterministic: bool

    def __post_init__(self) -> None:
        if self.chat_template is not None:
            check_template(self.chat_template)
        if self.gateway is not None:
            check_keywords("gateway", self.gateway, Gateway)
            if not self.has_agent:
                raise ConfigurationError(
                    "gateway is for agents; give an agent, too, or leave it out."
                )
        if self.has_agent:
            check_sampling_of_agents(self.sampling)
            if self.chat_template_kwargs:
                raise ConfigurationError(
                    "chat_template_kwargs cannot be given with agent, whose requests "
                    "have their own; send it as chat_template_kwargs of a request."
                )
        self._check_servers()

    def _check_servers(self) -> None:
        """Checks the arguments of servers on this machine, and starts none.

        The first rank starts them, and another machine's SGLang can differ.
        """
        given = self.engine or {}
        runs = isinstance(given, RLSGLangEngine) or connect_arguments(given) is not None
        is_here = not runs and given.get("launcher", "local") == "local"
        if not is_here or int(os.environ.get("RANK", "0")):
            return
        known = inspect.signature(AsyncSGLang.from_pretrained).parameters
        of_engine = known.keys() - OF_A_SERVER
        arguments = {
            name: value
            for name, value in given.items()
            if value is not None and name not in of_engine
        }
        make_server_command(os.fspath(self.model), **arguments).release()

    def start(self, stack: ExitStack, ranks: TrainerRanks) -> Served:
        """Makes engine, policy and gateway on the first rank; a stack ends them."""
        engine = self._start_engine(stack, ranks)
        columns = find_columns(self.token_columns)
        # Under SGLang's names; the policy translates its own.
        sampling = translate(self.sampling).engine
        check_columns(columns, sampling, engine.capabilities)
        check_sampling(sampling, self.logprobs_mode, engine.capabilities)
        policy = SGLangWrapper(
            engine,
            token_columns=columns,
            logprobs_mode=self.logprobs_mode,
            input_mode="history",
            generate_kwargs=self.sampling,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            return_log_probs=True,
            prefer_tokens=True,
        )
        if not self.has_agent:
            return Served(engine=engine, policy=policy)
        arguments = {
            "chat_template": self.chat_template,
            "default_sampling_params": sampling,
            "token_columns": columns,
            "logprobs_mode": self.logprobs_mode,
            **(self.gateway or {}),
        }
        gateway = stack.enter_context(Gateway(engine, **arguments))
        return Served(engine=engine, policy=policy, gateway=gateway)

    def _start_engine(self, stack: ExitStack, ranks: TrainerRanks) -> Any:
        given = self.engine
        if isinstance(given, RLSGLangEngine):
            return given
        if (running := connect_arguments(given)) is not None:
            return stack.enter_context(AsyncSGLang.connect(**running))
        arguments = server_arguments(
            self._of_servers(given or {}),
            ranks,
            colocated=self.colocated,
            lora=self.lora,
            by_file=self.weights_by_file,
            seed=self.seed,
        )
        model = os.fspath(self.model)
        self._check_template(model, arguments)
        tell(f"Starting the servers of {model} ...")
        started = AsyncSGLang.from_pretrained(model, **arguments)
        engine = stack.enter_context(started)
        if "launcher" in arguments and torch.cuda.is_available():
            check_gpus(engine.placements, visible_devices()[: ranks.local_size])
        return engine

    def _check_template(self, model: str, arguments: Mapping[str, Any]) -> None:
        """Applies the chat template once: servers take minutes to start."""
        from transformers import AutoTokenizer

        path = arguments.get("tokenizer_path") or model
        trusted = bool(arguments.get("trust_remote_code"))
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                path,
                trust_remote_code=trusted,
                revision=arguments.get("revision") or "main",
            )
        except Exception as error:
            advice = "give a model's folder or name that has one."
            raise unreadable(
                f"The tokenizer {path!r}", error, trusted, advice
            ) from error
        source = choose_template(tokenizer, template=self.chat_template, by_model=True)
        kwargs = self.chat_template_kwargs
        template = ChatTemplate(tokenizer, source, template_kwargs=kwargs)
        if self.opening:
            template.render(self.opening)

    def _of_servers(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arguments of servers that report what this run reads."""
        found = dict(given)
        if self.deterministic:
            found = {"deterministic": True, **found}
        if self.logprobs_mode == "behaviour":
            after = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
            found["environment"] = {**after, **(found.get("environment") or {})}
        if not self.token_columns:
            return found
        path = os.fspath(self.model)
        if find_experts(load_model_config(path)) is None:
            raise ConfigurationError(
                f"replay_routing=True is for mixtures of experts, and {path!r} is "
                f"none; leave it out."
            )
        return {"enable_return_routed_experts": True, **found}
