"""What local tracing sees, what it leaves alone, and what it refuses rather than guess (the traps of plain fx)."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedlayers as fl
from fusedlayers.patch import trace
from fusedlayers.patch.trace import GIVEN, NONE


def traced(module: nn.Module) -> list[trace.Trace]:
    return trace.traces(module, type(module))


def refusals(module: nn.Module) -> set[str | None]:
    return {t.refused for t in traced(module)}


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)


def container(forward, **attributes):
    """A `Base` whose class has this forward."""
    module = type("Container", (Base,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def targets(t: trace.Trace) -> list[object]:
    return [n.target for n in t.graph.nodes if n.op not in ("placeholder", "output")]


def test_children_are_leaves_and_nothing_runs():
    module = container(lambda self, x: self.bn(self.fc(x)))
    ran = []
    module.fc.register_forward_hook(lambda *a: ran.append("fc"))
    assert [targets(t) for t in traced(module)] == [["fc", "bn"], ["fc", "bn"]]
    assert not ran and module.bn.num_batches_tracked == 0


def test_both_modes_are_traced():
    def forward(self, x):
        return self.bn(x) if self.training else self.fc(x)

    module = container(forward)
    assert [(t.training, targets(t)) for t in traced(module)] == [(True, ["bn"]), (False, ["fc"])]
    assert module.training


def test_forms_of_call_where_arguments_are_compared_with_none():
    def forward(self, x, mask=None):
        if mask is None:
            return self.fc(x)
        return self.bn(x)

    found = {str(t.form["mask"]): targets(t) for t in traced(container(forward)) if t.training}
    assert found == {NONE: ["fc"], GIVEN: ["bn"]}


def test_forms_of_call_where_a_setting_may_stand_in_for_an_argument():
    """Fails where the argument is only told from None if nothing is ever assigned to its name."""

    def forward(self, x, mask=None):
        if self.flag:
            mask = self.flag
        if mask is None:
            return self.fc(x)
        return self.bn(x)

    found = {str(t.form["mask"]): targets(t) for t in traced(container(forward, flag=False)) if t.training}
    assert found == {NONE: ["fc"], GIVEN: ["bn"]}


def test_forms_of_call_where_a_flag_is_tested():
    def forward(self, x, deep=False):
        return self.bn(self.fc(x)) if deep else self.fc(x)

    found = {t.form["deep"].value: len(targets(t)) for t in traced(container(forward)) if t.training}
    assert found == {True: 2, False: 1}


def test_isinstance_is_asked_of_the_call_not_of_the_proxy():
    def forward(self, x):
        if isinstance(x, torch.Tensor):
            return self.fc(x)
        return self.bn(torch.cat(x, 1))

    found = [(str(t.form["x"]), len(targets(t))) for t in traced(container(forward)) if t.training]
    assert found == [("is a tensor", 1), ("is a list", 2)]


def test_a_none_test_of_a_computed_value_is_refused():
    def forward(self, x):
        y = self.fc(x)
        if y is not None:
            y = self.bn(y)
        return y

    assert refusals(container(forward)) == {"forward compares a computed value, y, with None"}


def test_a_cast_that_depends_on_a_dtype_is_refused_not_dropped():
    def forward(self, x):
        if isinstance(self.fc.weight, torch.Tensor) and x.dtype != self.fc.weight.dtype:
            x = x.to(self.fc.weight.dtype)
        return self.fc(x)

    assert refusals(container(forward)) == {"forward branches on a value"}


def test_random_constants_are_refused_and_generators_stay():
    def forward(self, x):
        return self.fc(x) * torch.rand(1)

    def layerdrop(self, x):
        return x if self.training and torch.rand([]) < 0.5 else self.fc(x)

    def python(self, x):
        return self.fc(x) * random.random()

    modules = [container(function) for function in (forward, layerdrop, python)]
    before, python_before = torch.get_rng_state(), random.getstate()
    for module in modules:
        assert None not in {t.refused for t in traced(module) if t.training}
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == python_before


def test_no_constant_is_planted_on_the_module():
    def forward(self, x):
        return self.fc(x) + torch.ones(4)

    module = container(forward)
    before = set(vars(module)), set(module._buffers)
    assert None not in refusals(module)
    assert (set(vars(module)), set(module._buffers)) == before


def test_the_real_module_is_not_touched():
    def counts(self, x):
        self.calls += 1
        return self.fc(x)

    def keeps(self, x):
        self.seen.append(x)
        return self.fc(x)

    module = container(counts, calls=0)
    assert refusals(module) == {"forward sets .calls"} and module.calls == 0
    module = container(keeps, seen=[])
    traced(module)
    assert module.seen == []


def test_a_list_a_forward_fills_is_refused():
    def keeps(self, x):
        self.seen.append(x)
        return self.fc(x)

    assert None not in refusals(container(keeps, seen=[]))


def test_dict_subclass_outputs_are_refused():
    class Output(dict):
        """As transformers' models return."""

    @dataclass
    class Data:
        y: object

    assert refusals(container(lambda self, x: Output(y=self.fc(x)))) == {"forward makes a Output"}
    assert refusals(container(lambda self, x: Data(self.fc(x)))) == {"forward makes a Data"}


