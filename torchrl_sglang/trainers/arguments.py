"""Checks a run's arguments, and decides where its servers run. Pure.

What is wrong is found before servers are started, which takes minutes.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchrl_sglang.backends.async_sglang import AsyncSGLang
from torchrl_sglang.backends.contract import RLSGLangEngine
from torchrl_sglang.backends.launch.environment import check_environment
from torchrl_sglang.collectors.groups.conversations import check_step
from torchrl_sglang.collectors.groups.reward_functions import (
    RewardFunction,
    read_functions,
)
from torchrl_sglang.collectors.groups.tools import Tools
from torchrl_sglang.collectors.scheduling.prompts import (
    count_tasks,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.objectives.attention import PACKED
from torchrl_sglang.policies.sampling import (
    SamplingParams,
    check_numbers,
    translate,
)
from torchrl_sglang.recording.recorder import RunRecorder
from torchrl_sglang.requests.behaviour import leaves_out, plan_behaviour
from torchrl_sglang.requests.request import GenerateRequest
from torchrl_sglang.requests.sampling import (
    changes_logits,
    check_sampling_params,
    check_values,
    shifts_logits,
    temperature_of,
)
from torchrl_sglang.support.checks import (
    check_count,
    check_flag,
    check_mapping,
    given_once,
    suggest,
)
from torchrl_sglang.support.urls import ADMIN_KEY_VARIABLE, KEY_VARIABLE
from torchrl_sglang.support.user_code import refuse_coroutine
from torchrl_sglang.trainers.ranks import TrainerRanks
from torchrl_sglang.types import LogProbsMode, ServerCapabilities, ServerPlacement

SAMPLING: Mapping[str, Any] = {"max_new_tokens": 512, "temperature": 1.0}
"""Sampling parameters of a run that gives none."""

CONNECTING = ("url", "server_url", "urls", "router_url")
"""Arguments of an engine whose servers run already."""

COLOCATED_SHARE = 0.6
"""Share of a GPU's memory of a server that sleeps while the trainer trains, unless
``engine`` has another one."""


def check_counts(**counts: tuple[Any, int]) -> None:
    """Checks numbers, of which some may be ``None``."""
    for name, (count, least) in counts.items():
        if count is not None or name not in ("steps", "show_samples"):
            check_count(name, count, least=least)


MAPPING, FUNCTION = "a mapping of arguments", "a function"

PARTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lora", "weight_sync", "gateway"), (MAPPING,)),
    **dict.fromkeys(("loss", "optimizer", "collector"), (MAPPING, FUNCTION)),
    **dict.fromkeys(("agent", "env"), (FUNCTION,)),
}
"""Argument that says how a part is made -> what it may be."""


def check_parts(**given: Any) -> None:
    """Checks what parts are made of; ``None`` leaves a part to the run."""
    for name, value in given.items():
        kind = MAPPING if isinstance(value, Mapping) else FUNCTION
        is_one = kind in PARTS[name] and (kind == MAPPING or callable(value))
        if value is not None and not is_one:
            raise ConfigurationError(
                f"{name} must be {' or '.join(PARTS[name])}, got {value!r}."
            )
        if name != "agent":
            refuse_coroutine(name, value, "what it returns is not awaited")


def check_attention(name: Any) -> None:
    """Checks the name of an attention of transformers; its packages are not."""
    # A name with a slash is that of kernels on the hub.
    registered = ALL_ATTENTION_FUNCTIONS.valid_keys()
    known = ["eager", *(each for each in registered if each != PACKED)]
    if name is None or name in known or (isinstance(name, str) and "/" in name):
        return
    raise ConfigurationError(
        f"attn_implementation={name!r} is not one of transformers': {', '.join(known)}."
    )


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Types that weights are trained in."""


