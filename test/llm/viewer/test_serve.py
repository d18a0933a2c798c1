"""The server of the page, without a browser."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest
from helpers.recorded_runs import write_run

from torchrl_sglang.recording.reading import Recording
from torchrl_sglang.viewer.serve import Viewer, ViewerServer


@pytest.fixture
def folder(tmp_path):
    write_run(tmp_path / "run", steps=2)
    return tmp_path / "run"


@contextmanager
def serving(folder, kind=Recording):
    with ViewerServer(Viewer([kind.find(folder)]), 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join(60)


def get(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def refusal(url, **headers):
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(url, **headers)
    with caught.value as answer:
        return answer.code, answer.read().decode()


def test_a_run_is_read_when_its_page_asks(folder):
    with serving(folder) as url:
        assert "<title>run - torchrl-sglang</title>" in get(url)
        data = json.loads(get(f"{url}data.json"))
        assert data["runs"][0]["groups"]["responses"] == 32
        assert refusal(f"{url}data.json", **{"If-None-Match": data["tag"]}) == (304, "")
        found = json.loads(get(f"{url}search/0/what%20is%207%20%2B"))
        assert found == {"ids": ["7"], "searched": 8, "total": 8}
        assert refusal(f"{url}search/1/what")[0] == 404
        texts = json.loads(get(f"{url}group/0/1"))
        assert len(texts["responses"]) == 4


def test_a_group_is_there_before_its_page(folder):
    with serving(folder) as url:
        assert json.loads(get(f"{url}group/0/2"))["id"] == "2"


@pytest.mark.parametrize(
    ("path", "code", "text"),
    [
        ("group/0/none", 404, "group none were not recorded"),
        ("group/1/1", 404, "group 1 were not recorded"),
        ("group/0/%3Cb%3E", 404, "group <b> were not recorded"),
        ("none", 404, "no such page"),
    ],
)
def test_absent_pages_are_reported(folder, path, code, text):
    with serving(folder) as url:
        found = refusal(f"{url}{path}")
    assert found[0] == code
    assert text in found[1]


def test_a_page_of_another_site_is_refused(folder):
    with serving(folder) as url:
        assert refusal(url, Host="evil.example:80")[0] == 403
        assert "<title>" in get(url, Host="localhost:1")


class Broken(Recording):
    def refresh(self):
        raise RuntimeError("a mistake")


def test_a_viewer_that_fails_says_where_to_look(folder, capsys):
    with serving(folder, Broken) as url:
        code, text = refusal(f"{url}data.json")
    assert (code, text) == (500, "The viewer failed; its terminal says why.")
    assert "a mistake" in capsys.readouterr().err


def test_a_page_is_made_without_what_takes_long_to_import(folder):
    program = (
        "import sys\n"
        "from torchrl_sglang.recording.reading import find_all\n"
        "from torchrl_sglang.viewer.serve import Viewer\n"
        "Viewer(find_all([sys.argv[1]])).data()\n"
        "print(*{'aiohttp', 'asyncio', 'numpy', 'torch', 'yarl'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.split() == []
