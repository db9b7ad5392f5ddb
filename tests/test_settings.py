"""Settings: what is refused, and what the refusal names."""

from __future__ import annotations

import pytest

import fusedlayers as fl
from fusedlayers.settings import Settings


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"route": "tritn"}, "route must be one of 'auto', 'reference', 'library', 'triton', not 'tritn'"),
        ({"dropout": "slow"}, "dropout must be one of 'eager', 'fast', not 'slow'"),
        ({"autotune": "false"}, "autotune must be one of True, False, not 'false'"),
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
