"""`explain`: every site with its reason, coverage, and one line to read first."""

from __future__ import annotations

import json

import torch
from torch import nn

import fusedlayers as fl

from .models import MLP, network


def test_explain_changes_nothing():
    model = network()
    before = [(type(m), set(vars(m))) for m in model.modules()]
    fl.explain(model)
    assert [(type(m), set(vars(m))) for m in model.modules()] == before


def test_the_same_sites_before_and_after_patching():
    model = network()
    before = fl.explain(model)
    after = fl.explain(fl.patch_model(model))
    assert [r.modules for r in before.fused] == [r.modules for r in after.fused]
    assert before.counts == after.counts
    assert "would be fused" in before.summary() and "would be" not in after.summary()


def test_records():
    report = fl.explain(network())
    assert len(report) == len(list(report)) == len(report.fused) + len(report.reduced) + len(report.skipped)
    record = report.fused[1]
    assert (record.name, record.rule, record.modules, record.reason) == ("2.fc", "linear_act", ("2.fc", "2.act"), "")


def test_the_first_line_can_be_read():
    line = str(fl.explain(fl.patch_model(network()))).splitlines()[0]
    assert line.startswith("cpu float32: 5 sites fused (0/0 norms, 0/0 adds, 5/5 activations), 0 reduced, 0 skipped")
    assert line.endswith("next: fl.verify(model, x)")
    assert "dropout keeps eager's masks" in fl.explain(nn.Sequential(nn.Linear(2, 2), nn.Dropout())).summary()
    assert "nothing here can be fused" in fl.explain(nn.Sequential(nn.Conv2d(1, 1, 1))).summary()


def test_the_table_is_aligned():
    lines = str(fl.explain(network())).splitlines()[2:]
    starts = {line.index("linear_act") for line in lines[2:]}
    assert len(starts) == 1 and lines[0].index("rule") in starts


def test_to_dict_is_json():
    data = json.loads(json.dumps(fl.explain(fl.patch_model(network())).to_dict()))
    assert data["coverage"]["activation"] == {"fused": 5, "total": 5}
    assert data["fused"][0]["modules"] == ["0", "1"]


def test_every_unfused_activation_norm_and_add_has_a_reason():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act, self.pool = nn.Conv2d(3, 3, 1), nn.ReLU(), nn.MaxPool2d(1)

        def forward(self, x):
            return x + self.act(self.pool(self.conv(x)))

    report = fl.explain(Block(), rules=["linear_act"])
    reasons = {r.name: r.reason for r in report.skipped}
    assert reasons["act"] == "activation with nothing to fuse it with: follows pool (MaxPool2d)"
    assert reasons[""].startswith("residual with nothing to fuse it with: ") and len(reasons) == 2
    assert report.counts.total == {"activation": 1, "norm": 0, "residual": 1}


def test_what_several_forms_of_call_say_of_one_norm_counts_once():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.classifier = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Hardswish(), nn.Linear(4, 4))

        def forward(self, x, pre_logits: bool = False):
            if pre_logits:
                x = self.classifier[0](x)
                x = self.classifier[1](x)
                return self.classifier[2](x)
            return self.classifier(x)

    counts = fl.explain(fl.patch_model(Head())).counts
    assert counts.fused["norm"] <= counts.total["norm"] == 1


def test_a_container_that_cannot_be_traced_says_why():
    class Branches(MLP):
        def forward(self, x):
            return self.act(self.fc(x)) if x.sum() > 0 else x

    report = fl.explain(Branches())
    assert [(r.name, r.reason) for r in report.skipped] == [("act", "forward branches on a value")]


def test_what_is_fused_in_one_mode_alone_is_said():
    class Checks(MLP):
        def forward(self, x):
            x = self.act(self.fc(x))
            if self.training and not torch.isfinite(x).all():
                x = x.clamp(-1, 1)
            return x

    report = fl.explain(fl.patch_model(Checks()))
    assert [(r.status, r.rule, r.reason) for r in report.reduced] == [
        ("reduced", "linear_act", "in evaluation only: forward branches on a value")
    ]
    assert not report.fused


def test_the_names_of_what_a_rule_wants_are_said_once():
    Own = type("Own", (nn.LayerNorm,), {})
    report = fl.explain(nn.Sequential(Own(8), nn.Linear(8, 8)))
    (said,) = {r.reason for r in report.skipped if "not exactly a" in r.reason}
    wanted = said.rpartition("not exactly a ")[2].split(" or ")
    assert len(wanted) == len(set(wanted)) and "LayerNorm" in wanted


def test_a_form_of_call_beyond_those_that_are_traced():
    class Forms(MLP):
        def forward(self, x, a=False, b=False, c=False, d=False, e=False, f=False):
            x = self.act(self.fc(x))
            if not a:
                return x
            for asked in (b, c, d, e, f):
                if asked:
                    x = x + 1
            return x

    model = fl.patch_model(Forms(), on_fallback="ignore")
    model(torch.randn(2, 8), True, True, True, True, True, True)
    assert fl.explain(model).fallbacks == {"": {"forward has too many forms of call": 1}}


def test_a_long_reason_ends_with_a_word():
    class Raises(MLP):
        def forward(self, x):
            raise TypeError("this is not what anybody wants to hear of a forward, " * 4)

    (said,) = {r.reason for r in fl.explain(Raises()).skipped}
    assert said.endswith(" ...')") and "forward fails on symbolic values (TypeError: 'this is not" in said


def test_a_norm_fused_by_itself_counts_where_a_larger_pattern_failed():
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, a, b, c):
            x = a + b
            x += b
            x += c
            return self.norm(x)

    report = fl.explain(fl.patch_model(nn.Sequential(Norms())))
    assert [r.rule for r in report.fused] == ["lone_norm"] and report.counts.fused["norm"] == 1


def test_what_was_left_out_when_patching_is_said_on_the_patched_model():
    model = fl.patch_model(network(), exclude="3")
    assert ("3.0", "left out when the model was patched") in [(r.name, r.reason) for r in fl.explain(model).skipped]


def test_a_kernel_that_could_not_be_built_has_a_line(monkeypatch):
    from fusedlayers.ops import _route

    monkeypatch.setattr(_route, "failures", {"linear_act": "no C compiler"})
    report = fl.explain(network())
    assert str(report).splitlines()[-1] == "linear_act runs as plain PyTorch: no C compiler"
    assert report.to_dict()["failures"] == {"linear_act": "no C compiler"}
