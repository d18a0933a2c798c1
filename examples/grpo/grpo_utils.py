"""What a run is made of: models, engine, policy, weight sync, collector, logger."""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchrl.record.loggers import Logger, get_logger
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_data import Problem, make_reward, system_prompt
from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    RayLauncher,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)
from torchrl_sglang.backends.launch.gpus import visible_devices
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import ServerPlacement

TINY = "tiny"
"""Name of the model that is made up."""


def find_model(cfg: DictConfig, folder: Path) -> str:
    """Returns the model's name, or the folder of the one that is made up.

    Args:
        cfg: the configuration.
        folder: of the run.
    """
    if cfg.model.name != TINY:
        return str(cfg.model.name)
    from torchrl_sglang.testing.tiny_model import save_tiny_model

    path = folder / "tiny_model"
    if not (path / "tokenizer_config.json").exists():
        save_tiny_model(path, initializer_range=0.05, seed=cfg.train.seed)
    return str(path)


def get_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a model, padding on the left as generation needs it."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.padding_side = "left"
    return tokenizer


def _load(cfg: DictConfig, path: str) -> PreTrainedModel:
    """Returns a model on the trainer's device."""
    trainer = cfg.train_model
    place: dict[str, Any] = {}
    if trainer.device == "cuda":
        place = {"attn_implementation": trainer.attn_implementation}
    if trainer.num_devices > 1:
        # Servers take the GPUs after these.
        gpus = dict.fromkeys(range(trainer.num_devices), "1000GiB")
        place |= {"device_map": "balanced", "max_memory": gpus}
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, trainer.torch_dtype), **place
    )
    return model if trainer.num_devices > 1 else model.to(trainer.device)


def get_train_model(cfg: DictConfig, path: str) -> PreTrainedModel:
    """Returns the model that is trained: whole, or a LoRA adapter of it."""
    model = _load(cfg, path)
    if cfg.train_model.lora.enabled:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(
            r=cfg.train_model.lora.r,
            lora_alpha=cfg.train_model.lora.alpha,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, adapter)
    if not cfg.train_model.gradient_checkpointing:
        return model.eval()
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    if cfg.train_model.lora.enabled:
        # Otherwise nothing that is checkpointed has a gradient.
        model.enable_input_require_grads()
    # Checkpointing is for models in training mode; these have no dropout.
    return model.train()


def get_ref_model(cfg: DictConfig, path: str) -> PreTrainedModel | None:
    """Returns the model before training, if the loss needs one beside the adapter's."""
    if not cfg.train.use_kl_to_ref or cfg.train_model.lora.enabled:
        return None
    return _load(cfg, path).eval().requires_grad_(False)


@contextmanager
def get_inference_model(
    cfg: DictConfig, path: str, tokenizer: PreTrainedTokenizerBase
) -> Iterator[SGLangWrapper]:
    """Starts the servers, or connects to them, for as long as the context lasts.

    Args:
        cfg: the configuration.
        path: of the model.
        tokenizer: its tokenizer.

    Yields:
        The policy that generates with them.
    """
    inference = cfg.inference_model
    if inference.url is None:
        engine = AsyncSGLang.from_pretrained(path, **server_arguments(cfg))
    else:
        engine = AsyncSGLang.connect(inference.url)
    with engine:
        if inference.launcher == "ray" and cfg.train_model.device == "cuda":
            gpus = visible_devices()[: cfg.train_model.num_devices]
            check_gpus(engine.placements, gpus)
        yield SGLangWrapper(
            engine,
            tokenizer=tokenizer,
            input_mode="history",
            return_log_probs=True,
            generate_kwargs=sampling_parameters(cfg),
        )


def sampling_parameters(cfg: DictConfig) -> dict[str, Any]:
    """Returns the sampling parameters of training."""
    inference = cfg.inference_model
    return {
        "max_new_tokens": inference.max_tokens,
        "temperature": inference.temperature,
        "top_p": inference.top_p,
        **OmegaConf.to_container(inference.generate_kwargs),
    }


def server_arguments(cfg: DictConfig) -> dict[str, Any]:
    """Returns the arguments of ``AsyncSGLang.from_pretrained``."""
    inference = cfg.inference_model
    arguments = {
        "num_devices": inference.num_devices,
        "num_replicas": inference.num_replicas,
        "device": inference.device,
        "dtype": inference.torch_dtype,
        "gpu_memory_utilization": inference.gpu_memory_utilization,
        "max_model_len": inference.max_model_len,
        "enforce_eager": inference.enforce_eager,
        "seed": cfg.train.seed,
    }
    if cfg.train_model.lora.enabled:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": cfg.train_model.lora.r,
            "lora_target_modules": ["all"],
        }
    if inference.colocated:
        arguments["enable_sleep_mode"] = True
    if inference.launcher == "ray":
        arguments["launcher"] = _ray_launcher(cfg)
    elif inference.device == "cuda":
        first = 0 if inference.colocated else cfg.train_model.num_devices
        count = inference.num_devices * inference.num_replicas
        arguments["cuda_devices"] = list(range(first, first + count))
    return arguments | OmegaConf.to_container(inference.server_args)