def test_a_child_named_self():
    def forward(self, x):
        return self.self(x)

    module = container(forward)
    module.add_module("self", nn.Linear(4, 4))
    assert refusals(module) == {None}


def test_augmented_assignment_stays_in_place():
    def forward(self, x):
        y = self.fc(x)
        y += x
        return y

    def shifting(self, x):
        x <<= 1
        x >>= 1
        return self.fc(x)

    for given, expected in ((forward, ["iadd"]), (shifting, ["ilshift", "irshift"])):
        nodes = traced(container(given))[0].graph.nodes
        assert [n.target.__name__ for n in nodes if n.op == "call_function"] == expected


def test_buffers_and_parameters_are_values():
    def forward(self, x):
        return self.fc(x) * self.scale + self.offset

    module = container(forward)
    module.register_buffer("scale", torch.ones(4))
    module.offset = nn.Parameter(torch.zeros(4))
    assert refusals(module) == {None}
    assert {"scale", "offset"} <= set(targets(traced(module)[0]))


def test_reads_are_recorded():
    def forward(self, x):
        x = self.fc(x) if self.width > 3 else x
        return x if self.extra is None else self.extra(x)

    module = container(forward, width=4, extra=None)
    reads = {(r.name, r.kind, repr(r.value)) for r in traced(module)[0].reads.values()}
    assert {("width", "value", "4"), ("extra", "value", "None")} <= reads


def test_state_of_the_process_is_refused():
    def grad(self, x):
        return self.fc(x) if torch.is_grad_enabled() else x

    def autocast(self, x):
        return self.fc(x) if torch.is_autocast_enabled() else x

    assert refusals(container(grad)) == {"forward asks is_grad_enabled()"}
    assert refusals(container(autocast)) == {"forward asks is_autocast_enabled()"}


def test_tensors_outside_parameters_and_objects_are_refused():
    class Config:
        scale = 2.0

    assert "tensor" in refusals(container(lambda self, x: self.fc(x) * self.t, t=torch.ones(4))).pop()
    assert "Config" in refusals(container(lambda self, x: self.fc(x) * self.c.scale, c=Config())).pop()


def test_unknown_kwargs_are_passed_on_unread():
    def passes(self, x, **kwargs):
        return self.fc(x, **kwargs)

    def reads(self, x, **kwargs):
        return self.fc(x) * kwargs.get("scale", 1.0)

    assert traced(container(passes))[0].form == {}
    assert traced(container(reads))[0].form == {"kwargs": "is empty"}


def scaled(x, **kwargs):
    return x * kwargs.get("scale", 1.0)