def check_dtype(dtype: Any) -> torch.dtype:
    """Returns a type that weights are trained in, of its name or itself."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigurationError(
            f"dtype={dtype!r} is no type that weights are trained in; give 'float32', "
            f"or 'bfloat16' where memory is short."
        )
    return DTYPES[name]


def check_folder(name: str, folder: Any) -> Path:
    """Returns the path of a folder."""
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise ConfigurationError(f"{name} must be a folder's path, got {folder!r}.")
    return Path(folder).expanduser()


def connect_arguments(
    engine: Any, environment: Mapping[str, str] = os.environ
) -> dict[str, Any] | None:
    """Returns the arguments of ``AsyncSGLang.connect``, or None for servers to start.

    The servers' keys are those of the environment, unless there are others: what is in
    a run's file or on its command line is read by others.

    Args:
        engine: that of a run: a URL, several, or a mapping with one of ``CONNECTING``.
        environment: with the keys.

    Raises:
        ConfigurationError: if there is an argument that is for servers to be started.
    """
    if isinstance(engine, str):
        engine = {"url": engine}
    elif isinstance(engine, Sequence):
        engine = {"urls": list(engine)}
    if not isinstance(engine, Mapping) or engine.keys().isdisjoint(CONNECTING):
        return None
    known = inspect.signature(AsyncSGLang.connect).parameters
    for name in engine:
        if name not in known:
            hint = suggest(str(name), known)
            raise ConfigurationError(
                f"engine has the address of servers that run, and {name!r}, which is "
                f"not for those but for servers that are started here; leave one of "
                f"them out.{hint}"
            )
    variables = {"api_key": KEY_VARIABLE, "admin_api_key": ADMIN_KEY_VARIABLE}
    keys = {name: environment.get(variable) for name, variable in variables.items()}
    return {**{name: key for name, key in keys.items() if key}, **engine}


def check_minibatches(minibatches: int, responses: int) -> None:
    """Checks that each minibatch of a batch has a response."""
    if minibatches > responses:
        raise ConfigurationError(
            f"minibatches={minibatches} are more than the {responses} responses of a "
            f"batch, group_size * groups_per_batch; give fewer."
        )


def check_placement(
    model: Any, engine: Any, colocated: bool, max_staleness: int
) -> None:
    """Checks that servers can be started as they are to be."""
    is_kind = isinstance(engine, (RLSGLangEngine, str, Mapping, Sequence))
    is_empty = isinstance(engine, Sequence) and not engine
    if engine is not None and (is_empty or not is_kind):
        raise ConfigurationError(
            f"engine must be arguments of AsyncSGLang.from_pretrained, a URL, a list "
            f"of these, or an engine, got {engine!r}."
        )
    if not isinstance(model, (str, os.PathLike, nn.Module)):
        raise ConfigurationError(
            f"model must be a folder, a hub name or a model, got {model!r}."
        )
    if isinstance(engine, Mapping):
        check_environment(engine.get("environment"))
        for name in ("model", "model_name", "model_path"):
            if name in engine:
                raise ConfigurationError(
                    f"engine has {name!r}, and servers serve the model that is "
                    f"trained; leave it out."
                )
    runs = isinstance(engine, RLSGLangEngine) or connect_arguments(engine) is not None
    if isinstance(model, nn.Module) and not runs:
        raise ConfigurationError(
            "model is a module, of which no server can be started; give the engine "
            "that serves it, or its URL, as engine=..., or the model's folder or name."
        )
    if check_flag("colocated", colocated) and max_staleness:
        raise ConfigurationError(
            f"colocated=True lets the servers sleep while the trainer trains, so that "
            f"max_staleness={max_staleness} has no use; leave it out, or give the "
            f"servers GPUs of their own."
        )


def check_functions(
    functions: Mapping[str, Any], query_key: str
) -> dict[tuple[str, str], RewardFunction]:
    """Checks the functions that make conversations, as the collector will.

    Returns:
        dict: argument and name -> reward function.

    Raises:
        ConfigurationError: if one is no function, or takes other arguments, or nothing
            sets a reward.
    """
    rewards: dict[tuple[str, str], RewardFunction] = {}
    for argument, of_group in (("rewards", False), ("group_rewards", True)):
        given = functions[argument]
        read = read_functions(argument, given, of_group=of_group, query_key=query_key)
        rewards |= {(argument, name): function for name, function in read.items()}
    if functions["step"] is not None:
        check_step(functions["step"])
    elif not functions["rewards"] and not functions["group_rewards"]:
        raise ConfigurationError(
            "There is nothing to learn from: give rewards=... or group_rewards=..., "
            "functions of a conversation and its task, or a step that sets rewards."
        )
    if functions["tools"] is not None:
        Tools(functions["tools"])
    system = functions["system_prompt"]
    if system is not None and not isinstance(system, str):
        raise ConfigurationError(f"system_prompt must be a text, got {system!r}.")
    if functions["max_turns"] is not None:
        check_count("max_turns", functions["max_turns"])
    return rewards


def read_sampling(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a run's sampling parameters, with the defaults that it has others for.

    Raises:
        ConfigurationError: if there is one that the policy does not know.
    """
    mine = dict(check_mapping("generate_kwargs", given or {}))
    for name in mine:
        if not isinstance(name, str):
            raise ConfigurationError(f"generate_kwargs has the name {name!r}, no text.")
    if "max_tokens" in mine:
        most = mine.pop("max_tokens")
        mine["max_new_tokens"] = given_once(
            "max_new_tokens", mine.get("max_new_tokens"), "max_tokens", most
        )
    check_numbers(mine)
    if {"n", "num_return_sequences"} & mine.keys():
        raise ConfigurationError(
            "generate_kwargs has the number of responses to a prompt; give it as "
            "group_size=...."
        )
    sampling = {**SAMPLING, **mine}
    if sampling["max_new_tokens"] is not None:
        check_count("max_new_tokens", sampling["max_new_tokens"])
    translated = translate(sampling).engine
    check_values(translated)
    if translated.get("temperature") == 0:
        warnings.warn(
            "temperature=0 gives all responses of a group the same tokens, and unless "
            "their tools or environments differ the same rewards, which teaches "
            "nothing: give generate_kwargs a temperature above 0, such as 1.0. "
            "Evaluation is greedy anyway.",
            RuntimeWarning,
            stacklevel=4,
        )
    return sampling


