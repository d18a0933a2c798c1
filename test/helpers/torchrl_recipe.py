"""TorchRL's own GRPO recipe with its imports and names changed, to run on a CPU.

The copy is made of the installed files and never kept. Three lists say what changes:
names, which a user changes; what TorchRL 0.14.1 itself needs; and what a machine
without GPUs needs. A replacement that finds nothing fails, so that a newer TorchRL is
noticed. A package that is not installed has a stand-in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torchrl

FILES = ("grpo_utils.py", "grpo-sync.py", "grpo-async.py")
UTILS, SYNC, ASYNC = FILES
INDENT = 16 * " "


@dataclass(frozen=True)
class Replacement:
    """A text of some files, and what takes its place wherever it is."""

    files: tuple[str, ...]
    old: str
    new: str


NAMES = (
    Replacement(
        (UTILS,),
        "from torchrl.modules.llm import SGLangWrapper, ",
        "from torchrl_sglang import SGLangWrapper\nfrom torchrl.modules.llm import ",
    ),
    Replacement(
        (UTILS,),
        "from torchrl.weight_update.llm import SGLangWeightSyncScheme, ",
        "from torchrl_sglang import SGLangWeightSyncScheme\n"
        "from torchrl.weight_update.llm import ",
    ),
    Replacement(
        (UTILS,),
        "from torchrl.modules.llm.backends.sglang import AsyncSGLang",
        "from torchrl_sglang import AsyncSGLang",
    ),
    Replacement(
        (SYNC, ASYNC),
        "from torchrl.weight_update.llm import get_model_metadata",
        "from torchrl_sglang import get_model_metadata",
    ),
    # It looks for SGLang or vLLM among the trainer's packages, where neither is needed.
    Replacement((SYNC,), "    check_grpo_dependencies()\n", ""),
    Replacement(
        (ASYNC,),
        "    check_grpo_dependencies("
        'getattr(cfg.inference_model, "backend", "vllm"))\n',
        "",
    ),
)
"""What a user changes: imports, and a check that is left out."""

TORCHRL = (
    # The buffer itself cannot be pickled.
    Replacement((SYNC, ASYNC), "replay_buffer=rb,", "replay_buffer=rb.client(),"),
    Replacement((SYNC, ASYNC), f"{INDENT}rb,\n", f"{INDENT}rb.client(),\n"),
    # The environment is reset when it is made, which takes a part of the first prompt's
    # group. The trainer, which counts whole groups, would wait for it at the end.
    Replacement(
        (SYNC,),
        "total_frames=cfg.train.total_dialog_turns,",
        "total_frames=cfg.train.total_dialog_turns - cfg.env.repeats,",
    ),
    # A trainer that comes late finds turns overwritten, and would wait for others.
    Replacement(
        (ASYNC,),
        "total_dialog_turns=cfg.train.total_dialog_turns,",
        "total_dialog_turns=-1,",
    ),
)
"""What does not work with the installed versions of TorchRL and its packages, and has
nothing to do with this package."""

NO_GPU = (
    Replacement(
        (SYNC, ASYNC),
        'raise RuntimeError("CUDA is required for training")',
        "torch.set_num_threads(1)",
    ),
    Replacement(FILES, '"cuda:0"', '"cpu"'),
    Replacement((SYNC, ASYNC), 'f"cuda:{devices[0]}"', '"cpu"'),
    Replacement((UTILS,), 'f"cuda:{train_devices[0]}"', '"cpu"'),
    Replacement((UTILS,), "device if device is not None else 0", '"cpu"'),
    Replacement((UTILS,), "if sglang_devices is not None:", "if False:"),
)
"""What a machine without GPUs needs."""

WANDB = """
import json, os


def write(row):
    with open(os.environ["WANDB_FILE"], "a") as file:
        file.write(json.dumps(row) + chr(10))


def plain(value):
    return value.rows if isinstance(value, Table) else float(value)


KEYS = "id", "resume", "project", "config"


class Config:
    def update(self, values, **others):
        if isinstance(values.get("group_size"), int):
            write({"group_size": values["group_size"]})


class Table:
    def __init__(self, columns, data):
        self.rows = [dict(zip(columns, row)) for row in data]


class Run:
    id, config = "run", Config()

    def log(self, values, **others):
        write({key: plain(each) for key, each in values.items()})

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def init(**kwargs):
    write({"init": {key: kwargs.get(key) for key in KEYS}})
    return Run()
