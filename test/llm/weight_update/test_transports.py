"""One contract, every transport: the same tests over broadcast, cuda_ipc and disk.

On CPU, cuda_ipc sends values instead of handles; ``test/llm/gpu`` has it with handles.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import pickle
import resource
import signal
import time
from contextlib import contextmanager, suppress
from functools import partial

import pytest
import requests
import torch
from aiohttp import web
from helpers import log_probs
from helpers.engines import with_capabilities
from helpers.fake_server import FakeServer
from helpers.forked_starts import processes_below
from helpers.log_probs import TOLERANCE
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_sglang import AsyncSGLang, SGLangWeightSyncScheme, get_model_metadata
from torchrl_sglang.backends import session
from torchrl_sglang.backends.launch.watchdog import descendants
from torchrl_sglang.errors import (
    ConfigurationError,
    UnsupportedByServerError,
    WeightSyncStateError,
    WeightTransferError,
)
from torchrl_sglang.testing.faults import FaultyProxy
from torchrl_sglang.testing.tiny_model import make_tiny_model
from torchrl_sglang.weight_update.plan import make_transport
from torchrl_sglang.weight_update.weights import TensorSpec, Weights

PROMPT = "the prefix of this prompt is cached"
NAMES = ["broadcast", "cuda_ipc", "disk"]
SMALL = 20_000
"""Size of a bucket, so that the tiny model needs many."""

MIDDLE = 12
"""A tensor in the middle of the tiny model, some buckets from both ends."""


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


others_are_slow = pytest.mark.parametrize(
    "name",
    [NAMES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in NAMES[1:])],
    indirect=True,
)


@pytest.fixture
def arguments(name, tmp_path):
    """What a scheme of this transport needs."""
    return arguments_of(name, tmp_path)


def arguments_of(name, folder):
    more = {"directory": folder / "weights"} if name == "disk" else {}
    return {"transport": name, **more}


@pytest.fixture
def new_model(tokenizer):
    return make_tiny_model(tokenizer, seed=int.from_bytes(os.urandom(3), "big"))


@pytest.fixture
def transport(restored_engine, arguments):
    """A transport that sends many small buckets."""
    made = transport_of(restored_engine, bucket_bytes=SMALL, **arguments)
    yield made
    made.close()


def transport_of(engine, **arguments):
    options = SGLangWeightSyncScheme(engine, **arguments).options
    return make_transport(options, engine, torch.device("cpu"))


def weights_of(model, engine, *, interfere=None, stable=True):
    """The weights of a model; something happens when half of them are read."""
    tensors = {n: value.detach() for n, value in model.named_parameters()}
    served = engine.get_model_metadata()

    def read():
        for index, parameter in enumerate(served):
            if index == MIDDLE and interfere is not None:
                interfere()
            yield parameter, tensors[parameter]

    return Weights(
        specs=tuple(
            TensorSpec(name=parameter, dtype=dtype, shape=shape)
            for parameter, (dtype, shape) in served.items()
        ),
        read=read,
        device=torch.device("cpu"),
        stable=stable,
    )


def update(engine, transport, weights):
    known = engine.weight_version
    version = str(1 + (int(known) if known.isdigit() else 0))
    return session.update_weights(
        engine, transport, weights, version=version, pause_mode="retract"
    )


def difference(engine, model, tokenizer) -> float:
    """Greatest difference of the engine's log-probs from a model's, prefix cached."""
    return log_probs.difference(engine, model, tokenizer.encode(PROMPT))


def reported_version(engine) -> str:
    answer = requests.get(f"{engine.server_url}/model_info", timeout=10)
    return answer.json()["weight_version"]


# --- what every transport does


def test_weights_change_and_no_prefix_is_stale(
    any_engine, new_model, tokenizer, name, arguments
):
    scheme = SGLangWeightSyncScheme(any_engine, **arguments)
    sender = scheme.create_sender()
    sender.register_model(new_model)
    # The prompt is in the cache now, computed with other weights.
    assert difference(any_engine, new_model, tokenizer) > 0.1
    for _ in range(2):
        report = sender.update_weights()
        assert difference(any_engine, new_model, tokenizer) < TOLERANCE
        with torch.no_grad():
            new_model.lm_head.weight.mul_(-1)
        assert difference(any_engine, new_model, tokenizer) > 0.1
    assert report.transport == name
    assert report.reason == f"transport={name!r} was given."
    assert report.version == any_engine.weight_version == reported_version(any_engine)
    assert scheme.create_receiver().weight_versions() == [report.version]
    assert report.num_buckets == 1
    assert report.num_tensors == len(list(new_model.parameters()))
    assert report.num_bytes == 4 * sum(p.numel() for p in new_model.parameters())
    scheme.shutdown()
    scheme.shutdown()


def test_many_small_buckets_and_casts(restored_engine, new_model, tokenizer, arguments):
    with torch.no_grad():
        for parameter in new_model.parameters():
            parameter.copy_(parameter.bfloat16())
    halves = {n: value.bfloat16() for n, value in new_model.named_parameters()}
    # A tensor that is not contiguous, and one that is part of a larger storage.
    first, second = list(halves)[:2]
    halves[first] = halves[first].t().contiguous().t()
    halves[second] = torch.cat([halves[second]] * 2)[: len(halves[second])]
    scheme = SGLangWeightSyncScheme(restored_engine, bucket_bytes=SMALL, **arguments)
    report = scheme.create_sender().update_weights(halves)
    assert report.num_buckets > 5
    assert report.num_bytes == 4 * sum(value.numel() for value in halves.values())
    assert difference(restored_engine, new_model, tokenizer) < TOLERANCE
    scheme.shutdown()


def test_a_source_whose_tensors_are_gone_afterwards(
    restored_engine, transport, new_model, tokenizer
):
    """Each tensor is overwritten as soon as the next bucket is asked for."""
    weights = weights_of(new_model, restored_engine, stable=False)
    lent = []

    def read():
        for parameter, value in weights.read():
            copy = value.clone()
            yield parameter, copy
            lent.append(copy)
            while len(lent) > MIDDLE:
                lent.pop(0).fill_(float("nan"))

    update(restored_engine, transport, dataclasses.replace(weights, read=read))
    assert difference(restored_engine, new_model, tokenizer) < TOLERANCE


def test_a_refusal_leaves_the_server_whole(
    restored_engine, hf_model, new_model, tokenizer, name, monkeypatch, tmp_path
):
    confused = pickle.loads(pickle.dumps(restored_engine))
    arguments, words = {"transport": name}, "begin_weight_update"
    if name == "disk":
        # The server's own working directory is another one.
        monkeypatch.chdir(tmp_path)
        arguments["directory"] = "/proc/self/cwd/weights"
        words = "Does every server see that path"
    else:
        # Believing that there are no sessions, it sends outside one.
        confused = with_capabilities(restored_engine, needs_update_session=False)
    scheme = SGLangWeightSyncScheme(confused, **arguments)
    sender = scheme.create_sender()
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(WeightTransferError, match=words) as caught:
            sender.update_weights(new_model)
        assert time.monotonic() - start < 60
        assert caught.value.untouched
        assert pickle.loads(pickle.dumps(caught.value)).untouched
        assert difference(confused, hf_model, tokenizer) < TOLERANCE
    scheme.shutdown()
    confused.shutdown()


def test_a_source_that_fails_in_the_middle(
    restored_engine, transport, hf_model, new_model, tokenizer, name, tmp_path
):
    engine = restored_engine

    def fail():
        raise OSError("the checkpoint is gone")

    broken = weights_of(new_model, engine, interfere=fail)
    start = time.monotonic()
    with pytest.raises(WeightTransferError, match="checkpoint is gone") as caught:
        update(engine, transport, broken)
    assert time.monotonic() - start < 60
    # To disk, everything is written before a server is told.
    assert caught.value.untouched == (name == "disk")
    assert pickle.loads(pickle.dumps(caught.value)).untouched == (name == "disk")
    if name == "disk":
        assert difference(engine, hf_model, tokenizer) < TOLERANCE
        assert os.listdir(tmp_path / "weights") == []
    else:
        assert "inconsistent" in repr(engine)
        with pytest.raises(WeightSyncStateError, match="send the weights again"):
            engine.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})
    update(engine, transport, weights_of(new_model, engine))
    assert difference(engine, new_model, tokenizer) < TOLERANCE


def test_a_server_that_refuses_in_the_middle(
    restored_engine, transport, new_model, tokenizer, name
):
    """Somebody else ends the update's session."""
    engine = restored_engine

    def end_session():
        url = f"{engine.server_url}/end_weight_update"
        assert requests.post(url, json={}, timeout=10).ok == (name != "disk")

    broken = weights_of(new_model, engine, interfere=end_session)
    if name == "disk":  # It has no session.
        update(engine, transport, broken)
    else:
        with pytest.raises(WeightTransferError, match="must run between") as caught:
            update(engine, transport, broken)
        assert not caught.value.untouched
        assert "inconsistent" in repr(engine)
    update(engine, transport, weights_of(new_model, engine))
    assert difference(engine, new_model, tokenizer) < TOLERANCE