OF_THE_RUN = frozenset(
    {
        *("policy", "prompts", "query_key", "group_size", "groups_per_batch"),
        *("total_groups", "max_staleness", "on_stale", "keep_group", "seed"),
        *("deterministic", "weight_sync_schemes", "agent", "gateway", "env"),
        *("rewards", "group_rewards", "step", "tools", "max_turns", "system_prompt"),
    }
)
"""Arguments of the collector that a run gives it."""

NOT_OF_A_FUNCTION: Mapping[str, Any] = {
    **dict.fromkeys(("prompts", "keep_group", "eval_prompts")),
    "epochs": 1,
    "max_staleness": 0,
    "on_stale": "drop",
}
"""Arguments that a collector of the user's own does not get -> their defaults."""


def check_collector(
    collector: Any, functions: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Checks that there is one way to collect.

    Args:
        collector: that of a run: arguments, a function or ``None``.
        functions: what makes conversations; ``None`` for those that are not given.
        options: values of ``NOT_OF_A_FUNCTION``.

    Raises:
        ConfigurationError: if there are two ways, or none.
    """
    given = [name for name, value in functions.items() if value is not None]
    if callable(collector):
        _check_beside_a_function(given, options)
        return
    _check_mapping_of_collector(collector or {})
    if options["prompts"] is None:
        raise ConfigurationError("Give the prompts to train on as prompts=....")
    for whole in ("agent", "env"):
        others = [name for name in given if name != whole]
        if whole in given and others:
            raise ConfigurationError(
                f"{' and '.join(others)} cannot be given with {whole}, which is "
                f"the whole conversation."
            )


def _check_mapping_of_collector(collector: Mapping[str, Any]) -> None:
    for name in OF_THE_RUN.intersection(collector):
        raise ConfigurationError(
            f"collector has {name!r}, which the run itself says; give it to GRPO "
            f"(groups in all are steps times groups_per_batch)."
        )
    if collector.get("batches_per_update", 1) != 1:
        raise _one_update_a_batch("collector has")
    if collector.get("replay_buffer") is not None:
        raise ConfigurationError(
            "collector has 'replay_buffer', and a run trains on batches as they come; "
            "leave it out, or write a loop of your own."
        )


def _check_beside_a_function(
    functions: Sequence[str], options: Mapping[str, Any]
) -> None:
    """Refuses what a collector of the user's own would not get."""
    if options["eval_prompts"] is not None:
        raise ConfigurationError(
            "eval_prompts are scored by the rewards of the run, and collector is a "
            "function that makes a collector with its own; give rewards=... and "
            "further arguments as collector={...}, or evaluate in a loop of your own."
        )
    given = list(functions)
    for name, default in NOT_OF_A_FUNCTION.items():
        value = options[name]
        if value is not default and (default is None or value != default):
            given.append(name)
    if given:
        raise ConfigurationError(
            f"collector=... makes the whole collector, so that {' and '.join(given)} "
            f"cannot be given beside it; give them to the collector there."
        )


def _one_update_a_batch(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} batches_per_update, and a run sends weights after each batch, so that "
        f"groups for later ones would be too old; leave it out, and make batches "
        f"larger with groups_per_batch=.... minibatches=... has several optimizer "
        f"steps in one."
    )


