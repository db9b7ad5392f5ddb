"""Routing by measurement: what a table says is taken, where none is measured, kept on disk, and shared by processes."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fusedlayers as fl
from fusedlayers import kernels
from fusedlayers.functional import affine_act
from fusedlayers.ops import _measure, _route, _table
from tests.patch.test_builtin_rules import block
from tests.patch.test_linear_norm import post_norm

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def looked_up_anew():
    _table.forget()
    yield
    _table.forget()


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A pretended device with no shipped table, whose measurements are counted and land in `tmp_path`."""
    measured = []

    def measure(op, device):
        measured.append(op)
        return {f"{op}/train/fp32": [[10, "reference"]]}

    monkeypatch.setattr(_measure, "_measured", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU 9000")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with fl.settings(cache=tmp_path, autotune=True):
        yield SimpleNamespace(measured=measured, folder=tmp_path)


@pytest.fixture(autouse=True)
def pretended_are_plain(monkeypatch):
    monkeypatch.setattr(_table, "_PLAIN", (*_table._PLAIN, SimpleNamespace))


def pretended(numel=512, dtype=FP32, grad=True):
    """What `choose` asks of a tensor, as one on a GPU would answer."""
    return SimpleNamespace(
        get_device=lambda: 0, is_cuda=True, device=torch.device("cuda", 0), numel=lambda: numel, dtype=dtype,
        requires_grad=grad,
    )  # fmt: skip


def test_runs_go_by_bits_of_size():
    entry = _table.parse(
        "op", {"op/train/bf16": [[10, "reference"], [20, None], [24, "library"]], "other/train/fp32": []}
    )
    infer, routes = entry[BF16]
    assert [routes[n] for n in (0, 10, 11, 20, 21, 24, 25, 64)] == [
        "reference", "reference", None, None, "library", "library", None, None,
    ]  # fmt: skip
    assert set(entry) == {BF16} and set(infer) == {None}


NO_RUNS = [
    [[10, "fast"]], [[10, "reference"], [5, None]], [[12]], [["12", "reference"]], [[65, "reference"]],
    [[-1, "reference"]], [[True, "reference"]], [[12, ["reference"]]], [5], ["ab"], 5, 0, "", None, {"12": "reference"},
]  # fmt: skip


@pytest.mark.parametrize("routes", [*({"op/train/bf16": runs} for runs in NO_RUNS), 5, [], None, "op/train/bf16"])
def test_a_table_that_makes_no_sense_is_an_error(routes):
    with pytest.raises(ValueError, match=r"not (a|a run of a|the runs of a) route table"):
        _table.parse("op", routes)


def test_shipped_tables_can_be_read():
    for path in _table.TABLES.glob("*.json"):
        data = json.loads(path.read_text())
        assert path.stem == _table.slug(data["device"]) and data["versions"]["torch"] and data["date"]
        for key in data["routes"]:
            assert re.fullmatch(r"\w+/(train|infer)/(fp16|bf16|fp32|fp64)", key)
            assert _table.parse(key.partition("/")[0], data["routes"])


def test_a_route_is_chosen_by_size_direction_and_dtype(machine):
    choose = _table.choose
    assert choose("affine_act", [pretended(512)], "triton") == "reference"
    assert choose("affine_act", [pretended(1023)], "library") == "reference"
    assert choose("affine_act", [pretended(1024)], "triton") == "triton"
    assert choose("affine_act", [pretended(512, grad=False)], "triton") == "triton"
    assert choose("affine_act", [pretended(512, dtype=BF16)], "library") == "library"
    with torch.no_grad():
        assert choose("affine_act", [pretended(512)], "triton") == "triton"


def test_what_draws_takes_one_route_with_and_without_a_backward():
    """A reentrant checkpoint runs its first forward without: another route might draw another mask there."""
    both = (_table._dense([[64, "reference"]]), _table._dense([[64, "triton"]]))
    with _table.in_force(("scale_residual", 0), {FP32: both}), torch.no_grad():
        assert _table.known("scale_residual", [pretended()]) == "reference"
        assert _table.known("scale_residual", [pretended()], draws=True) == "triton"
        assert _table.choose("scale_residual", [pretended()], "library", draws=True) == "triton"


def test_it_is_measured_once_and_then_read(machine):
    for _ in range(3):
        _table.choose("affine_act", [pretended()], "triton")
    assert machine.measured == ["affine_act"] and "a measurement on this machine (" in _table.explain("affine_act")
    _table.forget()  # as in a new process
    assert _table.choose("affine_act", [pretended()], "triton") == "reference"
    assert machine.measured == ["affine_act"] and "made before" in _table.explain("affine_act")
    (file,) = machine.folder.glob("*.json")
    assert torch.__version__ in file.name and fl.__version__ in file.name and "some-gpu-9000" in file.name


def test_nothing_is_measured_where_it_must_not_be(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _table.choose("affine_act", [pretended()], "triton") == "triton"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert _table.choose("affine_act", [pretended(1 << 26)], "triton") == "triton"
    assert _table.choose("op_without_probe", [pretended()], "library") == "library"
    with fl.settings(autotune=False):
        assert _table.choose("layer_norm", [pretended()], "triton") == "triton"
        assert "autotuning is off" in _table.explain("layer_norm")
    # in a backward, as when a checkpoint runs its forward again: a measurement elsewhere would wait for this thread
    y, found = torch.ones(1, requires_grad=True) * 2, []
    y.register_hook(lambda g: found.append(_table.choose("affine_act", [pretended()], "triton")))
    y.sum().backward()
    assert found == ["triton"] and machine.measured == []
    # both are over: now it is
    assert _table.choose("affine_act", [pretended()], "triton") == "reference"
    assert machine.measured == ["affine_act"]


def test_a_shipped_table_and_the_machines_own_measurement_both_count(machine, monkeypatch):
    shipped = {"affine_act/train/fp32": [[4, "reference"], [12, None], [14, "reference"]],
               "affine_act/infer/fp32": [[4, "reference"]]}  # fmt: skip
    monkeypatch.setattr(_table, "_shipped", lambda name: shipped)
    monkeypatch.setattr(_table._shipped, "cache_clear", lambda: None, raising=False)
    sizes = {8: "reference", 512: "reference", 2048: "triton", 9000: "reference", 20000: "triton"}
    for numel, expected in sizes.items():
        assert _table.choose("affine_act", [pretended(numel)], "triton") == expected
    assert _table.choose("affine_act", [pretended(8, grad=False)], "triton") == "reference"
    assert machine.measured == ["affine_act"] and "shipped for Some GPU 9000, and a mea" in _table.explain("affine_act")
    _table.forget()
    with fl.settings(autotune=False):
        assert _table.choose("affine_act", [pretended(512)], "triton") == "triton"
        assert _table.choose("affine_act", [pretended(8)], "triton") == "reference"


def test_a_report_says_how_routes_are_chosen(machine, monkeypatch):
    _table.choose("affine_act", [pretended()], "triton")
    monkeypatch.setitem(_route.failures, "rms_norm", "no compiler")
    model = fl.patch_model(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
    report = fl.explain(model)
    assert report.routes["affine_act"].startswith("by a measurement")
    assert report.routes["rms_norm"] == "plain PyTorch, no compiler"
    with fl.settings(route="reference"):
        assert report.routes["(all)"] == "reference, forced by settings"
        assert "forced by settings" in str(report)
    assert report.to_dict()["routes"] == report.routes
    assert fl.explain(torch.nn.Linear(2, 2)).routes == {}


def test_a_probe_that_fails_leaves_the_call_alone(machine, monkeypatch):
    def broken(op, device):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(_measure, "_measured", broken)
    assert _table.choose("affine_act", [pretended()], "triton") == "triton"
    assert "measuring failed (RuntimeError: no compiler)" in _table.explain("affine_act")


def test_a_cache_that_a_crash_spoiled_is_measured_again(machine):
    path = _measure.cache_path(torch.device("cuda", 0))
    path.write_text('{"affine_act": {"affine_act/tr')
    assert _table.choose("affine_act", [pretended()], "triton") == "reference"
    assert json.loads(path.read_text())["affine_act"]


@pytest.mark.parametrize("shipped", [None, {"affine_act/infer/fp32": [[4, "reference"]]}])
@pytest.mark.parametrize(
    "text",
    ["[1]", "[" * 100_000, *(json.dumps({"affine_act": {"affine_act/train/fp32": runs}}) for runs in NO_RUNS)]
    + ['{"affine_act": ' + routes + "}" for routes in ("5", "[]", "null", '"x"', "[" * 500 + "]" * 500)],
)  # fmt: skip
def test_what_cannot_be_read_as_a_table_is_measured_again(machine, monkeypatch, text, shipped):
    monkeypatch.setattr(_table, "_shipped", lambda name: shipped)
    monkeypatch.setattr(_table._shipped, "cache_clear", lambda: None, raising=False)
    path = _measure.cache_path(torch.device("cuda", 0))
    path.write_text(text)
    assert _table.choose("affine_act", [pretended()], "triton") == "reference"
    assert machine.measured == ["affine_act"]
    assert json.loads(path.read_text()) == {"affine_act": {"affine_act/train/fp32": [[10, "reference"]]}}


def test_beside_what_cannot_be_read_the_other_ops_stay(machine):
    path = _measure.cache_path(torch.device("cuda", 0))
    kept = {"layer_norm": {"layer_norm/train/fp32": [[12, "reference"]], "of a later version": 5}, "rms_norm": {}}
    path.write_text(json.dumps({"affine_act": 5, **kept}))
    for op in ("layer_norm", "rms_norm", "affine_act"):
        _table.choose(op, [pretended()], "triton")
    assert machine.measured == ["affine_act"]
    assert json.loads(path.read_text()) == {**kept, "affine_act": {"affine_act/train/fp32": [[10, "reference"]]}}


def test_a_thread_that_finds_another_measuring_does_not_wait(machine):
    with _measure._lock:
        assert _table.choose("affine_act", [pretended()], "triton") == "triton"
    assert machine.measured == []


def _hold(path, seconds, times):
    with _measure._file_lock(path):
        begin = time.monotonic()
        time.sleep(seconds)
        times.put((begin, time.monotonic()))


def test_one_process_at_a_time(tmp_path):
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    times = context.Queue()
    workers = [context.Process(target=_hold, args=(tmp_path / "x.lock", 0.2, times)) for _ in range(3)]
    for w in workers:
        w.start()
    spans = sorted(times.get(timeout=20) for _ in workers)
    for w in workers:
        w.join()
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_where_the_host_costs_more_eager_serves_what_hides_behind_it():
    assert _measure.crossover(50.0, 50.0, 1e6, 16) == 0
    assert _measure.crossover(51.0, 50.0, 1e6, 16) == 0  # within the margin
    assert _measure.crossover(100.0, 50.0, 1e6, 16) == 6_250_000 // _measure.SLACK
    assert _measure.bandwidth.__doc__


def test_an_op_that_holds_its_products_is_worth_a_kernel_sooner(monkeypatch):
    monkeypatch.setattr(_measure, "host_times", lambda *args: [1000.0, 500.0])
    monkeypatch.setattr(_measure, "bandwidth", lambda device: 1e6)
    found = {op: _measure.measure(op, torch.device("cpu")) for op in ("layer_norm", "mlp", "gated_mlp")}
    ((norm, _),) = found["layer_norm"]["layer_norm/train/fp32"]
    for op in ("mlp", "gated_mlp"):
        assert found[op][f"{op}/train/fp32"] == [[norm - 2, "reference"]], "a quarter of the elements"


@pytest.mark.parametrize("op", sorted(_measure.PROBES))
def test_probes_run_on_every_route_and_draw_no_random_number(op, monkeypatch):
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        states = torch.cuda.get_rng_state()
    else:
        device = torch.device("cpu")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
        monkeypatch.setattr(_measure, "bandwidth", lambda device: 1e6)
    monkeypatch.setattr(_measure, "ROUNDS", 1)
    monkeypatch.setattr(_measure, "CALLS", 2)
    before = torch.get_rng_state()
    with fl.settings(route="auto"):
        routes = _measure.measure(op, device)
    assert torch.equal(torch.get_rng_state(), before)
    if torch.cuda.is_available():
        assert torch.equal(torch.cuda.get_rng_state(), states)
    assert all(key.startswith(f"{op}/") for key in routes) and isinstance(_table.parse(op, routes), dict)
    assert (op, -1) not in _table._entries or not _table._entries[op, -1]


@pytest.mark.parametrize("op", ["dropout_layer_norm", "scale_residual"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_size_that_torch_jit_traces_is_in_no_table(op):
    layers = {"fc": nn.Linear(16, 16), "drop": nn.Dropout(0.3), "norm": nn.LayerNorm(16)}
    patched, x = fl.patch_model(block(post_norm, **layers)), torch.randn(3, 5, 16)
    with _table.in_force((op, -1), _table.REFERENCE):
        traced = torch.jit.trace(patched, x, check_trace=False)
    ys = []
    for m in (traced, patched):
        torch.manual_seed(0)
        ys.append(m(x))
    torch.testing.assert_close(*ys)


def test_a_traced_value_is_asked_nothing():
    graph = torch.fx.symbolic_trace(lambda x: affine_act(x, 2.0, 1.0)).graph
    assert [n.target for n in graph.nodes if n.op == "call_method"] == []


@pytest.mark.skipif(not kernels.interpreted() or torch.cuda.is_available(), reason="a kernel's route, on the CPU")
def test_an_op_takes_the_route_of_the_table(monkeypatch):
    taken = []
    pick = _route.pick
    monkeypatch.setattr(_route, "pick", lambda *a, **k: taken.append(pick(*a, **k)) or taken[-1])
    x = torch.randn(4, 8, requires_grad=True)
    with fl.settings(route="auto"):
        with _table.in_force(("affine_act", -1), _table.REFERENCE):
            small = affine_act(x, 2.0, 1.0)
        fused = affine_act(x, 2.0, 1.0)
    assert [route for route, _ in taken] == ["reference", "triton"]
    torch.testing.assert_close(small, fused)