@others_are_slow
def test_a_server_that_does_not_answer(
    restored_engine, arguments, new_model, tokenizer
):
    """It stops in the middle of an update, and goes on after the error."""
    engine = restored_engine
    transport = transport_of(engine, bucket_bytes=SMALL, send_timeout=2.0, **arguments)
    processes = processes_below(engine.servers[0].pid)
    try:
        broken = weights_of(
            new_model, engine, interfere=lambda: send_signal(processes, signal.SIGSTOP)
        )
        start = time.monotonic()
        with pytest.raises(WeightTransferError) as caught:
            update(engine, transport, broken)
        assert time.monotonic() - start < 60
    finally:
        send_signal(processes, signal.SIGCONT)
    assert not caught.value.untouched
    assert "inconsistent" in repr(engine)
    transport.close()
    transport = transport_of(engine, bucket_bytes=SMALL, **arguments)
    update(engine, transport, weights_of(new_model, engine))
    assert difference(engine, new_model, tokenizer) < TOLERANCE
    transport.close()


@pytest.mark.slow
def test_a_server_that_dies(tiny_model_path, new_model, tmp_path):
    """An error within seconds, whether it dies before an update or in it."""
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", max_restarts=0
    ) as engine:
        made = {
            name: transport_of(engine, **arguments_of(name, tmp_path)) for name in NAMES
        }
        for transport in made.values():
            update(engine, transport, weights_of(new_model, engine))

        def kill() -> None:
            # All of it now: a small update would be through before a watchdog acts.
            pid = engine.servers[0].pid
            for each in [*processes_below(pid), pid]:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)

        dying = weights_of(new_model, engine, interfere=kill)
        for transport in made.values():
            start = time.monotonic()
            with pytest.raises(WeightTransferError):
                update(engine, transport, dying)
            assert time.monotonic() - start < 60
            # Only the first one finds it alive.
            dying = weights_of(new_model, engine)
        for transport in made.values():
            transport.close()