"""
"""A stand-in for W&B, which writes its calls to a file."""


def make_config(model: str, **train: Any) -> dict[str, Any]:
    """Returns a small configuration with the recipe's names."""
    return {
        "defaults": [
            {"mode": "async"},
            "_self_",
            {"override hydra/hydra_logging": "disabled"},
            {"override hydra/job_logging": "disabled"},
        ],
        "env": {
            "dataset": "gsm8k",
            "num_envs": 2,
            "repeats": 4,
            "reasoning": False,
            "max_steps": 1,
        },
        "model": {"name": model, "compile": False},
        "train": {
            "exp_name": "grpo-gsm8k",
            "mixed_precision": False,
            "total_dialog_turns": 32,
            "packing": False,
            "dialog_turns_per_batch": 8,
            # With more, GRPOTrainer fails: it averages the norm of the gradient, which
            # not every forward pass has.
            "gradient_accumulation_steps": 1,
            "checkpoint_frequency": 100,
            "optim_batch_size": 4,
            "kl_coef_in_loss": True,
            "use_kl_to_ref": False,
            "kl_to_ref_coeff": 0.0,
            "kl_to_inference_coeff": 1e-2,
            "entropy_coeff": 1e-4,
            "logging_frequency": 1,
            "empty_replay_buffer": True,
            "buffer_size": None,
            "epochs": 1,
            **train,
        },
        "train_model": _model(lora=False),
        "inference_model": {
            **_model(lora=False),
            "backend": "sglang",
            "gpu_memory_utilization": 0.2,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": 8,
            "include_stop_str_in_output": True,
            "enforce_eager": False,
            "enable_prefix_caching": True,
            "enable_fp32_lm_head": False,
            "disable_cuda_graph": False,
            "disable_piecewise_cuda_graph": False,
            "disable_overlap_schedule": False,
        },
        "ref_model": _model(lora=False),
        "optimizer": {
            "name": "AdamW",
            "lr": 1e-3,
            "eps": 1e-5,
            "clip_grad_norm": 1.0,
            "weight_decay": 0.0,
        },
        "ray": {
            "init_config": {
                "num_cpus": 16,
                "include_dashboard": False,
                "object_store_memory": 100 * 2**20,
            },
            "collector_config": {"num_cpus": 1},
            "train_handler_config": {"num_cpus": 1},
            "replay_buffer_config": {"num_cpus": 1, "num_gpus": 0.0},
        },
        "logging": {
            "experiment_name": None,
            "checkpoint_dir": "checkpoints",
            "checkpoint_frequency": 10,
        },
        "hydra": {"run": {"dir": "outputs"}},
    }


def _model(*, lora: bool) -> dict[str, Any]:
    return {
        "gradient_checkpointing": False,
        "num_devices": 1,
        "lora": {"enabled": lora, "r": 4, "alpha": 8, "dropout": 0.0},
        "quantization": {"enabled": False},
        "attn_implementation": None,
        "torch_dtype": "float32",
    }


def copy_recipe(folder: Path, model: str) -> Path:
    """Writes the changed recipe, its configuration and its problems.

    Args:
        folder: to write to.
        model: folder of the model.

    Returns:
        The folder.
    """
    from omegaconf import OmegaConf

    source = Path(torchrl.__file__).parents[1] / "sota-implementations" / "grpo"
    texts = {name: (source / name).read_text() for name in FILES}
    for replacement in (*NAMES, *TORCHRL, *NO_GPU):
        for name in replacement.files:
            if replacement.old not in texts[name]:
                raise AssertionError(f"{name} has no {replacement.old!r}.")
            texts[name] = texts[name].replace(replacement.old, replacement.new)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {**texts, "wandb.py": WANDB}.items():
        (folder / name).write_text(text)
    modes = folder / "config" / "mode"
    modes.mkdir(parents=True)
    OmegaConf.save(make_config(model), folder / "config" / "grpo_gsm8k.yaml")
    # Otherwise a batch is collected while the one before is trained on, and is deleted
    # with that if it comes early.
    for mode, frequency, sync_iter in (("sync", None, True), ("async", 1, None)):
        train = {
            "sync": mode == "sync",
            "weight_update_frequency": frequency,
            "sync_iter": sync_iter,
        }
        (modes / f"{mode}.yaml").write_text(
            "# @package _global_\n" + OmegaConf.to_yaml({"train": train})
        )
    _write_problems(folder / "openai" / "gsm8k")
    return folder


def _write_problems(folder: Path) -> None:
    """Writes a data set that is found under the hub's name in the working directory."""
    folder.mkdir(parents=True)
    rows = [
        {"question": f"What is {n}+{n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"}
        for n in range(64)
    ]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: train.jsonl\n---\n"
    )
