"""The benchmarks run without a GPU, at tiny sizes; a failure or a lack of time is a result and costs nothing else."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fusedlayers.bench import cli, first_step, lengths, main, models, ops, peers, plots, report, workloads
from fusedlayers.bench.layers import cases as layer_cases
from fusedlayers.bench.timing import QUICK, Budget, compare, kept_for_backward, one_cpu, spread
from fusedlayers.functional import affine_act
from fusedlayers.kernels import ahead

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the benchmarks take their real sizes")

ROOT = Path(__file__).resolve().parent.parent


def run(tmp_path, *argv):
    path = tmp_path / "run.json"
    code = main([*argv, "--json", str(path)])
    return code, json.loads(path.read_text())


def test_ops_are_timed_against_eager(tmp_path, capsys):
    code, found = run(tmp_path, "ops", "--peers", "eager", "--only", "affine_act/relu*")
    assert code == 0
    (result,) = found["results"]
    assert set(result["peers"]) == {"fused", "eager"}
    for timing in result["peers"].values():
        assert 0 < timing["wall_ms"]["best"] <= timing["wall_ms"]["median"] <= timing["wall_ms"]["high"]
        assert timing["host_us"]["median"] > 0 and timing["device_ms"] is None
    assert found["versions"]["torch"] == torch.__version__ and found["hardware"]["name"] == "CPU"
    assert "affine_act/relu" in capsys.readouterr().out
    assert report.markdown(found).count("\n|") == 3 and "`fused, wall ms`" in report.legend(found)


def test_a_peer_that_is_not_installed_is_said_to_be_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    code, found = run(tmp_path, "ops", "--peers", "eager,liger", "--only", "rms_norm*")
    assert code == 0 and found["arguments"]["peers"] == "eager"
    assert "liger-kernel is not installed" in capsys.readouterr().out


def test_a_grid_shows_eager_against_itself(tmp_path, capsys):
    _, found = run(tmp_path, "ops", "--grid", "--peers", "eager", "--only", "affine_act/relu*")
    assert "eager again" in found["results"][0]["peers"]
    out = capsys.readouterr().out
    assert "wall time: 1 cases, eager against itself" in out and "nan" not in out, "a CPU has no device times"


@pytest.mark.parametrize(
    ("options", "name"),
    [("", "ops"), ("--grid", "grid"), ("--grid --route triton", "grid-triton"), ("--route reference", "ops-reference")],
)
def test_results_have_the_names_that_the_tables_look_for(tmp_path, monkeypatch, options, name):
    monkeypatch.chdir(tmp_path)
    main(["ops", "--budget", "0", *options.split()])
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*.json")] == [report.folder("CPU") / f"{name}.json"]


def test_the_grid_is_wide():
    grid = ops.grid_cases()
    assert len(grid) >= 60 and len({c.name for c in grid}) == len(grid)
    assert {c.name.rpartition("/")[2] for c in grid} == {"bf16", "fp32"}
    assert len({c.name for c in ops.key_cases()}) == len(ops.key_cases())


@pytest.mark.parametrize("case", [*ops.small_cases(), *layer_cases("cpu")], ids=lambda c: c.name)
def test_every_case_computes_what_eager_computes(case):
    torch.manual_seed(0)
    args = case.inputs(torch.device("cpu"))
    expected = case.eager(*args)
    got = case.fused(*args)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert sum(case.moved) > 0 and (case.moved[1] > 0) == case.training


def test_no_time_left_is_a_result(tmp_path):
    code, found = run(tmp_path, "ops", "--peers", "eager", "--budget", "0")
    assert code == 0
    assert all("time budget" in r["skipped"] for r in found["results"]) and len(found["results"]) > 3


def test_a_failing_case_is_a_result_and_the_others_run(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("broken on purpose")

    bad = peers.Case("bad", lambda d: (ops.rand(d, torch.float32, 3),), lambda x: x * 2, broken)
    worse = peers.Case("worse", lambda d: (ops.rand(d, torch.float32, 3),), broken, lambda x: x * 2)
    monkeypatch.setattr(ops, "small_cases", lambda: [bad, worse, ops.affine_act(4, 4, "fp32")])
    code, found = run(tmp_path, "ops", "--peers", "eager")
    assert code == 1
    assert ["error" in r for r in found["results"]] == [True, True, False]
    assert "broken on purpose" in found["results"][0]["error"]
    assert found["results"][1]["peers"]["eager"]["wall_ms"] is not None
    assert len(report.brief(found)) == 3


def test_resume_runs_only_what_is_missing(tmp_path):
    run(tmp_path, "ops", "--peers", "eager", "--only", "affine_act/relu*")
    before = json.loads((tmp_path / "run.json").read_text())
    _, found = run(tmp_path, "ops", "--peers", "eager", "--only", "*act*", "--resume")
    names = [r["case"] for r in found["results"]]
    first = before["results"][0]
    assert found["results"][0] == {**first, "date": before["date"]} and len(names) == len(set(names)) > 1
    found["date"] = "later"
    assert f"- From a run at {before['date']}: {first['case']}.\n" in report.markdown(found)


def test_resume_measures_again_what_failed(tmp_path, monkeypatch):
    run(tmp_path, "ops", "--peers", "eager", "--only", "affine_act/relu*")
    path, only = tmp_path / "run.json", ("--peers", "eager", "--only", "affine_act/relu*", "--resume")
    before = json.loads(path.read_text())
    name = before["results"][0]["case"]
    other = {"case": "another", "error": "RuntimeError: as it was"}
    path.write_text(json.dumps({**before, "results": [{"case": name, "error": "RuntimeError: once"}, other]}))
    code, found = run(tmp_path, "ops", *only, "--device-lost")
    assert code == 1 and [r.get("error") for r in found["results"]] == ["RuntimeError: once", other["error"]]
    code, found = run(tmp_path, "ops", *only)
    assert code == 1, "of a case that was not asked for again"
    assert [(r["case"], "error" in r) for r in found["results"]] == [("another", True), (name, False)]


def test_a_model_that_failed_is_measured_again(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(models, "workloads", lambda: [SimpleNamespace(name="a"), SimpleNamespace(name="b")])

    def measure(workload, variants, device):
        tried.append(workload.name)
        raise RuntimeError(f"attempt {len(tried)}")

    monkeypatch.setattr(models, "measure", measure)
    for more, expected in (
        ((), ["RuntimeError: attempt 1", "RuntimeError: attempt 2"]),
        (("--resume", "--device-lost"), ["RuntimeError: attempt 1", "RuntimeError: attempt 2"]),
        (("--resume",), ["RuntimeError: attempt 3", "RuntimeError: attempt 4"]),
    ):
        _, found = run(tmp_path, "models", "--peers", "eager", *more)
        assert [r["error"] for r in found["results"]] == expected
    assert tried == ["a", "b", "a", "b"]


def test_a_process_after_a_lost_device_leaves_alone_what_failed(tmp_path, monkeypatch):
    def lost(*args, **more):
        raise peers.DeviceLost("illegal address")

    started = []
    monkeypatch.setattr(cli, "run", lost)
    monkeypatch.setattr(cli.os, "execv", lambda program, command: started.append(command))
    main(["ops", "--json", str(tmp_path / "run.json")])
    (command,) = started
    assert command[3:4] == ["ops"] and command[-2:] == ["--resume", "--device-lost"]


@pytest.mark.parametrize("kind", ["ops", "models"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((t, "cannot read .*run.json") for t in ("{", "[]", '{"results": [1]}', '{"results": []}', "\udcff", "5")),
        ('{"kind": "KIND", "arguments": {"route": "auto"}, "results": [1]}', "cannot read .*run.json"),
        ('{"kind": "layers", "arguments": {"route": "auto"}, "results": []}', "of kind 'layers', this run of 'KIND'"),
        ('{"kind": "KIND", "arguments": {"route": "triton"}, "results": []}', "of route 'triton', this run of 'auto'"),
    ],
)
def test_what_cannot_be_resumed_is_left_as_it_is(tmp_path, kind, text, says):
    path = tmp_path / "run.json"
    path.write_bytes(text.replace("KIND", kind).encode(errors="surrogateescape"))
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=says.replace("KIND", kind)):
        main([kind, "--resume", "--peers", "eager", "--json", str(path)])
    assert path.read_bytes() == before


@pytest.mark.parametrize("kind", ["ops", "models"])
def test_a_folder_is_refused_before_anything_runs(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(report, "envelope", lambda *args: pytest.fail("it runs"))
    with pytest.raises(SystemExit, match="--json names a folder: "):
        main([kind, "--json", str(tmp_path)])


@pytest.mark.parametrize("peers", ["liger", ""])
def test_models_without_a_peer_of_theirs_are_an_error(tmp_path, peers):
    with pytest.raises(SystemExit, match=f"--peers '{peers}' has none that models have"):
        main(["models", "--peers", peers, "--json", str(tmp_path / "run.json")])


def test_a_budget_is_a_number(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["ops", "--budget", "nan", "--json", str(tmp_path / "run.json")])
    assert "argument --budget: invalid seconds value: 'nan'" in capsys.readouterr().err


def test_unknown_names_are_errors(tmp_path):
    with pytest.raises(SystemExit, match="unknown peers tvm"):
        main(["ops", "--peers", "tvm"])
    with pytest.raises(SystemExit, match="no case matches"):
        main(["ops", "--only", "nothing*"])
    with pytest.raises(SystemExit, match="no case matches"):
        main(["models", "--only", "nothing*", "--json", str(tmp_path / "run.json")])
    with pytest.raises(SystemExit, match="--grid is for ops"):
        main(["layers", "--grid"])


def test_a_picture_without_matplotlib_is_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--plot needs matplotlib"):
        main(["ops", "--plot", "--json", str(tmp_path / "run.json")])
    assert not (tmp_path / "run.json").exists()


def test_models_are_trained_plain_and_patched(tmp_path):
    code, found = run(tmp_path, "models", "--peers", "eager", "--only", "mlp*")
    assert code == 0
    (result,) = found["results"]
    assert set(result["variants"]) == {"eager", "patched"}
    assert result["variants"]["patched"]["sites"]["fused"] > 0 and not result["variants"]["patched"]["fallbacks"]
    assert all(v["full_ms"]["median"] > 0 for v in result["variants"].values())
    assert "mlp/" in report.markdown(found)


def test_a_model_that_cannot_be_built_is_a_result(tmp_path, monkeypatch):
    def build(device, tiny):
        raise ImportError("no such library")

    missing = workloads.Workload("missing", build, lambda m, x: m(x).sum())
    fine = workloads.Workload(
        "fine",
        lambda d, tiny: (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),)),
        lambda m, x: m(x).sum(),
    )
    monkeypatch.setattr(models, "workloads", lambda: [missing, fine])
    code, found = run(tmp_path, "models", "--peers", "eager")
    assert code == 1
    assert "no such library" in found["results"][0]["error"] and "variants" in found["results"][1]


def test_random_lengths_count_the_kernels_built(monkeypatch):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(1000, 8), nn.LayerNorm(8)

        def forward(self, ids):
            return self.norm(self.embed(ids))

    small = workloads.Workload("bert", lambda d, tiny: (Small(), ()), lambda m, ids: m(ids).square().sum())
    monkeypatch.setattr(lengths, "workloads", lambda: [small])
    *_, found = (made["lengths"] for made in lengths.measure("cpu", ["eager"], Budget(None), {}))
    (again, _) = (made["lengths"] for made in lengths.measure("cpu", ["eager"], Budget(None), found))
    assert again == found, "what is known is not measured again"
    assert set(found) == {"eager", "patched"}
    assert found["patched"]["worst_step_over_its_median"] > 0
    assert next(lengths.measure("cpu", [], Budget(0), {}))["lengths"]["eager"]["skipped"]
    late = SimpleNamespace(left=40.0)  # it is used up after the first step
    monkeypatch.setattr(lengths, "seconds", lambda step, device: setattr(late, "left", 13.0) or 0.5)
    cut_off = lengths._steps(small, "eager", "cpu", late)
    assert cut_off == {"steps": 1, "first_ten_steps_s": 0.5, "skipped": "the time budget was used up"}
    for used_up, steps in ((10, 10), (12, 12), (14, 12)):  # after ten, after all, among the repetitions
        taken: list[int] = []
        late = SimpleNamespace(left=40.0)

        def seconds(step, device, taken=taken, late=late, used_up=used_up):
            taken.append(1)
            late.left = -1.0 if len(taken) >= used_up else 40.0
            return 0.5

        monkeypatch.setattr(lengths, "seconds", seconds)
        cut_off = lengths._steps(small, "eager", "cpu", late)
        assert cut_off["steps"] == steps and cut_off["skipped"] and len(taken) <= max(12, used_up + 2)


def test_bars_of_what_was_not_measured(tmp_path):
    nothing = {"eager": {"step_ms": None, "device_ms": 0.0}, "patched": {"step_ms": {"median": 1.0}, "device_ms": 0.0}}
    run = {"kind": "models", "results": [{"case": "a", "variants": nothing}]}
    assert plots.bars(run, tmp_path / "a.png") is None


def test_a_first_step_is_timed(monkeypatch):
    tiny = workloads.Workload(
        "tiny", lambda d, t: (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),)), lambda m, x: m(x).sum()
    )
    monkeypatch.setattr(first_step, "workloads", lambda: [tiny])
    assert first_step.once(patched=False)["patching_s"] == 0.0
    times = first_step.once(patched=True)
    assert times["patching_s"] > 0 and times["first_step_s"] > 0


def test_what_is_measured_beside_the_models_may_fail(tmp_path, monkeypatch):
    def fails(command, timeout, **more):
        assert timeout is None, "no budget, no limit"
        raise OSError("no process")

    monkeypatch.setattr(first_step.subprocess, "run", fails)
    code, found = run(tmp_path, "models", "--peers", "", "--only", "first-step")
    assert code == 1 and found["results"] == [{"case": "first-step", "error": "OSError: no process"}]
    assert report.model_notes(found) == []


def test_what_autograd_keeps_is_counted_once_and_without_parameters():
    x, w = torch.randn(10, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    assert kept_for_backward(lambda: (x * w).exp(), [w]) == x.nbytes + x.nbytes  # x, and exp's output
    assert kept_for_backward(lambda: x * x) == x.nbytes


def test_a_contender_that_fails_does_not_stop_the_others():
    def fails(i):
        raise ValueError("no")

    found = compare({"bad": fails, "good": lambda i: torch.ones(3).sum()}, effort=QUICK, device="cpu")
    assert found["bad"].notes == ["ValueError: no"] and found["bad"].wall_ms is None
    assert found["good"].wall_ms.samples == QUICK.rounds


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be pinned here")
def test_one_cpu_for_all_threads_and_all_as_before_afterwards():
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    tasks = (threading.get_native_id(), other.native_id)
    before = [os.sched_getaffinity(t) for t in tasks]
    try:
        with one_cpu("cuda"):
            inside = [os.sched_getaffinity(t) for t in tasks]
            late = threading.Thread(target=ended.wait)
            late.start()
        assert inside[0] == inside[1] and len(inside[0]) == 1 and inside[0] <= before[0]
        assert [os.sched_getaffinity(t) for t in (*tasks, late.native_id)] == [*before, before[0]]
    finally:
        ended.set()
        other.join()
    late.join()


def test_what_is_timed_waits_for_builds_under_way(monkeypatch):
    waited = []
    monkeypatch.setattr(ahead, "settle", lambda: waited.append(1))
    compare({"one": lambda i: None}, effort=QUICK, device="cpu")
    assert waited == [1]
    importlib.import_module("fusedlayers.patch.tune")._times([lambda n: lambda: None] * 2)
    assert waited == [1, 1, 1]


def test_notes_beside_the_models():
    patched = {"kernels_built_after_ten_steps": 0, "worst_step_over_its_median": 1.25, "mean_step_ms": 12.3}
    patched |= {"first_ten_steps_s": 2.0, "one_cpu": True}
    lengths_ = {"eager": patched, "patched": {**patched, "after": ["eager"]}, "compile": {"skipped": "no time"}}
    found = {"kind": "models", "results": [
        {"case": "first-step", "added_cold_s": 5.04, "added_warm_s": None}, {"case": "lengths", "lengths": lengths_},
    ]}  # fmt: skip
    first, alone, second = report.model_notes(found)
    assert "5.0 s with a cold cache, not measured with a warm one" in first
    assert "12.3 ms a step, the mean of each length's median on one CPU." in alone
    assert "1.25 times its length's median (eager had run the same lengths); 0 of this library's kernels were" in second
    assert len(report.model_rows(found)) == 1 and report.brief(found)[1:] == [first, alone, second]


@pytest.mark.parametrize(
    "folder", sorted(p.parent for p in (ROOT / report.RESULTS).glob("*/RESULTS.md")), ids=lambda p: p.name
)
def test_every_column_of_the_results_is_explained(folder):
    text = (folder / "RESULTS.md").read_text(encoding="utf-8")
    heads = re.findall(r"^\| (.*) \|\n\|---", text, re.MULTILINE)
    assert len(heads) == len(list(folder.glob("*.json")))
    columns = {c for head in heads for c in head.split(" | ")}
    parts = {part for c in columns for part in ([c] if c in report.COLUMNS else c.split("."))}
    assert not {part for part in parts if f"`{part}`" not in text}


def test_a_column_is_explained_once():
    run = {"kind": "models", "results": [{"case": "a", "variants": {"eager": {}, "patched": {}}}]}
    assert "- `patched x`: how many times" in report.legend(run)
    assert report.legend(run, report.table_rows(run)[0]) == ""


def test_numbers():
    s = spread([3.0, 1.0, 2.0])
    assert (s.median, s.best, s.samples) == (2.0, 1.0, 3)
    result = {"peers": {"fused": {"device_ms": {"median": 2.0}}, "eager": {"device_ms": {"median": 6.0}},
                        "gemms": {"device_ms": {"median": 1.0}}}}  # fmt: skip
    assert peers.ratio(result, "eager") == 3.0 and report.removed(result) == 4 / 5
    assert math.isnan(peers.ratio(result, "compile"))
    assert Budget(None).left == math.inf and Budget(0).left <= 0
    assert report.folder("NVIDIA H200").name == "nvidia-h200"


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib, of the bench extra")
    _, found = run(tmp_path, "ops", "--peers", "eager", "--only", "affine_act/relu*")
    found["ceilings"] = {"copy_bytes_per_s": 1e9, "bf16_flop_per_s": 1e12}
    for timing in found["results"][0]["peers"].values():
        timing["device_ms"] = timing["wall_ms"]
    drawn = plots.draw(found, tmp_path / "run.json")
    assert [p.name for p in drawn] == ["run.png", "run-roofline.png"]
    assert all(p.stat().st_size > 5000 for p in drawn)
    x = torch.randn(8, 16, requires_grad=True)
    assert affine_act(x, 1.0, 0.0).shape == x.shape and cli.one_line(found["results"][0])