@others_are_slow
def test_nothing_is_left_behind(restored_engine, new_model, arguments, name, tmp_path):
    def cycle():
        transport = transport_of(restored_engine, bucket_bytes=SMALL, **arguments)
        for _ in range(2):
            update(restored_engine, transport, weights_of(new_model, restored_engine))
        transport.close()
        transport.close()
        assert not transport.connected
        gc.collect()
        return (
            {n for n in os.listdir("/dev/shm") if n.startswith("torch_")},
            set(descendants(os.getpid())),
            len(os.listdir("/proc/self/fd")),
        )

    first, *_, last = cycles = [cycle() for _ in range(5)]
    assert last[:2] == first[:2]
    # An HTTP connection may have come or gone; what is left behind grows each time.
    assert last[2] - first[2] < len(cycles) - 1
    if name == "disk":
        version = int(restored_engine.weight_version)
        assert sorted(os.listdir(tmp_path / "weights")) == sorted(
            [f"v{version - 1}", f"v{version}"]
        )


def test_a_sender_that_was_shut_down_sends_again(
    restored_engine, new_model, tokenizer, arguments
):
    sender = SGLangWeightSyncScheme(restored_engine, **arguments).create_sender()
    sender.update_weights(new_model)
    sender.shutdown()
    sender.shutdown()
    sender.update_weights(new_model)
    assert difference(restored_engine, new_model, tokenizer) < TOLERANCE
    sender.shutdown()


