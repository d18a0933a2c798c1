"""Engine, policy and gateway of a run."""

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
from torchrl_sglang.requests.request import check_logprobs_mode
from torchrl_sglang.requests.token_columns import (
    ROUTED_EXPERTS,
    check_columns,
    find_columns,
)
from torchrl_sglang.support.checks import check_keywords
from torchrl_sglang.trainers.arguments import RunArguments
from torchrl_sglang.trainers.placement import (
    check_gpus,
    connect_arguments,
    server_arguments,
)
from torchrl_sglang.trainers.progress import tell
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.trainers.sampling import check_sampling, check_sampling_of_agents

OF_A_SERVER = {"api_key", "device", "dp_size", "python", "tp_size"}
"""Parameters of ``from_pretrained`` that each server gets as they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Parts that generate; all ``None`` on other ranks than the first."""

    engine: Any = None
    policy: SGLangWrapper | None = None
    gateway: Gateway | None = None
    chat_template: str | None = None
    """Source of the chat template that prompts are rendered with."""


class Serving:
    """Checks and starts a run's engine, policy and gateway."""

    def __init__(self, arguments: RunArguments, opening: Sequence[Message]) -> None:
        self.arguments, self.sampling = arguments, arguments.sampling
        self.opening = opening
        self.logprobs_mode = check_logprobs_mode(arguments.logprobs_mode)
        self.token_columns = (ROUTED_EXPERTS,) if arguments.replay_routing else ()
        if arguments.chat_template is not None:
            check_template(arguments.chat_template)
        if arguments.gateway is not None:
            check_keywords("gateway", arguments.gateway, Gateway)
            if arguments.agent is None:
                raise ConfigurationError(
                    "gateway is for agents; give an agent, too, or leave it out."
                )
        if arguments.agent is not None:
            check_sampling_of_agents(self.sampling)
            if arguments.chat_template_kwargs:
                raise ConfigurationError(
                    "chat_template_kwargs cannot be given with agent, whose requests "
                    "have their own; send it as chat_template_kwargs of a request."
                )
        self._check_servers()

    def _check_servers(self) -> None:
        """Checks the arguments of servers on this machine, and starts none.

        The first rank starts them, and another machine's SGLang can differ.
        """
        engine = self.arguments.engine or {}
        if not isinstance(engine, Mapping) or connect_arguments(engine) is not None:
            return
        is_here = engine.get("launcher", "local") == "local"
        if not is_here or int(os.environ.get("RANK", "0")):
            return
        parameters = inspect.signature(AsyncSGLang.from_pretrained).parameters
        of_engine = parameters.keys() - OF_A_SERVER
        arguments = {
            name: value
            for name, value in engine.items()
            if value is not None and name not in of_engine
        }
        make_server_command(str(self.arguments.model), **arguments).release()

    def start(self, stack: ExitStack, ranks: TrainerRanks) -> Served:
        """Makes engine, policy and gateway on the first rank; a stack ends them."""
        engine = self._start_engine(stack, ranks)
        columns = find_columns(self.token_columns)
        # Under SGLang's names, while the policy translates its parameters itself.
        sampling = translate(self.sampling).engine
        check_columns(columns, sampling, engine.capabilities)
        check_sampling(sampling, self.logprobs_mode, engine.capabilities)
        common: dict[str, Any] = {
            "chat_template": self.arguments.chat_template,
            "token_columns": columns,
            "logprobs_mode": self.logprobs_mode,
        }
        policy = SGLangWrapper(
            engine,
            input_mode="history",
            generate_kwargs=self.sampling,
            chat_template_kwargs=self.arguments.chat_template_kwargs,
            return_log_probs=True,
            prefer_tokens=True,
            **common,
        )
        if self.arguments.agent is None:
            source = policy.template.source
            return Served(engine=engine, policy=policy, chat_template=source)
        options = {**common, "default_sampling_params": sampling}
        options |= self.arguments.gateway or {}
        source = choose_template(policy.tokenizer, template=options["chat_template"])
        gateway = stack.enter_context(Gateway(engine, **options))
        return Served(
            engine=engine, policy=policy, gateway=gateway, chat_template=source
        )

    def _start_engine(self, stack: ExitStack, ranks: TrainerRanks) -> Any:
        engine = self.arguments.engine
        if isinstance(engine, RLSGLangEngine):
            return engine
        if (running := connect_arguments(engine)) is not None:
            return stack.enter_context(AsyncSGLang.connect(**running))
        assert engine is None or isinstance(engine, Mapping)
        options = server_arguments(
            self._server_options(engine or {}),
            ranks,
            colocated=self.arguments.colocated,
            lora=self.arguments.lora,
            by_file="directory" in (self.arguments.weight_sync or ()),
            seed=self.arguments.seed,
        )
        model = str(self.arguments.model)
        self._check_template(model, options)
        tell(f"Starting the servers of {model} ...")
        started = stack.enter_context(AsyncSGLang.from_pretrained(model, **options))
        if "launcher" in options and torch.cuda.is_available():
            check_gpus(started.placements, visible_devices()[: ranks.local_size])
        return started

    def _check_template(self, model: str, options: Mapping[str, Any]) -> None:
        """Applies the chat template once: servers take minutes to start."""
        tokenizer = load_tokenizer(model, options)
        source = choose_template(
            tokenizer, template=self.arguments.chat_template, by_model=True
        )
        kwargs = self.arguments.chat_template_kwargs
        template = ChatTemplate(tokenizer, source, template_kwargs=kwargs)
        if self.opening:
            template.render(self.opening)

    def _server_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the user's options of servers, with those that the run needs."""
        options = dict(given)
        if self.arguments.deterministic:
            options = {"deterministic": True, **options}
        if self.logprobs_mode == "behaviour":
            variables = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
            options["environment"] = {**variables, **(options.get("environment") or {})}
        if not self.token_columns:
            return options
        path = str(self.arguments.model)
        if find_experts(load_model_config(path)) is None:
            raise ConfigurationError(
                f"replay_routing=True is for mixtures of experts, and {path!r} is "
                f"none; leave it out."
            )
        return {"enable_return_routed_experts": True, **options}


def load_tokenizer(model: str, options: Mapping[str, Any]) -> Any:
    """Returns the tokenizer of servers that are started with these options."""
    from transformers import AutoTokenizer

    path = options.get("tokenizer_path") or model
    trusted = bool(options.get("trust_remote_code"))
    revision = options.get("revision") or "main"
    try:
        return AutoTokenizer.from_pretrained(
            path, trust_remote_code=trusted, revision=revision
        )
    except Exception as error:
        advice = "give a model's folder or name that has one."
        raise unreadable(f"The tokenizer {path!r}", error, trusted, advice) from error
