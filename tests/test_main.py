"""The command line: what it prints, as text and as JSON, and what its exit status says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers import doctor
from fusedlayers.__main__ import CommandError, build, main, read_input
from fusedlayers.patch import rule

HERE = "tests.test_main"


def mlp(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def embedded() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 8), nn.GELU())


class Half(nn.Module):
    def forward(self, x):
        return x / 2


class HalfWrong(fl.Rule):
    """A rule that a user got wrong."""

    target = Half

    def fuse(self, m):
        return m.call(torch.mul, m.inputs["x"], 2)


def wrong() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Half())


class Space:
    model = mlp()


def number() -> int:
    return 3


def test_explain_prints_the_report_and_its_json(capsys):
    assert main(["explain", f"{HERE}:mlp"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == str(fl.explain(mlp()))
    assert main(["explain", f"{HERE}:mlp", "--input", "2x4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == fl.explain(mlp()).to_dict()


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", ["--input", "3x4"]),
        ("mlp", ["--input", "3x4:float64", "--eval"]),
        ("embedded", ["--input", "2x7:int64"]),
    ],
)
def test_verify_passes_on_a_model_that_is_right(model, options, capsys):
    if "float64" in options[1]:
        torch.set_default_dtype(torch.float64)
    try:
        status = main(["verify", f"{HERE}:{model}", "--device", "cpu", *options])
    finally:
        torch.set_default_dtype(torch.float32)
    assert status == 0
    assert capsys.readouterr().out


def test_verify_fails_on_a_model_that_is_not(capsys, monkeypatch):
    monkeypatch.setattr(rule, "_rules", dict(rule._rules))
    fl.register_rule(HalfWrong)
    assert main(["verify", f"{HERE}:wrong", "--device", "cpu", "--input", "3x4"]) == 1
    assert "FAILED" in capsys.readouterr().out
    assert main(["verify", f"{HERE}:wrong", "--device", "cpu", "--input", "3x4", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_verify_without_a_fitting_input_says_so(capsys):
    assert main(["verify", f"{HERE}:mlp", "--device", "cpu"]) == 2
    assert "--input 2x3x224x224" in capsys.readouterr().err
    assert main(["verify", f"{HERE}:mlp", "--device", "cpu", "--input", "3x5"]) == 2
    assert "3x5" in capsys.readouterr().err


def test_a_device_that_is_not_there_says_so(capsys):
    for device in ("gpu", "cuda:999"):
        assert main(["verify", f"{HERE}:mlp", "--device", device, "--input", "3x4"]) == 2
        assert f"--device {device} cannot be used" in capsys.readouterr().err


def test_a_bench_that_cannot_be_run_is_no_failed_check(capsys):
    assert main(["bench", "ops", "--peers", "tvm"]) == 2
    assert "unknown peers tvm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("torch.nn", "module:callable"),
        ("no_such_module:x", "no_such_module"),
        (f"{HERE}:nothing", "nothing"),
        (f"{HERE}:number", "int, not a torch.nn.Module"),
        (f"{HERE}:mlp(open('x'))", "literal arguments"),
        (f"{HERE}:1 +", "literal arguments"),
        ("torch.nn:Linear", "Linear"),
    ],
)
def test_a_model_that_cannot_be_built_says_why(spec, says, capsys):
    assert main(["explain", spec]) == 2
    assert says in capsys.readouterr().err


def test_models_may_be_dotted_called_or_ready():
    assert build(f"{HERE}:mlp(width=5)")[0].out_features == 5
    assert build("torch.nn:Linear(3, 2)").in_features == 3
    assert build(f"{HERE}:Space.model") is build(f"{HERE}:Space.model")


def test_inputs_have_sizes_and_perhaps_a_dtype():
    assert read_input("2x3", "cpu").shape == (2, 3) and read_input("5", "cpu").dtype == torch.float32
    tokens = read_input("4x6:int64", "cpu")
    assert tokens.dtype == torch.int64 and tokens.min() >= 0 and tokens.max() < 100
    for bad in ("2x", "axb", "2x3:nothing", "-1x2", ""):
        with pytest.raises(CommandError, match="2x3x224x224"):
            read_input(bad, "cpu")


def test_doctor_reports_what_runs_here(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for what in ("versions", "triton", "C compiler", "route on cpu", "cache folder", "settings"):
        assert what in text
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True and f"torch {torch.__version__}" in found["findings"][0]["found"]


def test_doctor_fails_where_a_kernel_should_run_and_does_not(monkeypatch):
    monkeypatch.setattr(doctor, "_kernel", lambda: doctor.Finding("a kernel", "no", False))
    report = doctor.examine()
    assert not report and "FAIL  a kernel" in str(report)


def test_doctor_fails_where_a_forced_route_makes_every_call_raise(monkeypatch):
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.kernels, "unavailable", lambda: "Triton cannot be imported")
    with fl.settings(route="triton"):
        report = doctor.examine()
    assert not report and "FAIL  route on cpu" in str(report) and "route 'triton' is forced" in str(report)
    with fl.settings(route="reference"):
        assert doctor.examine()


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(36, "File name too long")])
def test_doctor_reports_a_cache_folder_that_cannot_be_looked_at(monkeypatch, error, tmp_path):
    def exists(path):
        raise error

    monkeypatch.setattr(doctor.Path, "exists", exists)
    with fl.settings(cache=tmp_path / "routes"):
        found = doctor._cache()
    assert found.ok is None and found.found == f"{tmp_path / 'routes'} (cannot be used: {error.strerror})"


@pytest.mark.parametrize(("gpu", "ok"), [(False, None), (True, False)])
def test_doctor_reports_a_compiler_that_cannot_be_run(monkeypatch, gpu, ok, tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_bytes(b"\x00no program")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(doctor.kernels, "unavailable", lambda: None)
    found = doctor._compiler()
    assert found.ok is ok and found.found == f"{compiler} cannot be run: Exec format error"


def test_doctor_without_triton_is_in_order(monkeypatch):
    monkeypatch.setattr(doctor.kernels, "unavailable", lambda: "Triton cannot be imported")
    report = doctor.examine()
    assert report and "plain PyTorch" in str(report)


@pytest.mark.parametrize("arguments", [[], ["explain"], ["explode"]])
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m fusedlayers" in capsys.readouterr().err


def test_bench_gets_the_rest_of_the_line(monkeypatch):
    import fusedlayers.bench as bench

    given = []
    monkeypatch.setattr(bench, "main", lambda argv: given.append(argv))
    assert main(["bench", "ops", "--json", "x"]) == 0
    assert given == [["ops", "--json", "x"]]


def test_as_a_program():
    command = [sys.executable, "-m", "fusedlayers", "explain", "torch.nn:Sequential"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(fl.explain(nn.Sequential()))