@pytest.mark.parametrize("name", ["cuda_ipc", "disk"])
def test_a_request_that_is_never_answered(tiny_model_path, hf_model, name, tmp_path):
    """It takes the send timeout, and the engine does not generate afterwards."""
    path = {
        "cuda_ipc": "/update_weights_from_tensor",
        "disk": "/update_weights_from_disk",
    }[name]
    with FakeServer(tiny_model_path) as fake, AsyncSGLang.connect(fake.url) as engine:
        transport = transport_of(
            engine, send_timeout=0.5, **arguments_of(name, tmp_path)
        )
        with fake.misbehaving("hang", path):
            start = time.monotonic()
            with pytest.raises(WeightTransferError) as caught:
                update(engine, transport, weights_of(hf_model, engine))
            assert 0.4 < time.monotonic() - start < 30
        assert not caught.value.untouched
        assert "inconsistent" in repr(engine)
        fake.recover()
        transport.close()


REFUSALS = {
    "cuda_ipc": "update_weights_from_tensor must run between begin and end",
    "disk": "Failed to get weights iterator: no such folder",
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize(
    ("answers", "untouched"),
    [
        (("refuses", "refuses"), True),
        (("takes", "refuses"), False),
        (("refuses", "takes"), False),
        (("refuses", "fails"), False),
    ],
)
def test_one_of_two_servers_refuses(
    tiny_model_path, hf_model, name, answers, untouched, tmp_path
):
    """What one of them has loaded makes a mix, whatever the other says."""
    path = {
        "cuda_ipc": "/update_weights_from_tensor",
        "disk": "/update_weights_from_disk",
    }[name]
    content = {
        "takes": {"success": True, "message": "Success"},
        "refuses": {"success": False, "message": REFUSALS[name]},
        "fails": {"success": False, "message": "Failed to update weights: it broke."},
    }
    with FakeServer(tiny_model_path) as one, FakeServer(tiny_model_path) as two:
        for fake, answer in zip((one, two), answers, strict=True):
            fake.routes[path] = partial(answer_with, content[answer])
        with AsyncSGLang.connect(urls=[one.url, two.url]) as engine:
            transport = transport_of(engine, **arguments_of(name, tmp_path))
            with pytest.raises(WeightTransferError) as caught:
                update(engine, transport, weights_of(hf_model, engine))
            assert caught.value.untouched == untouched
            assert ("inconsistent" in repr(engine)) == (not untouched)
            transport.close()


def answer_with(content, request):
    return web.json_response(content, status=200 if content["success"] else 400)


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_is_healed(
    tiny_model_path, new_model, tokenizer, tmp_path
):
    """SGLang goes back to the same files, and ends; the engine starts it again."""
    folder = tmp_path / "weights"

    def damage():
        path = next(folder.glob(".unfinished-*/model-00003-*"))
        os.truncate(path, path.stat().st_size - 100)

    with AsyncSGLang.from_pretrained(tiny_model_path, device="cpu") as engine:
        transport = transport_of(engine, bucket_bytes=SMALL, directory=folder)
        with pytest.raises(WeightTransferError, match="mix of old and new") as caught:
            update(engine, transport, weights_of(new_model, engine, interfere=damage))
        assert not caught.value.untouched
        engine.revive()
        update(engine, transport, weights_of(new_model, engine))
        assert difference(engine, new_model, tokenizer) < TOLERANCE
        transport.close()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "names"), [("tp_size", NAMES), ("pp_size", ["disk"])])
