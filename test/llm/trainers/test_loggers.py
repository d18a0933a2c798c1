"""Each logger for real: what was logged is read back with its own library."""

from __future__ import annotations

import importlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.trainers.loggers import (
    LOGGERS,
    LoggerCalls,
    end_logger,
    make_logger,
)
from torchrl_sglang.trainers.samples import COLUMNS, MOST_ROWS, choose_rows, log_samples

# Those of the loggers' packages about themselves.
pytestmark = pytest.mark.filterwarnings("ignore")

ROWS = [
    {
        "step": 1,
        "prompt": [{"role": "user", "content": f"What is {n} + {n}?"}],
        "response": f"It is | {2 * n}.\nSure.",
        "reward": float(n),
        "advantage": n - 1.5,
        "policy_version": 1,
        "tokens": 5,
    }
    for n in range(4)
]


@pytest.fixture(autouse=True)
def nothing_leaves_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def csv(logger: Any, folder: Path) -> tuple[dict[int, float], list[Any] | None]:
    (path,) = (folder / "logs").rglob("scalars/engine/tokens_per_second.csv")
    rows = [line.split(",") for line in path.read_text().splitlines()]
    return {int(step): float(value) for step, value in rows}, None


def tensorboard(logger: Any, folder: Path) -> tuple[dict[int, float], list[Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # TensorBoard keeps hyperparameters in a folder below.
    (file,) = (folder / "logs" / "a run").glob("events.out.*")
    events = EventAccumulator(str(file.parent))
    events.Reload()
    scalars = events.Scalars("engine/tokens_per_second")
    (text,) = events.Tensors("samples/responses/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    table = [line.replace("\\|", "/").split("|") for line in lines[2:]]
    return {each.step: each.value for each in scalars}, table


def records_of(content: bytes) -> Iterator[bytes]:
    """Yields the records of a log in LevelDB's format, as W&B writes it offline."""
    place, record = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        # Whole, or the last part of one.
        if kind in (1, 4):
            yield record
            record = b""


def wandb(logger: Any, folder: Path) -> tuple[dict[int, float], list[Any]]:
    from wandb.proto import wandb_internal_pb2

    (file,) = {path.resolve() for path in (folder / "logs").rglob("*.wandb")}
    found = {}
    for data in records_of(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {
                "/".join(each.nested_key) or each.key: json.loads(each.value_json)
                for each in record.history.item
            }
            if "engine/tokens_per_second" in items:
                found[items["engine/step"]] = items["engine/tokens_per_second"]
    (table,) = (folder / "logs").rglob("*.table.json")
    return found, json.loads(table.read_text())["data"]


def mlflow(logger: Any, folder: Path) -> tuple[dict[int, float], list[Any]]:
    import mlflow

    run = logger.experiment.info.run_id
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run, "engine/tokens_per_second")
    assert client.get_run(run).info.status == "FINISHED"
    assert client.get_run(run).info.run_name == "a run"
    table = mlflow.load_table("samples.json", run_ids=[run])
    return {each.step: each.value for each in history}, table.values.tolist()


def trackio(logger: Any, folder: Path) -> tuple[dict[int, float], list[Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("a project", "a run")
    found = {
        each["step"]: each["engine/tokens_per_second"]
        for each in logs
        if "engine/tokens_per_second" in each
    }
    (table,) = [
        each["samples/responses"] for each in logs if "samples/responses" in each
    ]
    return found, [list(row.values()) for row in table["_value"]]


READ = {each.__name__: each for each in (csv, tensorboard, wandb, mlflow, trackio)}


@pytest.mark.parametrize("name", LOGGERS)
def test_figures_and_a_table(name, tmp_path):
    if name != "csv":
        pytest.importorskip(name)
    logger = make_logger(name, tmp_path, "a run", "a project")
    logger.log_hparams({"lr": 1e-6, "lora.r": 8, "rewards": "right"})
    for step in (1, 2):
        figures = {"engine/tokens_per_second": 100.0 * step, "train/loss": 0.5}
        logger.log_metrics(figures, step=step)
    log_samples(logger, ROWS, 2)
    end_logger(logger)
    found, table = READ[name](logger, tmp_path)
    assert found == {1: 100.0, 2: 200.0}
    if table is not None:
        assert len(table) == len(ROWS)
        assert [float(row[COLUMNS.index("reward")]) for row in table] == [0, 1, 2, 3]
        assert "3 + 3" in str(table[3])
        assert "6." in str(table[3])


@pytest.mark.parametrize("name", LOGGERS)
def test_a_second_run_in_the_same_process_is_another_one(name, tmp_path):
    if name != "csv":
        pytest.importorskip(name)
    for number in (1, 2):
        folder = tmp_path / str(number)
        logger = make_logger(name, folder, "a run", "a project")
        logger.log_metrics({"engine/tokens_per_second": float(number)}, step=1)
        log_samples(logger, ROWS, 1)
        end_logger(logger)
        found, _ = READ[name](logger, folder) if name != "trackio" else ({}, None)
        assert found in ({}, {1: float(number)})


def test_rows_with_the_least_and_the_greatest_rewards():
    rows = [{**ROWS[0], "reward": float(n)} for n in range(100)]
    rewards = [row[COLUMNS.index("reward")] for row in choose_rows(rows)]
    half = MOST_ROWS // 2
    assert rewards == [*range(half), *range(100 - half, 100)]


def test_long_texts_are_cut():
    row = {**ROWS[0], "prompt": "a" * 9000 + "?", "response": "b" * 9000}
    ((_, prompt, response, *_),) = choose_rows([row])
    assert (len(prompt), len(response)) == (4003, 4003)
    assert prompt.endswith("a?")
    assert response.startswith("bb")
    assert not math.isnan(len(prompt))


@pytest.mark.parametrize("name", [each for each in LOGGERS if each != "csv"])
def test_a_package_that_is_missing(name, monkeypatch, tmp_path):
    monkeypatch.setitem(importlib.sys.modules, name, None)
    with pytest.raises(ConfigurationError, match="logger='csv'"):
        make_logger(name, tmp_path, "a run", "a project")


def test_a_name_of_no_logger(tmp_path):
    with pytest.raises(ConfigurationError, match="csv, tensorboard, wandb, mlflow"):
        make_logger("mlfow", tmp_path, "a run", "a project")


def test_a_logger_that_fails_later_costs_a_warning(caplog):
    """Its service restarts in the middle of a run."""
    logged, down = [], []

    def log(metrics, *, step):
        if down:
            raise ConnectionError("the service restarts")
        logged.append((step, metrics))

    call = LoggerCalls()
    down.append(True)
    with pytest.raises(ConnectionError):
        call(log, {"a": 0.0}, step=0)
    down.clear()
    call(log, {"a": 1.0}, step=1)
    down.append(True)
    call(log, {"a": 2.0}, step=2)
    call(log, {"a": 3.0}, step=3)
    down.clear()
    call(log, {"a": 4.0}, step=4)
    assert logged == [(1, {"a": 1.0}), (4, {"a": 4.0})]
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == 1
    assert "failed at step 2: ConnectionError: the service restarts" in told[0]
