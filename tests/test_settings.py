"""Settings: what is refused, and what the refusal names."""

from __future__ import annotations

from pathlib import Path

import pytest

import fusedlayers as fl
from fusedlayers.settings import Settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"route": "tritn"}, "route must be one of 'auto', 'reference', 'library', 'triton', not 'tritn'"),
        ({"dropout": "slow"}, "dropout must be one of 'eager', 'fast', not 'slow'"),
        ({"autotune": "false"}, "autotune must be one of True, False, not 'false'"),
        ({"cache": ""}, "cache must be the path of a folder, not ''"),
    ],
)
def test_values_that_do_not_exist(values, message):
    before = repr(fl.settings)
    with pytest.raises(ValueError, match=message):
        fl.settings(**values)
    assert repr(fl.settings) == before


def test_environment_variables_are_named(monkeypatch):
    monkeypatch.setenv("FUSEDLAYERS_AUTOTUNE", "off")
    monkeypatch.setenv("FUSEDLAYERS_DROPOUT", "fast")
    made = Settings()
    assert made.autotune is False and made.dropout == "fast"
    for variable in ("FUSEDLAYERS_ROUTE", "FUSEDLAYERS_DROPOUT", "FUSEDLAYERS_AUTOTUNE"):
        monkeypatch.setenv(variable, "")
    made = Settings()
    assert (made.route, made.dropout, made.autotune) == ("auto", "eager", True)
    monkeypatch.setenv("FUSEDLAYERS_AUTOTUNE", "True")
    assert Settings().autotune is True
    monkeypatch.setenv("FUSEDLAYERS_AUTOTUNE", "maybe")
    with pytest.raises(ValueError, match="environment variable FUSEDLAYERS_AUTOTUNE: autotune must be one of '1', "):
        Settings()
    monkeypatch.setenv("FUSEDLAYERS_AUTOTUNE", "0")
    monkeypatch.setenv("FUSEDLAYERS_ROUTE", "gpu")
    with pytest.raises(ValueError, match="environment variable FUSEDLAYERS_ROUTE: route must be one of"):
        Settings()


@pytest.mark.parametrize(("value", "kind"), [(b"/tmp/x", "bytes"), (None, "NoneType"), (3, "int")])
def test_a_cache_that_is_no_path(value, kind):
    before = repr(fl.settings)
    with pytest.raises(TypeError, match=f"cache must be a str or os.PathLike, not {kind}"):
        fl.settings(cache=value)
    assert repr(fl.settings) == before


def test_a_cache_may_be_named_from_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("FUSEDLAYERS_CACHE", "~/routes")
    assert Settings().cache == str(tmp_path / "routes")
    for value in ("~/other", Path("~/other")):
        with fl.settings(cache=value):
            assert fl.settings.cache == str(tmp_path / "other")


def test_without_a_home_directory(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for variable in ("FUSEDLAYERS_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert Settings().cache == str(tmp_path / "fusedlayers")

    def full():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", full)
    assert Path(Settings().cache).name == "fusedlayers"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Settings().cache == str(tmp_path / "xdg" / "fusedlayers")
    monkeypatch.setenv("FUSEDLAYERS_CACHE", str(tmp_path / "routes"))
    assert Settings().cache == str(tmp_path / "routes")