def test_servers_of_two_ranks(tiny_model_path, tokenizer, tmp_path, size, names):
    arguments = {size: 2, "environment": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", start_timeout=200, **arguments
    ) as engine:
        assert getattr(engine.capabilities, size) == 2
        for seed, name in enumerate(names * 2, start=7):
            model = make_tiny_model(tokenizer, seed=seed)
            transport = transport_of(
                engine, bucket_bytes=SMALL, **arguments_of(name, tmp_path)
            )
            update(engine, transport, weights_of(model, engine))
            assert difference(engine, model, tokenizer) < TOLERANCE
            transport.close()


# --- what is chosen


def test_auto_says_why(restored_engine, hf_model, tmp_path):
    scheme = SGLangWeightSyncScheme(restored_engine)
    report = scheme.create_sender().update_weights(hf_model)
    assert report.transport == "broadcast"
    assert report.reason == "The weights are on cpu, which servers do not share."
    scheme.shutdown()
    scheme = SGLangWeightSyncScheme(restored_engine, directory=tmp_path / "here")
    report = scheme.create_sender().update_weights(hf_model)
    assert report.transport == "disk"
    assert report.reason == f"A directory was given: {str(tmp_path / 'here')!r}."
    scheme.shutdown()


def test_where_the_servers_are(engine):
    (place,) = engine.placements
    assert (place.url, place.local, place.device) == (engine.server_url, True, "cpu")
    assert place.gpus == place.visible_gpus == ()
    copy = pickle.loads(pickle.dumps(engine))
    assert copy.placements == engine.placements
    copy.shutdown()
    with AsyncSGLang.connect(engine.server_url) as other:
        (place,) = other.placements
        assert (place.local, place.device, place.gpus) == (True, "cpu", None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"transport": "nccl"}, "'nccl' is not one of 'auto', 'broadcast', 'cuda_ipc'"),
        ({"transport": "disk"}, "needs directory="),
        ({"transport": "broadcast", "directory": "/x"}, "'/x' is for transport='disk'"),
        ({"transport": "cuda_ipc", "directory": "/x"}, "leave it out"),
        ({"transport": "cuda_ipc", "master_port": 5}, "for transport='broadcast'"),
        (
            {"transport": "disk", "directory": "/x", "connect_timeout": 1.0},
            "does not use it",
        ),
        ({"directory": "/x", "master_address": "a"}, "does not use it"),
    ],
)
def test_arguments_that_do_not_fit(engine, arguments, words):
    with pytest.raises(ConfigurationError, match=words):
        SGLangWeightSyncScheme(engine, **arguments)


@pytest.mark.parametrize("name", ["broadcast", "cuda_ipc"])
def test_pipeline_stages_are_refused(engine, hf_model, name):
    staged = with_capabilities(engine, pp_size=2)
    transport = transport_of(staged, transport=name)
    with pytest.raises(UnsupportedByServerError, match="use transport='disk'"):
        update(staged, transport, weights_of(hf_model, staged))
    with pytest.raises(ConfigurationError, match=r"give directory="):
        transport_of(staged)
    staged.shutdown()


# --- what is written to disk


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "weights"


@pytest.fixture
def to_disk(restored_engine, folder):
    transport = transport_of(restored_engine, bucket_bytes=SMALL, directory=folder)
    yield lambda model: update(
        restored_engine, transport, weights_of(model, restored_engine)
    )
    transport.close()


