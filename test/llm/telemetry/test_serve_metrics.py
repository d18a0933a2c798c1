"""What Prometheus scrapes, read with Prometheus' own parser, of parts in any state."""

from __future__ import annotations

import gc
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.collecting import length_reward, tasks
from helpers.forked_starts import trainer_python

from torchrl_sglang import (
    AsyncLLMCollector,
    AsyncSGLang,
    Gateway,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    serve_metrics,
)
from torchrl_sglang.errors import ConfigurationError
from torchrl_sglang.support.histogram import SECONDS, Histogram
from torchrl_sglang.telemetry.prometheus import StatsFamilies, _family, write_text
from torchrl_sglang.telemetry.rows import PREFIX, ROWS, exported_name

prometheus_client = pytest.importorskip("prometheus_client")

LIMIT_SECONDS = 60.0


def get(url: str, **headers: str) -> str:
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        # It keeps the connection otherwise.
        error.close()
        raise


def parse(text: str) -> dict[tuple[str, frozenset], float]:
    """Returns the samples of a scrape: name and labels -> value."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(text: str, name: str, **labels: str) -> float:
    return parse(text)[f"{PREFIX}_{name}", frozenset(labels.items())]


class Part:
    """A gateway whose statistics are what a test says."""

    def __init__(self, stats: Any = None) -> None:
        self.told = stats

    def stats(self) -> Any:
        if isinstance(self.told, BaseException):
            raise self.told
        return self.told() if callable(self.told) else self.told


GATEWAY = {
    "sessions": 3,
    "generating": 1,
    "turns": 7,
    "tokens": 90,
    "branches": {"start": 2, 'a "quoted"\nreason': 1},
}


@pytest.fixture
def serve() -> Iterator[Any]:
    """Serves metrics until the end of the test."""
    opened, parts = [], []

    def made(**arguments: Any) -> Any:
        opened.append(serve_metrics(**arguments))
        # An endpoint does not.
        parts.extend(part for part in arguments.values() if isinstance(part, Part))
        return opened[-1]

    yield made
    for endpoint in opened:
        endpoint.close()


def test_all_parts_of_a_run_on_a_real_engine(restored_engine, hf_model, serve):
    policy = SGLangWrapper(
        restored_engine,
        input_mode="history",
        generate_kwargs={"max_new_tokens": 6},
        return_log_probs=True,
    )
    scheme = SGLangWeightSyncScheme(restored_engine, hf_model)
    before = restored_engine.stats()
    with Gateway(restored_engine) as gateway:
        with AsyncLLMCollector(
            policy=policy,
            prompts=tasks(4),
            rewards=length_reward,
            group_size=2,
            groups_per_batch=2,
            weight_sync_schemes={"policy": scheme},
        ) as collector:
            endpoint = serve(
                engine=restored_engine,
                collector=collector,
                gateway=gateway,
                scheme=scheme,
            )
            # Each is scraped before anything has happened, too.
            assert set(parse(get(endpoint.url)))
            report = collector.update_policy_weights_()
            batch = next(iter(collector))
            text = get(endpoint.url)
            engine = restored_engine.stats()
    scheme.shutdown()

    for part in ROWS:
        assert value(text, "up", part=part) == 1.0
    lengths = [len(row) for row in batch.get(("tokens", "response"), as_list=True)]
    assert len(lengths) == 4
    assert value(text, "collector_turns_total") == 4
    assert value(text, "collector_batches_total") == 1
    assert value(text, "collector_policy_version") == 1
    assert value(text, "collector_token_age_updates_count") == sum(lengths)
    assert value(text, "collector_token_age_updates_bucket", le="0.0") == sum(lengths)
    # The next batch is collected meanwhile.
    for name in ("responses_total", "response_length_tokens_count"):
        found = value(text, f"engine_{name}")
        assert before.completed + 4 <= found <= engine.completed
    seconds = value(text, "engine_request_duration_seconds_count")
    assert seconds - before.request_seconds.count >= 4
    assert value(text, "engine_weight_version") == float(report.version)
    assert value(text, "weights_updates_total", transport=report.transport) == 1
    assert value(text, "weights_update_bytes_total") == report.num_bytes
    assert value(text, "weights_update_duration_seconds_sum") == report.seconds
    (url,) = restored_engine.control.urls
    assert value(text, "engine_server_state", server=url, state="serving") == 1
    assert value(text, "engine_server_running_requests", server=url) >= 0

    # Nothing is exported that the table does not have, and nothing of it is left out.
    ends = ("_bucket", "_sum", "_count")
    names = {name for name, _ in parse(text)}
    for part, rows in ROWS.items():
        for name, row in rows.items():
            series = {exported_name(part, name)}
            if row.kind == "histogram":
                series = {exported_name(part, name) + end for end in ends}
            if name not in {"branches", "server_kv_cache_usage_ratio"}:
                assert series <= names, name
            names -= series
    assert names == {f"{PREFIX}_up"}


def test_a_gateway_has_a_route_of_its_own(engine):
    with Gateway(engine) as gateway:
        text = get(f"{gateway.url}/metrics")
        assert value(text, "gateway_sessions") == 0
        assert value(text, "up", part="engine") == 1
        owner = {"Authorization": f"Bearer {gateway.api_key}"}
        assert get(f"{gateway.url}/metrics", **owner)
        session = gateway.session()
        for headers in (
            {"Authorization": f"Bearer {session.key}"},
            {"Authorization": "Bearer wrong"},
            {"Origin": "https://elsewhere.example"},
        ):
            with pytest.raises(urllib.error.HTTPError) as caught:
                get(f"{gateway.url}/metrics", **headers)
            assert caught.value.code in (401, 403)


def test_scrapes_in_openmetrics_format(serve):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    endpoint = serve(gateway=Part(GATEWAY))
    text = get(endpoint.url, Accept="application/openmetrics-text; version=1.0.0")
    # This parser is strict about names, types and the end.
    names = {family.name for family in text_string_to_metric_families(text)}
    assert f"{PREFIX}_gateway_turns" in names


def test_labels_of_a_run_and_text_that_needs_escapes(serve):
    endpoint = serve(gateway=Part(GATEWAY), labels={"run": 'a "b"\\'})
    found = get(endpoint.url)
    assert value(found, "gateway_tokens_total", run='a "b"\\') == 90
    reason = 'a "quoted"\nreason'
    assert value(found, "gateway_branches_total", run='a "b"\\', reason=reason) == 1


def test_buckets_are_those_of_prometheus_own_histogram():
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("s", "h", buckets=SECONDS, registry=registry)
    ours = Histogram(SECONDS)
    for seconds in (0.0, 0.01, 0.0100001, 3.0, 99.9, 2500.0, 7000.0):
        theirs.observe(seconds)
        ours.add(seconds)
    expected = parse(prometheus_client.generate_latest(registry).decode())
    family = _family("s", ROWS["weights"]["update_duration_seconds"], ours.read(), {})
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for sample in family.samples
    }
    made = {key for key in expected if key[0].endswith("_created")}
    assert found == {key: expected[key] for key in expected.keys() - made}


def test_a_quantile_is_near_that_of_the_values():
    import numpy as np

    values = np.random.default_rng(0).uniform(0, 10, 20_000)
    histogram = Histogram(np.linspace(0.5, 10, 20).tolist())
    for each in values:
        histogram.add(float(each))
    for share in (0.1, 0.5, 0.9, 0.99):
        expected = float(np.quantile(values, share))
        assert abs(histogram.read().quantile(share) - expected) < 0.1


@pytest.mark.parametrize(
    "broken",
    [
        RuntimeError("It was shut down."),
        {"sessions": 1},
        None,
        {**GATEWAY, "turns": "many"},
    ],
    ids=["raises", "lacks figures", "nothing", "no number"],
)
def test_a_part_that_is_broken_is_down_and_others_are_not(serve, broken, engine):
    endpoint = serve(gateway=Part(broken), engine=engine)
    text = get(endpoint.url)
    assert value(text, "up", part="gateway") == 0
    assert value(text, "up", part="engine") == 1
    assert value(text, "engine_retries_total") >= 0


def test_a_part_that_hangs_costs_one_thread_and_a_timeout():
    released, began = threading.Event(), threading.Semaphore(0)

    def hang() -> Any:
        began.release()
        assert released.wait(LIMIT_SECONDS)
        return GATEWAY

    part = Part(hang)
    families = StatsFamilies(gateway=part, timeout=0.05)
    for _ in range(3):
        text = write_text(families, "")[1].decode()
        assert value(text, "up", part="gateway") == 0
    assert began.acquire(timeout=LIMIT_SECONDS)
    assert not began.acquire(blocking=False)
    released.set()
    patient = StatsFamilies(gateway=part, timeout=LIMIT_SECONDS)
    assert value(write_text(patient, "")[1].decode(), "gateway_turns_total") == 7


def test_an_engine_that_was_shut_down_and_one_that_is_gone(
    tiny_model_path, fake, serve
):
    engine = AsyncSGLang.connect(fake.url)
    endpoint = serve(engine=engine, gateway=Part(GATEWAY))
    assert value(get(endpoint.url), "up", part="engine") == 1
    engine.shutdown()
    assert value(get(endpoint.url), "up", part="engine") == 0
    del engine
    gc.collect()
    text = get(endpoint.url)
    assert value(text, "up", part="engine") == 0
    assert json.loads(get(endpoint.targets_url)) == []


def test_a_server_that_does_not_answer_is_down_and_the_scrape_goes_on(fake, serve):
    with AsyncSGLang.connect(fake.url) as engine:
        endpoint = serve(engine=engine)
        fake.close()
        text = get(endpoint.url)
        assert value(text, "up", part="engine") == 1
        names = {name for name, _ in parse(text)}
        assert f"{PREFIX}_engine_server_running_requests" not in names


def test_servers_with_metrics_of_their_own_are_found(tiny_model_path, serve):
    with AsyncSGLang.from_pretrained(
        tiny_model_path, device="cpu", enable_metrics=True
    ) as engine:
        endpoint = serve(engine=engine)
        ((group),) = json.loads(get(endpoint.targets_url))
        (target,) = group["targets"]
        assert engine.metrics_urls == (f"http://{target}/metrics",)
        engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4})
        theirs = {name for name, _ in parse(get(engine.metrics_urls[0]))}
        # The dashboard asks for these.
        assert {
            "sglang:gen_throughput",
            "sglang:token_usage",
            "sglang:num_queue_reqs",
        } <= theirs
        stats = engine.stats()
        assert stats.queue_seconds.count >= 1
        assert stats.first_token_seconds.count >= 1
        assert stats.servers[0].cache_usage is not None


def test_servers_without_metrics_are_not_targets(engine, serve):
    assert engine.metrics_urls == ()
    assert json.loads(get(serve(engine=engine).targets_url)) == []


def test_a_key_is_asked_for(serve):
    endpoint = serve(gateway=Part(GATEWAY), api_key="a key")
    assert get(endpoint.url, Authorization="Bearer a key")
    for given in ({}, {"Authorization": "Bearer b"}, {"Authorization": "a key"}):
        for url in (endpoint.url, endpoint.targets_url):
            with pytest.raises(urllib.error.HTTPError) as caught:
                get(url, **given)
            assert caught.value.code == 401


def test_other_paths_are_not_found(serve):
    endpoint = serve(gateway=Part(GATEWAY))
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(endpoint.url.replace("/metrics", "/metric"))
    assert caught.value.code == 404


def test_a_silent_client_holds_up_nobody(serve):
    endpoint = serve(gateway=Part(GATEWAY))
    port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
    with socket.create_connection(("127.0.0.1", port)):
        assert get(endpoint.url)


def test_it_ends_when_it_is_closed_and_the_port_is_free_again(serve):
    endpoint = serve(gateway=Part(GATEWAY))
    port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}"):
        serve(gateway=Part(GATEWAY), port=port)
    endpoint.close()
    endpoint.close()
    assert "closed" in repr(endpoint)
    again = serve(gateway=Part(GATEWAY), port=port)
    assert again.url == endpoint.url
    assert get(again.url)


def test_a_process_ends_although_it_serves_and_a_part_hangs():
    code = """