def test_unknown_kwargs_are_passed_to_children_only():
    """A function may know some of them by name."""

    class Own(Base):
        def forward(self, x, **kwargs):
            return self.fc(x) * kwargs.get("scale", 1.0)

        def scaling(self, x, scale=1.0, **others):
            return self.fc(x) * scale

    def by_super(self, x, **kwargs):
        return Own.forward(self, x, **kwargs)

    def by_method(self, x, **kwargs):
        return self.scaling(x, **kwargs)

    def by_function(self, x, **kwargs):
        return scaled(self.fc(x), **kwargs)

    for forward, name in ((by_super, "forward"), (by_method, "scaling"), (by_function, "scaled")):
        module = type("Container", (Own,), {"forward": forward})()
        assert refusals(module) == {f"forward passes **kwargs to {name}"}


def test_control_flow_on_values_is_refused():
    assert refusals(container(lambda self, x: self.fc(x) if x.sum() > 0 else x)) == {"forward branches on a value"}
    assert None not in refusals(container(lambda self, x: self.fc(x.view(*x.shape))))


def test_helpers_are_looked_into_only_when_called():
    assert refusals(container(_uses_helper, deep=False)) == {None}
    assert refusals(container(_uses_helper, deep=True)) == {"forward asks is_grad_enabled()"}


def _helper(x):
    return x if torch.is_grad_enabled() else -x


def _uses_helper(self, x):
    return _helper(self.fc(x)) if self.deep else self.fc(x)


def test_modules_in_a_list_are_leaves_and_the_list_is_guarded():
    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x))
        return x

    module = container(forward)
    module.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    t = traced(module)[0]
    assert [x for x in targets(t) if isinstance(x, str)] == ["layers.0", "layers.1"]
    assert (("layers",), "_modules", "keys") in t.reads


def test_other_threads_keep_running_during_a_trace():
    """Plain fx replaces nn.Module.__call__ for the whole process while it traces."""
    layer, x, stop, wrong = nn.Linear(4, 4), torch.randn(2, 4), threading.Event(), []
    want = layer(x)

    def work():
        while not stop.is_set():
            if not torch.equal(layer(x), want):
                wrong.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    call, getattribute = nn.Module.__call__, nn.Module.__getattr__

    def forward(self, x):
        assert nn.Module.__call__ == call and nn.Module.__getattr__ == getattribute
        return self.fc(x)

    try:
        for _ in range(50):
            assert refusals(container(forward)) == {None}
    finally:
        stop.set()
        thread.join()
    assert not wrong


@pytest.mark.parametrize("wrap", [torch.no_grad(), torch.inference_mode()])
def test_decorators_are_taken_off_and_put_back(wrap):
    module = container(wrap(lambda self, x: self.fc(x)))
    forward = trace.forward_of(type(module))
    assert len(forward.decorators) == 1 and refusals(module) == {None}
    again = forward.decorate(lambda self, x: self.fc(x) + 1)
    assert not again(module, torch.randn(2, 4)).requires_grad


# questions and side effects that symbolic values would answer or lose without a trace


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


SEEN: list = []


def _function(self, x):
    return Doubled.apply(self.fc(x))


def _no_grad(self, x):
    with torch.no_grad():
        return self.fc(x)


def _autocast(self, x):
    with torch.autocast("cpu", enabled=False):
        return self.fc(x)


def _handler(self, x):
    try:
        return self.fc(x) if x.sum() > 0 else x
    except Exception:
        return x


def _checkpoint(self, x):
    return torch.utils.checkpoint.checkpoint(self.fc, x, use_reentrant=False)


def _checkpoint_of_a_lambda(self, x):
    return torch.utils.checkpoint.checkpoint(lambda y: self.fc(y), x, use_reentrant=False)


def _identity_of_arguments(self, x, y):
    return self.fc(x) if x is y else self.fc(y)


def _is_true(self, x, flag):
    return self.fc(x) if flag is True else x


def _hasattr(self, x):
    return self.fc(x.tensors if hasattr(x, "tensors") else x)


def _getattr_default(self, x):
    return self.fc(getattr(x, "tensors", x))


def _is_tensor(self, x):
    return self.fc(x) if torch.is_tensor(x) else x


