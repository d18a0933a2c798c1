"""Arguments of TRL, verl and TorchRL, and their counterparts in this package."""

from __future__ import annotations

from collections.abc import Mapping

TRL: Mapping[str, str] = {
    "train_dataset": "prompts",
    "eval_dataset": "eval_prompts",
    "reward_funcs": "rewards",
    "reward_weights": 'rewards={"name": (function, weight)}',
    "num_generations": "group_size",
    "per_device_train_batch_size": "groups_per_batch",
    "generation_batch_size": "groups_per_batch",
    "steps_per_generation": "minibatches",
    "gradient_accumulation_steps": "max_tokens_per_pass",
    "num_iterations": "epochs_per_batch",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup_steps",
    "weight_decay": 'optimizer={"weight_decay": ...}',
    "optim": "optimizer",
    "max_grad_norm": "clip_grad_norm",
    "beta": "kl_to_ref_coeff",
    "epsilon": 'loss={"clip_epsilon": ...}',
    "epsilon_high": 'loss={"clip_epsilon": (low, high)}',
    "loss_type": "method",
    "importance_sampling_level": 'method="gspo"',
    "scale_rewards": 'advantage="centered"',
    "vllm_importance_sampling_correction": "correction",
    "max_completion_length": 'generate_kwargs={"max_new_tokens": ...}',
    "temperature": 'generate_kwargs={"temperature": ...}',
    "top_p": 'generate_kwargs={"top_p": ...}',
    "top_k": 'generate_kwargs={"top_k": ...}',
    "min_p": 'generate_kwargs={"min_p": ...}',
    "repetition_penalty": 'generate_kwargs={"repetition_penalty": ...}',
    "generation_kwargs": "generate_kwargs",
    "max_tool_calling_iterations": "max_turns",
    "environment_factory": "tools",
    "rollout_func": "agent",
    "peft_config": 'lora={"r": ...}',
    "bf16": 'dtype="bfloat16"',
    "vllm_mode": "colocated",
    "vllm_server_base_url": "engine",
    "vllm_gpu_memory_utilization": 'engine={"mem_fraction_static": ...}',
    "vllm_tensor_parallel_size": 'engine={"tp_size": ...}',
    "output_dir": "output",
    "resume_from_checkpoint": "resume",
    "save_steps": "checkpoint_every",
    "save_total_limit": "keep_checkpoints",
    "eval_steps": "eval_every",
    "report_to": "logger",
    "log_completions": "show_samples",
}
"""Argument of TRL's ``GRPOTrainer`` and ``GRPOConfig`` -> argument of ``GRPO``."""

VERL: Mapping[str, str] = {
    "train_files": "prompts",
    "val_files": "eval_prompts",
    "prompt_key": "query_key",
    "custom_reward_function": "rewards",
    "compute_score": "rewards",
    "n": "group_size",
    "train_batch_size": "groups_per_batch",
    "ppo_mini_batch_size": "minibatches",
    "ppo_micro_batch_size_per_gpu": "max_tokens_per_pass",
    "ppo_max_token_len_per_gpu": "max_tokens_per_pass",
    "ppo_epochs": "epochs_per_batch",
    "total_epochs": "epochs",
    "total_training_steps": "steps",
    "lr_scheduler_type": "schedule",
    "lr_warmup_steps": "warmup_steps",
    "grad_clip": "clip_grad_norm",
    "adv_estimator": "method",
    "norm_adv_by_std_in_grpo": 'advantage="centered"',
    "kl_loss_coef": "kl_to_ref_coeff",
    "clip_ratio": 'loss={"clip_epsilon": ...}',
    "clip_ratio_low": 'loss={"clip_epsilon": (low, high)}',
    "clip_ratio_high": 'loss={"clip_epsilon": (low, high)}',
    "entropy_coeff": 'loss={"entropy_bonus": True, "entropy_coeff": ...}',
    "loss_agg_mode": 'loss={"aggregation": ...}',
    "max_response_length": 'generate_kwargs={"max_new_tokens": ...}',
    "max_assistant_turns": "max_turns",
    "lora_rank": 'lora={"r": ...}',
    "lora_alpha": 'lora={"lora_alpha": ...}',
    "enable_gradient_checkpointing": "gradient_checkpointing",
    "gpu_memory_utilization": 'engine={"mem_fraction_static": ...}',
    "tensor_model_parallel_size": 'engine={"tp_size": ...}',
    "free_cache_engine": "colocated",
    "staleness_threshold": "max_staleness",
    "default_local_dir": "output",
    "resume_mode": "resume",
    "save_freq": "checkpoint_every",
    "max_actor_ckpt_to_keep": "keep_checkpoints",
    "test_freq": "eval_every",
    "project_name": "project",
}
"""Last part of a key of verl's configuration -> argument of ``GRPO``."""

TORCHRL: Mapping[str, str] = {
    "grpo_size": "group_size",
    "repeats": "group_size",
    "num_samples": "group_size",
    "dialog_turns_per_batch": "groups_per_batch",
    "total_dialog_turns": "total_groups",
    "clip_epsilon": 'loss={"clip_epsilon": ...}',
    "max_new_tokens": 'generate_kwargs={"max_new_tokens": ...}',
    "max_tokens": 'generate_kwargs={"max_new_tokens": ...}',
}
"""Argument of TorchRL's collectors, losses and recipes -> argument of this package."""

PEFT: Mapping[str, str] = {
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
}
"""Short name of an argument of PEFT's ``LoraConfig`` -> its name."""

TRAINER: Mapping[str, str] = {
    "learning_rate": "optimizer",
    "num_train_epochs": "epochs",
}
"""Argument of transformers' ``TrainingArguments`` -> argument of ``Learner``."""

TORCH: Mapping[str, str] = dict.fromkeys(("lr", "betas", "eps"), "optimizer")
"""Argument of PyTorch's optimizers -> argument of this package."""

COUNTERPARTS = {
    "TRL": TRL,
    "verl": VERL,
    "TorchRL": TORCHRL,
    "PEFT": PEFT,
    "transformers": TRAINER,
    "PyTorch": TORCH,
}
"""Library -> its arguments."""