import threading, urllib.request
from torchrl_sglang.telemetry.server import serve_metrics
class Part:
    def stats(self): threading.Event().wait()
part = Part()
endpoint = serve_metrics(gateway=part)
scrape = threading.Thread(target=urllib.request.urlopen, args=[endpoint.url])
scrape.daemon = True
scrape.start()
print("served", flush=True)
"""
    done = subprocess.run(
        [trainer_python(), "-c", code], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "served\n"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "nothing to read"),
        ({"engine": object()}, "engine=.* has no statistics.*AsyncSGLang"),
        ({"collector": "http://x"}, "TorchRL's own collectors have none"),
        ({"gateway": Gateway}, "give a Gateway"),
        ({"gateway": Part(), "port": 99_999}, "port must be a port"),
        ({"gateway": Part(), "port": "9090"}, "port must be a port"),
        ({"gateway": Part(), "host": "0.0.0.0"}, "give an api_key"),
        ({"gateway": Part(), "host": None}, "host=None"),
        ({"gateway": Part(), "labels": {"a-b": "c"}}, "'a-b'"),
        ({"gateway": Part(), "labels": {"__a": "c"}}, "'__a'"),
        ({"gateway": Part(), "labels": {"server": "c"}}, "'server'"),
        ({"gateway": Part(), "labels": {"run": 3}}, "the value of 'run'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        serve_metrics(**arguments)


def test_the_package_is_named_if_it_is_missing(monkeypatch, engine):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match="pip install prometheus-client"):
        serve_metrics(gateway=Part(GATEWAY))
    with Gateway(engine) as gateway:
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(f"{gateway.url}/metrics")
    assert caught.value.code == 501


@pytest.mark.parametrize("part", ROWS)
def test_names_follow_the_conventions(part):
    for name, row in ROWS[part].items():
        # https://prometheus.io/docs/practices/naming/
        assert not name.endswith(("_total", "_count", "_sum", "_bucket"))
        units = {"ms", "millis", "minutes", "percent", "kb", "mb"}
        assert not units & set(name.split("_"))
        if row.kind == "histogram":
            assert name.endswith(("_seconds", "_tokens", "_updates"))
        assert row.help.endswith(".")