def test_a_checkpoint_is_a_whole_model(
    restored_engine, new_model, tokenizer, folder, to_disk
):
    version = to_disk(new_model).version
    loaded = AutoModelForCausalLM.from_pretrained(
        folder / f"v{version}", dtype=torch.float32
    )
    for name, value in loaded.named_parameters():
        torch.testing.assert_close(value, new_model.get_parameter(name), atol=0, rtol=0)
    again = AutoTokenizer.from_pretrained(folder / f"v{version}")
    assert again.encode(PROMPT) == tokenizer.encode(PROMPT)
    for path in (folder / f"v{version}").glob("*.safetensors"):
        header = 10_000
        assert path.stat().st_size < SMALL + header or len(names_in(path)) == 1


def names_in(path):
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        return list(file.keys())


def test_types_of_a_checkpoint(tmp_path, restored_engine, hf_model):
    """The library that everybody reads such files with reads what was written."""
    from torchrl_sglang.weight_update.transports.disk import _write_weights

    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).double(),
        "c": torch.randn(2, 2, 3).bfloat16(),
        "d": torch.tensor(2.5),
        "e": torch.empty(0, 4),
        "f": torch.randn(9).to(torch.float8_e4m3fn),
        "g": torch.randn(4, 4).half().t(),
    }
    weights = Weights(
        specs=tuple(
            TensorSpec(name=name, dtype=value.dtype, shape=value.shape)
            for name, value in tensors.items()
        ),
        read=lambda: iter(tensors.items()),
        device=torch.device("cpu"),
        stable=True,
    )
    count = _write_weights(weights, tmp_path, 100)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert len(set(index["weight_map"].values())) == count > 1
    for name, value in tensors.items():
        with safe_open(tmp_path / index["weight_map"][name], "pt") as file:
            found = file.get_tensor(name)
        assert found.dtype == value.dtype
        assert found.shape == value.shape
        assert torch.equal(found.double(), value.double())


def test_old_checkpoints_go_and_foreign_folders_stay(
    new_model, folder, to_disk, restored_engine
):
    (folder / "v0").mkdir(parents=True)
    (folder / "v0" / "precious").write_text("of somebody else")
    (folder / "notes").write_text("of somebody else")
    versions = [to_disk(new_model).version for _ in range(4)]
    assert sorted(os.listdir(folder)) == sorted(
        ["notes", "v0", *(f"v{version}" for version in versions[-2:])]
    )


def test_files_of_a_killed_trainer_are_removed(new_model, folder, to_disk):
    """By its name, for the mark is written after the folder and removed before it."""
    left = folder / f".unfinished-{'0' * 32}"
    left.mkdir(parents=True)
    (left / "model-00001-of-00002.safetensors").write_bytes(b"half")
    other = folder / ".unfinished-2"
    other.mkdir()
    version = to_disk(new_model).version
    assert sorted(os.listdir(folder)) == [".unfinished-2", f"v{version}"]


def test_a_version_of_an_earlier_run_is_replaced(
    new_model, hf_model, folder, to_disk, restored_engine, tokenizer
):
    version = to_disk(hf_model).version
    (folder / f"v{version}").rename(folder / f"v{int(version) + 1}")
    to_disk(new_model)
    assert difference(restored_engine, new_model, tokenizer) < TOLERANCE
    assert os.listdir(folder) == [f"v{int(version) + 1}"]


def test_a_folder_that_is_in_the_way(
    new_model, folder, restored_engine, hf_model, tokenizer
):
    # Versions go on from those of other tests.
    known = restored_engine.newest_version
    for version in range(1, 20 + (int(known) if known.isdigit() else 0)):
        (folder / f"v{version}").mkdir(parents=True)
    transport = transport_of(restored_engine, directory=folder)
    with pytest.raises(WeightTransferError, match="in the way") as caught:
        update(restored_engine, transport, weights_of(new_model, restored_engine))
    assert caught.value.untouched
    assert difference(restored_engine, hf_model, tokenizer) < TOLERANCE