def check_made(made: Any, group_size: int) -> None:
    """Checks a collector of the user's own, as far as it tells of itself."""
    if not hasattr(made, "increment_version"):
        raise ConfigurationError(
            f"collector returned {made!r}; return a collector, as "
            f"AsyncLLMCollector(policy=policy, ...)."
        )
    size = getattr(made, "group_size", group_size)
    if size != group_size:
        raise ConfigurationError(
            f"collector returned one with group_size={size}, and the run compares "
            f"group_size={group_size} responses with each other; give both the same."
        )
    if getattr(made, "batches_per_update", 1) != 1:
        raise _one_update_a_batch("collector returned one with")


def check_groups(queries: Sequence[str], group_size: int) -> None:
    """Checks that conversations whose rewards are compared have one prompt.

    Args:
        queries: prompt of each conversation of a batch.
        group_size: of a run.
    """
    for start in range(0, len(queries), group_size):
        for query in queries[start : start + group_size]:
            if query != queries[start]:
                raise ConfigurationError(
                    f"A group of group_size={group_size} has the prompts "
                    f"{queries[start]!r:.80} and {query!r:.80}; give GRPO the "
                    f"group_size of the collector, which yields whole groups."
                )


def count_groups(
    steps: int | None, epochs: int, prompts: Any, groups_per_batch: int
) -> int | None:
    """Returns the groups of a run; ``None`` if only reading the prompts tells."""
    if steps is not None:
        if epochs != 1:
            raise ConfigurationError(
                f"steps={steps} and epochs={epochs} say twice when to end; give one."
            )
        return steps * groups_per_batch
    if epochs != 1 and isinstance(prompts, Iterator):
        raise ConfigurationError(
            f"epochs={epochs} needs prompts that can be read again, and an iterator "
            f"ends; give a list or another iterable, steps=..., or one pass."
        )
    tasks = count_tasks(prompts)
    return None if tasks is None else epochs * tasks


def server_arguments(
    given: Mapping[str, Any],
    ranks: TrainerRanks,
    *,
    colocated: bool,
    lora: Mapping[str, Any] | None,
    by_file: bool,
    seed: int,
) -> dict[str, Any]:
    """Returns the arguments of a run's servers.

    Args:
        given: those that the user gave, which take the place of others.
        ranks: of the trainer, which have the first GPUs.
        colocated: whether the servers are on the same ones.
        lora: arguments of the adapter that is trained alone; None: all weights are.
        by_file: whether weights go by files, which every server reads.
        seed: of the servers.

    Raises:
        ConfigurationError: if a server would be on a GPU that no rank of the trainer is
            on, so that it could not open the weights.
    """
    arguments: dict[str, Any] = {"random_seed": seed}
    on_gpus = torch.cuda.is_available()
    if lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": lora.get("r", 8),
            "lora_target_modules": ["all"],
        }
    if colocated:
        arguments["enable_memory_saver"] = True
        if "gpu_memory_utilization" not in given:
            arguments["mem_fraction_static"] = COLOCATED_SHARE
        if on_gpus and not {"launcher", "cuda_devices"} & given.keys():
            # An adapter that one process has travels in the requests themselves.
            anywhere = by_file or (lora is not None and ranks.size == 1)
            arguments |= _one_for_each_rank(given, ranks, anywhere=anywhere)
    if not on_gpus:
        arguments["device"] = "cpu"
    elif "launcher" not in given:
        first = 0 if colocated else ranks.local_size
        replicas = {**arguments, **given}.get("num_replicas", 1)
        count = replicas * given.get("tp_size", 1)
        arguments["cuda_devices"] = list(range(first, first + count))
    return {**arguments, **given}


