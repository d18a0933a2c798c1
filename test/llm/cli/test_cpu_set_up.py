"""How SGLang's environment for CPU is made."""

from __future__ import annotations

import fcntl
import importlib.metadata
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import torchrl_sglang
from torchrl_sglang.backends.launch.cpu import DEFAULT_VERSION, VERSIONS
from torchrl_sglang.cli.cpu.install import (
    TORCH_VERSION,
    install,
    installed_closure,
    link_distributions,
    main,
)
from torchrl_sglang.cli.cpu.packages import UV, install_packages, uv_settings
from torchrl_sglang.errors import ConfigurationError

INDEX = "https://index.test/simple"


class TestUvSettings:
    @pytest.mark.parametrize(
        ("configuration", "settings"),
        [
            ("", {}),
            (
                "global.cert='/etc/cert.pem'\n:env:.timeout='60'",
                {"SSL_CERT_FILE": "/etc/cert.pem", "UV_HTTP_TIMEOUT": "60"},
            ),
            (
                "global.trusted-host='a.test\\nb.test'\nglobal.proxy='http://p.test:1'",
                {
                    "UV_INSECURE_HOST": "a.test b.test",
                    "HTTP_PROXY": "http://p.test:1",
                    "HTTPS_PROXY": "http://p.test:1",
                },
            ),
            ("wheel.find-links='/other'", {}),
            ("global.find-links='/a /b'", {"UV_FIND_LINKS": "/a,/b"}),
            (
                "global.find-links='/weak'\n:env:.find-links='/strong'",
                {"UV_FIND_LINKS": "/strong"},
            ),
            (
                ":env:.no-index='1'\n:env:.find-links='/a'",
                {"UV_FIND_LINKS": "/a"},
            ),
            (
                "global.index-url='https://own.test'",
                {
                    "UV_INDEX": "",
                    "UV_DEFAULT_INDEX": "https://own.test",
                    "UV_INDEX_STRATEGY": "unsafe-best-match",
                },
            ),
            (
                "install.extra-index-url='https://a.test\\nhttps://b.test'",
                {
                    "UV_INDEX": f"{INDEX} https://a.test",
                    "UV_DEFAULT_INDEX": "https://b.test",
                    "UV_INDEX_STRATEGY": "unsafe-best-match",
                },
            ),
        ],
    )
    def test_pip_s_sources_are_uv_s(
        self, configuration: str, settings: dict[str, str]
    ) -> None:
        assert uv_settings(configuration, INDEX) == settings


@pytest.fixture
def make_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A program in uv's place, which notes its arguments in the file returned."""

    def make(script: str) -> Path:
        notes = tmp_path / "uv-calls"
        uv = tmp_path / "tools" / "bin" / "uv"
        uv.parent.mkdir(parents=True)
        uv.write_text(f'#!/bin/sh\necho "$@" >>{notes}\n{script}\n')
        uv.chmod(0o755)
        monkeypatch.setattr(sys, "prefix", str(tmp_path / "tools"))
        return notes

    return make


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., Path]:
    """Writes a wheel, with a script of its name, into the folder returned."""

    def make(name: str, version: str, script: str | None = None) -> Path:
        folder = tmp_path / "wheels"
        folder.mkdir(exist_ok=True)
        info = f"{name}-{version}.dist-info"
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        files = {f"{name}.py": "", f"{info}/METADATA": about, f"{info}/WHEEL": tag}
        if script is not None:
            files[f"{name}-{version}.data/scripts/{name}"] = script
        files[f"{info}/RECORD"] = "".join(
            f"{file},,\n" for file in (*files, f"{info}/RECORD")
        )
        path = folder / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for file, content in files.items():
                entry = zipfile.ZipInfo(file)
                entry.external_attr = 0o100755 << 16
                wheel.writestr(entry, content)
        return folder

    return make