@contextmanager
def largest_file(num_bytes):
    """A file system that takes no larger files: writing fails for real."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_takes_no_more(
    new_model, folder, to_disk, restored_engine, hf_model, tokenizer
):
    version = to_disk(hf_model).version
    with (
        largest_file(10_000),
        pytest.raises(WeightTransferError, match=r"GB left. Make room") as caught,
    ):
        to_disk(new_model)
    assert caught.value.untouched
    assert os.listdir(folder) == [f"v{version}"]
    assert difference(restored_engine, hf_model, tokenizer) < TOLERANCE
    to_disk(new_model)
    assert difference(restored_engine, new_model, tokenizer) < TOLERANCE


def test_two_trainers_and_one_directory(
    new_model, folder, to_disk, restored_engine, tokenizer
):
    other = transport_of(restored_engine, directory=folder)
    other.connect()

    def write_too():
        weights = weights_of(new_model, restored_engine)
        with pytest.raises(WeightTransferError, match="directory of its own") as caught:
            other.send(weights, version="x")
        assert caught.value.untouched

    transport = transport_of(restored_engine, directory=folder)
    weights = weights_of(new_model, restored_engine, interfere=write_too)
    update(restored_engine, transport, weights)
    assert difference(restored_engine, new_model, tokenizer) < TOLERANCE


def test_a_directory_that_cannot_be_made(restored_engine, new_model, tmp_path):
    (tmp_path / "file").write_text("")
    transport = transport_of(restored_engine, directory=tmp_path / "file" / "weights")
    with pytest.raises(WeightTransferError, match="another directory") as caught:
        update(restored_engine, transport, weights_of(new_model, restored_engine))
    assert caught.value.untouched


def test_the_served_model_is_known_when_its_checkpoint_is_gone(
    restored_engine, new_model, folder, to_disk, tiny_model_path
):
    served = restored_engine.get_model_metadata()
    version = to_disk(new_model).version
    answer = requests.get(f"{restored_engine.server_url}/model_info", timeout=10)
    assert answer.json()["model_path"] == str(folder / f"v{version}")
    with AsyncSGLang.connect(restored_engine.server_url) as other:
        assert other.model_path == tiny_model_path
        for _ in range(3):
            to_disk(new_model)
        assert not (folder / f"v{version}").exists()
        assert other.get_model_metadata() == served
        assert restored_engine.get_model_metadata() == served
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with AsyncSGLang.connect(restored_engine.server_url) as other:
        assert other.get_model_metadata() == served


# --- helpers


def send_signal(processes, number) -> None:
    for pid in processes:
        os.kill(pid, number)


# --- what the broadcast makes of refusals


@pytest.mark.parametrize(
    ("message", "untouched"),
    [
        ("update_weights_from_distributed must run between begin and end", True),
        # SGLang says so when some tensors of the bucket are loaded.
        ("The full weights of the ModelRunner are partially updated.", False),
    ],
)
def test_a_refusal_that_comes_late(
    restored_engine, new_model, tokenizer, message, untouched
):
    """Over NCCL a server answers before the trainer's broadcasts have ended."""
    with FaultyProxy(restored_engine.server_url) as proxy:
        engine = AsyncSGLang.connect(proxy.url)
        proxy.refusal = message
        proxy.inject("/update_weights_from_distributed", "refuse")
        scheme = SGLangWeightSyncScheme(engine)
        with pytest.raises(WeightTransferError, match=message[:20]) as caught:
            scheme.create_sender().update_weights(new_model)
        assert caught.value.untouched is untouched
        # One that is not known to hold whole weights does not generate.
        assert ("inconsistent" in repr(engine)) is not untouched
        scheme.create_sender().update_weights(new_model)
        assert difference(engine, new_model, tokenizer) < TOLERANCE
        scheme.shutdown()
        engine.shutdown()


def test_equal_beginnings_are_not_tied():
    """A view of fewer rows is another tensor."""
    whole = torch.zeros(4, 2)
    assert len(get_model_metadata({"a": whole, "b": whole[:2]})) == 2
    assert len(get_model_metadata({"a": whole, "b": whole})) == 1