def _exact_type(self, x):
    return self.fc(x) if type(x) is torch.Tensor else x


def _prints(self, x):
    print("called")
    return self.fc(x)


def _fills_a_global(self, x):
    SEEN.append(x)
    return self.fc(x)


def _sets_an_attribute(self, x):
    y = self.fc(x)
    y.tag = 1
    return y


def _writes_an_element(self, x):
    y = self.fc(x)
    y[0] = 0
    return y


@pytest.mark.parametrize(
    "forward",
    [
        _function, _no_grad, _autocast, _handler, _checkpoint, _checkpoint_of_a_lambda, _identity_of_arguments,
        _is_true, _hasattr, _getattr_default, _is_tensor, _exact_type, _prints, _fills_a_global, _sets_an_attribute,
        _writes_an_element,
    ],
    ids=lambda forward: forward.__name__.strip("_"),
)  # fmt: skip
def test_what_a_trace_cannot_see_is_refused(forward, capsys):
    assert None not in refusals(container(forward))
    assert not SEEN and capsys.readouterr().out == ""


def test_arguments_named_like_the_generated_code():
    def forward(self, x, _m=None):
        return self.fc(x)

    assert refusals(container(forward)) == {"an argument is named _m"}


class Branching(nn.Module):
    """Cannot be traced where it is gated; forwards of the others can."""

    def __init__(self, gated):
        super().__init__()
        self.fc, self.gated = nn.Linear(4, 4), gated

    def forward(self, x):
        if self.gated and x.sum() > 0:
            return x
        return self.fc(x).relu()


def test_modules_like_one_that_cannot_be_traced_are_not_tried_again(monkeypatch):
    """Fails where every layer of a deep model costs what the first does, or one of other settings counts as alike."""
    real, tried = trace._trace, []
    monkeypatch.setattr(trace, "_trace", lambda module, *args: tried.append(module.gated) or real(module, *args))
    found = fl.explain(nn.ModuleList(Branching(gated) for gated in (True, True, False, True, False)))
    assert tried.count(True) == 2 and tried.count(False) == 2  # in both modes
    assert [r.name for r in found.fused] == ["2.fc", "4.fc"]
    fl.explain(nn.ModuleList([Branching(True)]))
    assert tried.count(True) == 4  # another model may be otherwise


class Asks(nn.Module):
    """Cannot be traced where what it asks of a module below it is so."""

    def __init__(self, below, note=None):
        super().__init__()
        self.fc, self.below, self.note = nn.Linear(4, 4), below, note

    def forward(self, x):
        if self.below[0].p > 0 and x.sum() > 0:
            return x
        return self.fc(x).relu()


def circle():
    found = []
    found.append(found)
    return found


@pytest.mark.parametrize("note", [None, circle()], ids=["plain", "a list that holds itself"])
@pytest.mark.parametrize("good", [nn.Dropout(0.0), nn.AlphaDropout(0.0)], ids=str)
def test_a_setting_below_makes_another_module(note, good):
    """Fails where what one module was refused for is held against one of its class that can be traced."""
    odd = Asks(nn.ModuleList([nn.Dropout(0.5)]), note)
    found = fl.explain(nn.ModuleList([odd, Asks(nn.ModuleList([good]), note)]))
    assert [r.name for r in found.fused] == ["1.fc"], found


def test_an_attribute_changed_in_place_stays_so():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(3, 3), nn.ReLU()

        def forward(self, x):
            rows, columns = x.shape
            turned = x.T
            turned += columns
            return self.act(self.fc(x)).view(rows, -1)

    torch.manual_seed(0)
    model, x = Turned(), torch.randn(2, 3)
    xs = x.clone(), x.clone()
    want = model(xs[0])
    got = fl.patch_model(model, on_fallback="raise")(xs[1])
    assert len(fl.explain(model).fused) == 1
    assert torch.equal(got, want)
    assert torch.equal(xs[0], xs[1])
    assert not torch.equal(xs[1], x)
