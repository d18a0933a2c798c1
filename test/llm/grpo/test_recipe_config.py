"""Configurations are checked before anything is started."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from helpers.forked_starts import trainer_python

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.types import ServerPlacement

OmegaConf = pytest.importorskip("omegaconf").OmegaConf


@pytest.fixture(scope="module")
def config():
    import grpo_config

    return grpo_config


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_configurations_are_valid(compose, config, mode):
    for overrides in (
        (),
        ("train.correction=null",),
        ("env.num_envs=8",),
        ("logging.checkpoint_frequency=null", "logging.eval_frequency=null"),
        ("optimizer.clip_grad_norm=null", "logging.backend=null"),
        ("train.use_kl_to_ref=true", "train.kl_to_ref_coeff=0.1"),
    ):
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
            "train.seed=1",
            "+inference_model.server_args.log_level=info",
            "+weight_sync.verify=true",
            "~train.correction",
        ]
    )
    assert config.add_mode(["a=1"], "sync") == ["a=1", "mode=sync"]
    assert config.add_mode(["mode=async"], "sync") == ["mode=async"]


@pytest.mark.parametrize("argument", ["-m", "--multirun", "hydra.mode=MULTIRUN"])
def test_one_run_at_a_time(config, argument):
    with pytest.raises(ConfigurationError, match=f"{argument}: a script makes one run"):
        config.check_overrides([argument, "train.seed=1,2"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("+train.epoch=2",), "did you mean 'train.epochs'"),
        (("train.epochs=two",), r"train.epochs='two' must be of the type int"),
        (("train.resume=1",), r"train.resume=1 must be of the type bool"),
        (("env.answer=tag",), r"env.answer='tag' is not one of 'tags', 'last_number'"),
        (("logging.backend=mlflow",), "logging.backend='mlflow' is not one of"),
        (("train.epochs=0",), "train.epochs=0 must be at least 1"),
        (("env.repeats=7",), "must be a multiple of env.repeats=7"),
        (("train.optim_batch_size=63",), "must be a multiple of"),
        (("train.optim_batch_size=48",), "multiple of train.optim_batch_size=48"),
        (("train.weight_update_frequency=3",), "servers have what"),
        (("train.max_staleness=1",), "is for mode=async"),
        (("inference_model.colocated=true", "inference_model.url=x"), "started here"),
        (("logging.eval_frequency=0",), "must be at least 1, or null for none"),
        (("logging.checkpoint_frequency=0",), "must be at least 1, or null for none"),
        (("logging.keep_checkpoints=0",), "must be at least 1"),
        (("train.epochs=null",), "train.epochs=None must be of the type int"),
        (("train.kl_to_ref_coeff=0.1",), "do not fit: give train.use_kl_to_ref=true"),
        (("train.use_kl_to_ref=true",), "and a coefficient above 0, or neither"),
        (("+ray.launcher.strategy=SPREAD",), "needs inference_model.launcher=ray"),
        (("+ray.init_config.address=auto",), "needs inference_model.launcher=ray"),
    ],
)
def test_a_wrong_value(compose, config, overrides, message):
    with pytest.raises(ConfigurationError, match=message):
        config.check_config(compose("sync", *overrides), sync=True)


def test_servers_that_run_are_as_they_are(compose, config):
    cfg = compose("sync", "inference_model.url=x")
    config.check_config(cfg, sync=True)
    for name, value in (
        ("num_replicas", 2),
        ("gpu_memory_utilization", 0.5),
        ("launcher", "ray"),
        ("server_args", {"log_level": "info"}),
    ):
        other = cfg.copy()
        other.inference_model[name] = value
        with pytest.raises(ConfigurationError, match="is for servers that are started"):
            config.check_config(other, sync=True)


def test_replicas_beside_the_trainer(compose, config):
    """The second one cannot open the memory of the weights."""
    given = ("inference_model.colocated=true", "inference_model.num_replicas=2")
    with pytest.raises(ConfigurationError, match="inference_model.num_devices GPUs"):
        config.check_config(compose("sync", *given), sync=True)
    for other in ("train_model.lora.enabled=true", "+weight_sync.directory=x"):
        config.check_config(compose("sync", *given, other), sync=True)


def test_optimizers(compose):
    import grpo_learner

    parameters = [torch.nn.Parameter(torch.ones(1))]
    cfg = compose("sync", "optimizer.name=SGD", "optimizer.weight_decay=0.1")
    optimizer = grpo_learner.make_optimizer(cfg, parameters)
    assert optimizer.defaults["weight_decay"] == 0.1
    with pytest.raises(ConfigurationError, match="SGD has no eps"):
        grpo_learner.make_optimizer(
            compose("sync", "optimizer.name=SGD", "optimizer.eps=1e-6"), parameters
        )


def test_results_of_an_earlier_run(compose, tmp_path):
    from grpo_checkpoint import Checkpoints

    cfg = compose("sync")
    for name in ("config.yaml", "rollouts.jsonl", "model"):
        folder = tmp_path / f"with_{name}"
        checkpoints = Checkpoints(folder / "checkpoints", keep=1)
        cfg.train.resume = False
        assert checkpoints.load(cfg) is None
        (folder / name).write_text("x")
        with pytest.raises(ConfigurationError, match=f"{name} is of an earlier run"):
            checkpoints.load(cfg)
        cfg.train.resume = True
        assert checkpoints.load(cfg) is None


def test_a_run_that_never_trained_does_not_block_the_next(compose, tmp_path):
    from grpo_checkpoint import Checkpoints

    # What a run leaves that ended before its first step, or while it saved.
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "accuracy.csv").write_text("0,0.5\n")
    (tmp_path / "rollouts.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    partial = tmp_path / "checkpoints" / "step_00000001.partial"
    partial.write_text("half of it")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    assert checkpoints.load(compose("sync")) is None
    # It may be that of a run that is alive, as long as this one has not got on.
    assert partial.exists()
    checkpoints.save(1, {})
    assert not partial.exists()


def test_what_bounds_a_run():
    from grpo_train import summarize

    totals = {"collect": 6.0, "train": 3.0, "update": 1.0}
    said = "Training bounds the run: batches are complete."
    assert summarize(totals, said, sync=True).startswith("Generation bounds the run (")
    assert summarize(totals, said, sync=False).startswith(said.rstrip("."))
    for sync in (False, True):
        line = summarize({**totals, "save": 10.0}, said, sync=sync)
        assert line.startswith("Writing checkpoints bounds the run (collect 30%")


def test_each_script_has_its_mode(compose, config):
    with pytest.raises(ConfigurationError, match=r"run grpo-async.py for mode=async"):
        config.check_config(compose("async"), sync=True)
    with pytest.raises(ConfigurationError, match=r"run grpo-sync.py for mode=sync"):
        config.check_config(compose("sync"), sync=False)
    with pytest.raises(ConfigurationError, match="mode=async would wait"):
        config.check_config(
            compose("async", "inference_model.colocated=true"), sync=False
        )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "+train.epoch=2",
            "There is no parameter 'train.epoch'; did you mean 'train.epochs'?",
        ),
        (
            "optimizer.lr=abc",
            "optimizer.lr='abc' must be of the type float, as its default, 1e-06.",
        ),
    ],
)
def test_a_script_says_what_is_wrong(recipe, tmp_path, argument, message):
    done = subprocess.run(
        [trainer_python(), str(recipe / "grpo-sync.py"), argument],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"grpo-sync.py: {message}"
    # Hydra's words about an error.
    assert "Error executing job" not in done.stderr


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


def test_ray_does_not_know_of_the_trainer():
    from grpo_utils import check_gpus

    def server(local, *gpus):
        return ServerPlacement(url="http://x", local=local, device="cuda", gpus=gpus)

    check_gpus([server(False, "0"), server(True, "2", "3")], ["0", "1"])
    with pytest.raises(ConfigurationError, match="at http://x on the trainer's GPUs"):
        check_gpus([server(True, "1", "2")], ["0", "1"])


def missing(monkeypatch, module):
    """Makes a module one that cannot be imported."""
    monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("backend", ["wandb", "tensorboard"])
def test_a_logger_that_is_not_installed(compose, monkeypatch, backend):
    import grpo_train

    missing(monkeypatch, backend)

    def start(*args):
        raise AssertionError("Servers were started.")

    monkeypatch.setattr(grpo_train, "get_inference_model", start)
    cfg = compose("sync", f"logging.backend={backend}")
    # The second time as the first one.
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="logging.backend=csv"):
            grpo_train.train(cfg)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("optimizer.name=Adamw", "did you mean 'AdamW'"),
        ("optimizer.scheduler=cosin", "optimizer.scheduler='cosin' is no schedule"),
        ("optimizer.scheduler=reduce_lr_on_plateau", "needs a metric in each step"),
        ("train.correction=decoupled_tokn_is", "is not a preset"),
    ],
)
def test_what_the_learner_lacks_is_found_before_servers_start(
    compose, monkeypatch, argument, message
):
    import grpo_train

    monkeypatch.setattr(grpo_train, "get_inference_model", None)
    with pytest.raises(ConfigurationError, match=message):
        grpo_train.train(compose("sync", argument))


def test_the_chat_template_of_the_run_is_saved(tiny_model_path, tmp_path):
    from types import SimpleNamespace

    from transformers import AutoTokenizer

    from grpo_utils import get_tokenizer, save_model

    def saved(name, **template):
        model = SimpleNamespace(save_pretrained=lambda folder: None)
        tokenizer = get_tokenizer(tiny_model_path)
        policy = SimpleNamespace(tokenizer=tokenizer, **template)
        save_model(model, policy, tmp_path / name)
        assert tokenizer.chat_template == own
        return AutoTokenizer.from_pretrained(tmp_path / name).chat_template

    own = get_tokenizer(tiny_model_path).chat_template
    source = SimpleNamespace(source="{{ messages }}")
    given = {"template": source, "chat_template_name": None}
    assert saved("other", chat_template="{{ messages }}", **given) == "{{ messages }}"
    assert saved("own", chat_template=None, **given) == own