def _ray_launcher(cfg: DictConfig) -> RayLauncher:
    """Returns what starts servers on Ray, connected to its cluster."""
    import ray

    if not ray.is_initialized():
        ray.init(**OmegaConf.to_container(cfg.ray.init_config))
    return RayLauncher(**OmegaConf.to_container(cfg.ray.launcher))


def check_gpus(servers: Iterable[ServerPlacement], gpus: Collection[str]) -> None:
    """Refuses servers on the trainer's GPUs, of which Ray does not know.

    Args:
        servers: where the servers run.
        gpus: the trainer's, as ``CUDA_VISIBLE_DEVICES`` names them.

    Raises:
        ConfigurationError: naming a server.
    """
    for server in servers:
        if server.local and not set(gpus).isdisjoint(server.gpus or ()):
            raise ConfigurationError(
                f"Ray started the server at {server.url} on the trainer's GPUs, "
                f"{', '.join(gpus)}; start Ray on this machine without them, as in "
                f"CUDA_VISIBLE_DEVICES=1,2,3 ray start ..., or name other nodes in "
                f"ray.launcher.nodes."
            )


def make_weight_sync_scheme(
    cfg: DictConfig, engine: AsyncSGLang
) -> SGLangWeightSyncScheme:
    """Returns what sends the trained weights to the servers."""
    return SGLangWeightSyncScheme(engine, **OmegaConf.to_container(cfg.weight_sync))


def make_collector(
    cfg: DictConfig,
    policy: SGLangWrapper,
    scheme: SGLangWeightSyncScheme,
    problems: Sequence[Problem],
) -> AsyncLLMCollector:
    """Returns what collects whole groups of responses, each once in an epoch."""
    train, repeats = cfg.train, cfg.env.repeats
    return AsyncLLMCollector(
        policy=policy,
        prompts=problems,
        rewards=make_reward(cfg),
        system_prompt=system_prompt(cfg),
        max_turns=1,
        group_size=repeats,
        groups_per_batch=train.dialog_turns_per_batch // repeats,
        batches_per_update=train.weight_update_frequency,
        max_staleness=train.max_staleness,
        on_stale=train.on_stale,
        total_groups=train.total_dialog_turns // repeats,
        max_in_flight=cfg.env.num_envs,
        shuffle=True,
        seed=train.seed,
        weight_sync_schemes={"policy": scheme},
    )


def make_logger(
    cfg: DictConfig, folder: Path, state: dict[str, Any] | None = None
) -> Logger | None:
    """Returns TorchRL's logger of the run.

    Args:
        cfg: the configuration.
        folder: of the run.
        state: of the logger of a run that goes on.

    """
    return get_logger(
        cfg.logging.backend,
        logger_name=str(folder / "logs"),
        experiment_name=cfg.logging.experiment_name,
        state_dict=state,
        # The configuration is logged by log_hparams, in which TorchRL's own "env" does
        # not replace the section.
        wandb_kwargs={"project": cfg.logging.project},
    )


def check_logger(cfg: DictConfig) -> None:
    """Checks that the logger's package is there, before servers are started.

    Raises:
        ConfigurationError: if it is not installed.
    """
    backend = cfg.logging.backend
    if backend not in ("tensorboard", "wandb"):
        return
    try:
        importlib.import_module(backend)
    except ImportError as error:
        raise ConfigurationError(
            f"logging.backend={backend!r} needs a package: {error}. Install it, or "
            f"give logging.backend=csv."
        ) from error


def save_model(model: PreTrainedModel, policy: SGLangWrapper, folder: Path) -> None:
    """Writes a model as transformers reads it, with the chat template of the policy.

    Args:
        model: what was trained.
        policy: what has generated; its template is what the model was trained with.
        folder: to write to.
    """
    model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    if policy.chat_template or policy.chat_template_name:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = policy.template.source
        tokenizer.save_pretrained(folder)


@contextmanager
def memory_for_training(cfg: DictConfig, engine: AsyncSGLang) -> Iterator[None]:
    """Has servers on the trainer's GPUs release memory meanwhile.

    Their weights are back at the end, for the weight update to write to. The key-value
    cache is not: call ``engine.wake_up()`` after the update.
    """
    if not cfg.inference_model.colocated:
        yield
        return
    # An adapter is loaded beside base weights, which nothing would bring back.
    lora = cfg.train_model.lora.enabled
    engine.sleep("kv_cache" if lora else ("weights", "kv_cache"))
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    engine.wake_up("weights")
