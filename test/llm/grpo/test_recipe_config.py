"""Configurations are checked before anything is started."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.forked_starts import trainer_python
from omegaconf import OmegaConf

from torchrl_sglang.errors import ConfigurationError


@pytest.fixture(scope="module")
def config():
    import grpo_config

    return grpo_config


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_configurations_are_valid(compose, config, mode):
    for overrides in ((), ("train.correction=null",), ("env.num_envs=8",)):
        config.check_config(compose(mode, *overrides), sync=mode == "sync")
    correction = "train.correction={rollout_is: token, rollout_is_threshold: 3.0}"
    config.check_config(compose(mode, correction), sync=mode == "sync")


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("train.epoch=2", "did you mean 'train.epochs'?"),
        ("+train.epoch=2", "did you mean 'train.epochs'?"),
        ("inference_model.temprature=0.5", "did you mean 'inference_model.temperature"),
        ("optim_batch_size=4", "did you mean 'train.optim_batch_size'?"),
        ("++logging.backendd=csv", "did you mean 'logging.backend'?"),
        ("frobnicate=1", "config/grpo_gsm8k.yaml has all"),
    ],
)
def test_a_typo_on_the_command_line(config, argument, hint):
    name = argument.lstrip("+").partition("=")[0]
    with pytest.raises(ConfigurationError) as error:
        config.check_overrides(["mode=sync", argument])
    assert f"{name!r}; {hint}" in str(error.value)


def test_what_the_command_line_may_say(config):
    config.check_overrides(
        [
            "mode=async",
            "+debug=cpu",
            "--multirun",
            "hydra.sweep.dir=x",
            "train.seed=1,2",
            "+inference_model.server_args.log_level=info",
            "+weight_sync.verify=true",
            "~train.correction",
        ]
    )
    assert config.add_mode(["a=1"], "sync") == ["a=1", "mode=sync"]
    assert config.add_mode(["mode=async"], "sync") == ["mode=async"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("+train.epoch=2",), "did you mean 'train.epochs'"),
        (("train.epochs=two",), r"train.epochs='two' must be of the type int"),
        (("train.resume=1",), r"train.resume=1 must be of the type bool"),
        (("env.answer=tag",), r"env.answer='tag' is not one of 'tags', 'last_number'"),
        (("logging.backend=mlflow",), "logging.backend='mlflow' is not one of"),
        (("train.epochs=0",), "train.epochs must be at least 1"),
        (("env.repeats=7",), "must be a multiple of env.repeats=7"),
        (("train.optim_batch_size=63",), "must be a multiple of"),
        (("train.optim_batch_size=48",), "multiple of train.optim_batch_size=48"),
        (("train.weight_update_frequency=3",), "servers have what"),
        (("train.max_staleness=1",), "is for mode=async"),
        (("inference_model.colocated=true", "inference_model.url=x"), "started here"),
    ],
)
def test_a_wrong_value(compose, config, overrides, message):
    with pytest.raises(ConfigurationError, match=message):
        config.check_config(compose("sync", *overrides), sync=True)


def test_each_script_has_its_mode(compose, config):
    with pytest.raises(ConfigurationError, match=r"run grpo-async.py for mode=async"):
        config.check_config(compose("async"), sync=True)
    with pytest.raises(ConfigurationError, match=r"run grpo-sync.py for mode=sync"):
        config.check_config(compose("sync"), sync=False)
    with pytest.raises(ConfigurationError, match="mode=async would wait"):
        config.check_config(
            compose("async", "inference_model.colocated=true"), sync=False
        )


def test_a_script_says_what_is_wrong(recipe, tmp_path):
    done = subprocess.run(
        [trainer_python(), str(recipe / "grpo-sync.py"), "+train.epoch=2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "grpo-sync.py: There is no parameter 'train.epoch'; did you mean "
        "'train.epochs'?"
    )


def test_engine_and_scheme_check_their_own(compose, fake, tiny_model_path):
    """Whatever the recipe only passes on has a hint, too."""
    import grpo_utils

    url = f"inference_model.url={fake.url}"
    cfg = compose("sync", url, "+inference_model.generate_kwargs.temprature=1")
    tokenizer = grpo_utils.get_tokenizer(tiny_model_path)
    with (
        pytest.raises(ValueError, match="temperature"),
        grpo_utils.get_inference_model(cfg, tiny_model_path, tokenizer),
    ):
        pass
    cfg = compose("sync", "+inference_model.server_args.max_runing_requests=1")
    with (
        pytest.raises(ConfigurationError, match="max_running_requests"),
        grpo_utils.get_inference_model(cfg, tiny_model_path, tokenizer),
    ):
        pass
    for typo, name in (("transportt", "transport"), ("directoryy", "directory")):
        cfg = compose("sync", f"+weight_sync.{typo}=disk")
        with pytest.raises(ConfigurationError, match=f"did you mean '{name}'"):
            grpo_utils.make_weight_sync_scheme(cfg, None)


def test_a_correction(config):
    import grpo_learner

    given = OmegaConf.create({"rollout_is": "token", "rollout_is_treshold": 3.0})
    with pytest.raises(ConfigurationError, match="rollout_is_threshold"):
        grpo_learner.make_correction(given)
    with pytest.raises(ConfigurationError, match="decoupled_token_iss"):
        grpo_learner.make_correction("decoupled_token_iss")
    assert grpo_learner.make_correction(None) is None


def test_gpus_of_trainer_and_servers(compose):
    import grpo_utils

    assert "cuda_devices" not in grpo_utils.server_arguments(compose("sync"))
    gpu = ("inference_model.device=cuda", "inference_model.num_devices=2")
    cfg = compose("sync", *gpu, "inference_model.num_replicas=3")
    assert grpo_utils.server_arguments(cfg)["cuda_devices"] == [1, 2, 3, 4, 5, 6]
    cfg = compose("sync", *gpu, "inference_model.colocated=true")
    arguments = grpo_utils.server_arguments(cfg)
    assert arguments["cuda_devices"] == [0, 1]
    assert arguments["enable_sleep_mode"] is True
    cfg = compose("sync", "train_model.lora.enabled=true", "train_model.lora.r=4")
    assert grpo_utils.server_arguments(cfg)["max_lora_rank"] == 4


def test_a_logger_that_is_not_installed(compose, tmp_path):
    import grpo_utils

    pytest.importorskip("torchrl.record.loggers")
    if "wandb" in sys.modules:
        pytest.skip("wandb is installed.")
    with pytest.raises(ConfigurationError, match="logging.backend=csv"):
        grpo_utils.make_logger(compose("sync", "logging.backend=wandb"), tmp_path)