@pytest.fixture
def wheels(make_wheel: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the only packages that pip finds."""
    folder = make_wheel("handmade", "1.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


class TestInstallPackages:
    def test_uv_installs_where_there_is_one(
        self,
        make_uv: Callable[[str], Path],
        wheels: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        seen = tmp_path / "seen"
        notes = make_uv(f'echo "$UV_FIND_LINKS|$PYTHONPATH" >{seen}')
        monkeypatch.setenv("PYTHONPATH", "/somewhere")
        install_packages(Path("/env/bin/python"), ["--no-deps", "handmade"])
        assert notes.read_text().split() == [
            *("pip", "install", "--quiet", "--python", "/env/bin/python"),
            *("--no-index", "--no-deps", "handmade"),
        ]
        assert seen.read_text().strip() == f"{wheels}|"

    def test_settings_of_uv_take_precedence(
        self,
        make_uv: Callable[[str], Path],
        wheels: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        seen = tmp_path / "seen"
        make_uv(f'echo "$UV_FIND_LINKS" >{seen}')
        monkeypatch.setenv("UV_FIND_LINKS", "/own")
        install_packages(Path("/env/bin/python"), ["handmade"])
        assert seen.read_text().strip() == "/own"

    def test_pip_installs_uv_where_there_is_none(
        self,
        make_wheel: Callable[..., Path],
        wheels: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        notes = tmp_path / "calls"
        make_wheel(*UV.split("=="), script=f'#!/bin/sh\necho "$@" >>{notes}\n')
        monkeypatch.setattr(sys, "prefix", str(tmp_path))
        monkeypatch.setenv("PATH", "/usr/bin:/bin")
        install_packages(Path("/env/bin/python"), ["handmade"])
        assert notes.read_text().split()[-2:] == ["--no-index", "handmade"]

    def test_real_uv_installs_from_pip_s_folder(
        self, wheels: Path, tmp_path: Path
    ) -> None:
        venv.create(tmp_path / "env", symlinks=True)
        python = tmp_path / "env" / "bin" / "python"
        install_packages(python, ["handmade"])
        assert subprocess.run([python, "-c", "import handmade"]).returncode == 0
        with pytest.raises(RuntimeError, match=r"(?s)`absent`.*Run this again.*absent"):
            install_packages(python, ["absent"])


def make_distribution(
    site: Path, name: str, requires: list[str], files: list[str]
) -> None:
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    lines = [f"Requires-Dist: {requirement}" for requirement in requires]
    header = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0"]
    (info / "METADATA").write_text("\n".join([*header, *lines]) + "\n")
    for file in files:
        path = site / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    recorded = [*files, f"{info.name}/METADATA", f"{info.name}/RECORD"]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in recorded))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installed: alpha, which requires beta with its extra, which requires gamma."""
    site = tmp_path / "trainer" / "site-packages"
    make_distribution(
        site,
        "alpha",
        ["beta[fast]==1.0", "Pinned_Name", 'absent; python_version < "3"'],
        ["alpha/__init__.py", "alpha/__pycache__/x.pyc", "../bin/run-alpha"],
    )
    make_distribution(
        site,
        "beta",
        ['gamma; extra == "fast"', 'absent; extra == "slow"', "alpha"],
        ["shared/beta/lib.so"],
    )
    make_distribution(site, "gamma", [], ["shared/gamma/lib.so"])
    monkeypatch.syspath_prepend(str(site))
    return site


class TestLinks:
    def test_the_closure_follows_extras_and_leaves_out_what_is_pinned(
        self, site: Path
    ) -> None:
        found = installed_closure("alpha", without=["pinned-name"])
        assert found is not None
        assert sorted(d.name for d in found) == ["alpha", "beta", "gamma"]

    def test_an_incomplete_installation_is_not_shared(self, site: Path) -> None:
        assert installed_closure("alpha", without=[]) is None
        assert installed_closure("absent", without=[]) is None

    def test_each_environment_keeps_its_own(self, site: Path, tmp_path: Path) -> None:
        target = tmp_path / "engine" / "site-packages"
        old, other = target / "alpha" / "old.py", target / "other.py"
        for path in (old, other):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        found = installed_closure("alpha", without=["pinned-name"])
        assert found is not None
        assert link_distributions(found, target)

        files = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
        infos = {
            f"{name}-1.0.dist-info/{file}"
            for name in ("alpha", "beta", "gamma")
            for file in ("METADATA", "RECORD")
        }
        assert files == infos | {
            *("alpha/__init__.py", "other.py"),
            *("shared/beta/lib.so", "shared/gamma/lib.so"),
        }
        assert (target / "shared/beta/lib.so").samefile(site / "shared/beta/lib.so")
        assert [p.name for p in target.parent.iterdir()] == ["site-packages"]

        (site / "alpha" / "__init__.py").unlink()
        assert (target / "alpha" / "__init__.py").read_text() == "alpha"

    def test_nothing_changes_where_linking_fails(
        self, site: Path, tmp_path: Path
    ) -> None:
        target = tmp_path / "engine" / "site-packages"
        target.mkdir(parents=True)
        # There are no hard links to folders.
        (site / "shared" / "gamma" / "lib.so").unlink()
        (site / "shared" / "gamma" / "lib.so").mkdir()
        found = installed_closure("alpha", without=["pinned-name"])
        assert found is not None
        assert not link_distributions(found, target)
        assert list(target.parent.rglob("*")) == [target]


class TestInstall:
    def test_each_part_is_made_once_and_an_interrupted_one_again(
        self, make_uv: Callable[[str], Path], wheels: Path, tmp_path: Path
    ) -> None:
        # Cannot install the older SGLang until that file is there.
        unlocked = tmp_path / "unlocked"
        prefix = tmp_path / "engine"
        folder = prefix / f"sglang-{VERSIONS[1]}"
        notes = make_uv(
            f'case "$*" in *"--target {folder}"*)\n'
            f"test -e {unlocked} && mkdir {folder};;\nesac"
        )

        def calls() -> list[str]:
            lines = notes.read_text().splitlines()
            notes.write_text("")
            return [line.split()[-1] for line in lines]

        assert install(prefix, with_torch=False)
        assert calls() == ["torchvision==0.28.0"]
        with pytest.raises(RuntimeError, match=VERSIONS[1]):
            install(prefix, [VERSIONS[1], DEFAULT_VERSION], with_torch=False)
        unlocked.touch()
        notes.write_text("")
        assert install(prefix, [VERSIONS[1]], with_torch=False)
        assert calls() == [f"sglang=={VERSIONS[1]}"]
        assert not install(prefix, [VERSIONS[1]], with_torch=False)
        assert calls() == []

    def test_two_at_once_do_not_mix(self, tmp_path: Path) -> None:
        with (tmp_path / ".engine.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(RuntimeError, match="Another process"):
                install(tmp_path / "engine")
        assert not (tmp_path / "engine").exists()

    def test_torch_is_this_python_s(
        self, make_uv: Callable[[str], Path], tmp_path: Path
    ) -> None:
        torch = importlib.metadata.distribution("torch")
        if torch.version.partition("+")[0] != TORCH_VERSION:
            pytest.skip(f"this Python has torch {torch.version}, which is not shared")
        notes = make_uv("")
        install(tmp_path / "engine")
        ours = Path(str(torch.locate_file("torch/version.py")))
        folders = {"base": str(tmp_path / "engine")}
        theirs = Path(
            sysconfig.get_path("purelib", "venv", folders), "torch/version.py"
        )
        if tmp_path.stat().st_dev == ours.stat().st_dev:
            assert theirs.samefile(ours)
        else:
            assert f"torch=={TORCH_VERSION}" in notes.read_text()

    def test_an_unknown_version_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match=r"0\.1\.2.*choose one of"):
            install(tmp_path / "engine", ["0.1.2"])

    def test_a_folder_in_use_is_left_alone(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "thesis.tex").write_text("")
        assert main(["--prefix", str(tmp_path)]) == 1
        assert "something other than a virtual environment" in capsys.readouterr().err
        assert (tmp_path / "thesis.tex").is_file()


def test_the_installers_need_the_standard_library_only() -> None:
    """They run before anything else is installed."""
    root = Path(torchrl_sglang.__file__).parents[1]
    imports = "torchrl_sglang.cli.cpu.install, torchrl_sglang.cli.cpu.packages"
    code = f"import sys; sys.path.insert(0, {str(root)!r}); import {imports}"
    # Without the folders of packages.
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