def _one_for_each_rank(
    given: Mapping[str, Any], ranks: TrainerRanks, *, anywhere: bool
) -> dict[str, Any]:
    """Returns how many servers there are on the trainer's GPUs."""
    tp_size = given.get("tp_size", 1)
    replicas = given.get("num_replicas", max(ranks.local_size // tp_size, 1))
    if (replicas - 1) * tp_size >= ranks.local_size and not anywhere:
        gpus = replicas * tp_size
        raise ConfigurationError(
            f"colocated=True has each server open the memory of a rank of the trainer "
            f"on its GPUs; num_replicas={replicas} with tp_size={tp_size} are on "
            f"{gpus} GPUs, and {ranks.local_size} rank(s) are here. Start as many "
            f"ranks, torchrun --nproc-per-node {gpus}; or give fewer servers, or "
            f"weight_sync={{'directory': a folder on this machine, such as "
            f"'/dev/shm/weights'}}."
        )
    return {"num_replicas": replicas}


def check_gpus(servers: Iterable[ServerPlacement], gpus: Collection[str]) -> None:
    """Refuses servers on the trainer's GPUs, which a launcher may not know of.

    Args:
        servers: where the servers run.
        gpus: the trainer's, as ``CUDA_VISIBLE_DEVICES`` names them.

    Raises:
        ConfigurationError: naming a server.
    """
    for server in servers:
        if server.local and not set(gpus).isdisjoint(server.gpus or ()):
            raise ConfigurationError(
                f"The launcher started the server at {server.url} on the trainer's "
                f"GPUs, {', '.join(gpus)}; start Ray on this machine without them, as "
                f"in CUDA_VISIBLE_DEVICES=1,2,3 ray start ..., or name other nodes, as "
                f"in launcher=RayLauncher(nodes=...)."
            )


def warn_of_staleness(max_staleness: int, correction: Any, loss: Any) -> None:
    """Warns of tokens of earlier weights that nothing corrects for."""
    # A loss that a function makes may have a correction of its own.
    if max_staleness and correction is None and not callable(loss):
        warnings.warn(
            f"max_staleness={max_staleness} trains on tokens of earlier weights, and "
            f"nothing corrects for that: give correction='decoupled_token_is', or "
            f"max_staleness=0.",
            RuntimeWarning,
            stacklevel=4,
        )


def check_sampling(
    params: Mapping[str, Any], mode: LogProbsMode, capabilities: ServerCapabilities
) -> None:
    """Refuses sampling that servers cannot report; warns of what is not trained.

    Args:
        params: sampling parameters of the run.
        mode: of its log-probs.
        capabilities: of the servers.

    Raises:
        UnsupportedByServerError: if the mode is ``"behaviour"``, and the servers do not
            report what tokens are drawn from.
    """
    checked = check_sampling_params(params, capabilities)
    if mode == "behaviour":
        request = GenerateRequest(input_ids=[0], logprobs_mode=mode)
        plan_behaviour(request, checked, capabilities)
        # A support has what a grammar left.
        has_support = bool(leaves_out(checked, capabilities))
        changes = shifts_logits if has_support else changes_logits
        if changes(checked, capabilities):
            remedy = "" if has_support else " A top_k has supports, for a grammar."
            warnings.warn(
                f"A penalty, a bias, min_new_tokens or a grammar among "
                f"{sorted(checked)} changes what tokens are drawn from, and the "
                f"trainer replays temperature and support alone: the first ratio is "
                f"not 1.{remedy} Leave it out, or give "
                f"correction='decoupled_token_is'.",
                RuntimeWarning,
                stacklevel=2,
            )
        return
    name = leaves_out(checked, capabilities)
    if not name and temperature_of(checked, capabilities) not in (None, 1.0):
        name = "temperature"
    if name:
        value = checked.get(name, capabilities.default_sampling_params.get(name))
        warnings.warn(
            f"Tokens are drawn with {name}={value!r}, and the whole vocabulary is "
            f"trained at temperature 1: the gradient is that of another policy. Give "
            f"logprobs_mode='behaviour', which trains what is drawn from, or "
            f"generate_kwargs with temperature=1.0 alone.",
            RuntimeWarning,
            stacklevel=2,
        )


def check_sampling_of_agents(params: Mapping[str, Any]) -> None:
    """Refuses parameters that choose what a policy returns: agents get a gateway's."""
    chosen, plain = translate(params), SamplingParams()
    for name in (each.name for each in fields(plain) if each.name != "engine"):
        value = getattr(chosen, name)
        if value != getattr(plain, name):
            raise ConfigurationError(
                f"generate_kwargs sets {name}={value!r}, and an agent's requests say "
                f"themselves what they return; leave it out."
            )


def check_recording(recorder: Any) -> RunRecorder | bool:
    """Returns an argument ``recorder`` of a run.

    Raises:
        ConfigurationError: if it is neither a bool nor a recorder.
    """
    if isinstance(recorder, (bool, RunRecorder)):
        return recorder
    raise ConfigurationError(
        f"recorder must be a bool or a RunRecorder, got {recorder!r}; give "
        f"RunRecorder(folder), or False."
    )
