"""The Lightning callback: when it patches, and that nothing in a run or its checkpoints tells it was there."""

from __future__ import annotations

import importlib
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fusedlayers as fl

PACKAGES = [
    name for name in ("lightning.pytorch", "pytorch_lightning") if importlib.util.find_spec(name.partition(".")[0])
]
pl = pytest.importorskip(PACKAGES[0] if PACKAGES else "lightning.pytorch", reason="PyTorch Lightning is not installed")
for package in PACKAGES:
    importlib.import_module(package)
callbacks = importlib.import_module("fusedlayers.lightning")
FusedLayers = callbacks.FusedLayers

pytestmark = pytest.mark.filterwarnings("ignore")


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)
    )


def make(package: str, built_in: str = "__init__") -> type:
    """A module class that builds its layers in `built_in`, and notes what was fused when its optimizer was made."""
    base = importlib.import_module(package).LightningModule

    class Tiny(base):
        def __init__(self, lr: float = 0.01):
            super().__init__()
            self.save_hyperparameters()
            self.net = net() if built_in == "__init__" else None

        def setup(self, stage):
            if built_in == "setup" and self.net is None:
                self.net = net()

        def configure_model(self):
            if built_in == "configure_model" and self.net is None:
                self.net = net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            x, y = batch
            loss = nn.functional.cross_entropy(self(x), y)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, index):
            self.log("val", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def test_step(self, batch, index):
            self.log("test", nn.functional.cross_entropy(self(batch[0]), batch[1]))

        def configure_optimizers(self):
            self.seen = fused(self)
            return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)

    return Tiny


def fused(model: nn.Module) -> list[str]:
    """Names of the fused sites of a patched model; none of an unpatched one."""
    report = fl.explain(model)
    return sorted(r.name for r in report.fused) if report.patched else []


def data() -> DataLoader:
    g = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(32, 6, generator=g), torch.randint(3, (32,), generator=g)), 8)


def trainer(folder, *more, package: str = PACKAGES[0], epochs: int = 2, **options):
    library = importlib.import_module(package)
    saver = importlib.import_module(f"{package}.callbacks").ModelCheckpoint(dirpath=folder, save_last=True)
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, **options}
    return library.Trainer(max_epochs=epochs, callbacks=[saver, *more], enable_model_summary=False, **options)


def seeded(cls: type, **kwargs):
    torch.manual_seed(0)
    return cls(**kwargs)


def load(path) -> dict:
    return torch.load(path, weights_only=False)


def same(a, b) -> bool:
    """Equal to the last bit, through dicts, lists and tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("built_in", ["__init__", "setup", "configure_model"])
def test_patches_before_the_optimizers_wherever_layers_are_built(package, built_in, tmp_path):
    module = seeded(make(package, built_in))
    trainer(tmp_path, FusedLayers(), package=package, epochs=1).fit(module, data())
    assert module.seen and module.seen == fused(module)
    assert "configure_model" not in vars(module)


def test_a_single_callback_needs_no_list(tmp_path):
    for package in PACKAGES:
        module, library = seeded(make(package)), importlib.import_module(package)
        library.Trainer(
            fast_dev_run=1, accelerator="cpu", logger=False, callbacks=FusedLayers(), enable_progress_bar=False
        ).fit(module, data())
        assert module.seen


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_whole_run_equals_the_unpatched_run(precision, tmp_path):
    """fit, validate, test, resume and load_from_checkpoint, each with and without the callback."""
    cls, results = make(PACKAGES[0]), {}
    for name, more in (("plain", []), ("fused", [FusedLayers(report=False)])):
        folder, options = tmp_path / name, {"precision": precision, "gradient_clip_val": 0.5}
        module, run = seeded(cls), trainer(folder, *more, **options)
        run.fit(module, data(), data())
        scores = run.validate(module, data(), verbose=False) + run.test(module, data(), verbose=False)
        resumed, run = seeded(cls), trainer(folder / "resumed", *more, epochs=4, **options)
        run.fit(resumed, data(), data(), ckpt_path=folder / "last.ckpt")
        loaded = cls.load_from_checkpoint(folder / "resumed" / "last.ckpt")
        assert same(dict(loaded.state_dict()), dict(resumed.state_dict()))
        assert bool(fused(module)) == bool(fused(resumed)) == bool(more)
        assert not fl.explain(module).fallbacks, "patching again for another stage must find nothing left to do"
        assert not fused(loaded)
        results[name] = (scores, load(folder / "last.ckpt"), load(folder / "resumed" / "last.ckpt"))
    (scores, first, last), (scores2, first2, last2) = results.values()
    assert scores == scores2
    for a, b in ((first, first2), (last, last2)):
        assert list(a) == list(b)
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "epoch", "global_step"):
            assert same(a[key], b[key]), key
        assert [k.partition("{")[0] for k in a["callbacks"]] == [k.partition("{")[0] for k in b["callbacks"]]


@pytest.mark.parametrize("first", ["plain", "fused"])
def test_resuming_goes_both_ways(first, tmp_path):
    cls = make(PACKAGES[0])
    more = {"plain": [], "fused": [FusedLayers(report=False)]}
    trainer(tmp_path / "a", *more[first]).fit(seeded(cls), data())
    ends = []
    for name, extra in more.items():
        module = seeded(cls)
        trainer(tmp_path / name, *extra, epochs=4).fit(module, data(), ckpt_path=tmp_path / "a" / "last.ckpt")
        ends.append(dict(module.state_dict()))
    assert same(*ends)


def test_patching_in_configure_model_by_hand(tmp_path):
    class Tiny(make(PACKAGES[0], "configure_model")):
        def configure_model(self):
            super().configure_model()
            fl.patch_model(self.net)

    module = seeded(Tiny)
    trainer(tmp_path).fit(module, data())
    assert module.seen
    loaded = Tiny.load_from_checkpoint(tmp_path / "last.ckpt")
    assert same(dict(loaded.state_dict()), dict(module.state_dict()))


class Holder(pl.LightningModule):
    """Keeps a module among its hyperparameters, as is often done, though Lightning advises against it."""

    def __init__(self, net):
        super().__init__()
        self.save_hyperparameters()
        self.net = net

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_among_the_hyperparameters_is_saved_as_it_was(tmp_path):
    module = Holder(net())
    trainer(tmp_path, FusedLayers(report=False)).fit(module, data())
    saved = load(tmp_path / "last.ckpt")["hyper_parameters"]["net"]
    assert type(saved) is nn.Sequential and not fused(saved)
    assert fused(module), "saving must not unpatch the model that trains"
    assert b"fusedlayers" not in pickle.dumps(saved)


def test_logs_the_report_once(tmp_path):
    logger, lines = logging.getLogger(PACKAGES[0]), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    try:
        module, callback = seeded(make(PACKAGES[0])), FusedLayers()
        run = trainer(tmp_path, callback)
        run.fit(module, data())
        run.test(module, data(), verbose=False)
        trainer(tmp_path / "quiet", FusedLayers(report=False)).fit(seeded(make(PACKAGES[0])), data())
    finally:
        logger.removeHandler(handler)
    reports = [line for line in lines if line == str(fl.explain(module))]
    assert len(reports) == 1 and "net.0" in reports[0]


def test_filters_reach_patch_model(tmp_path):
    module = seeded(make(PACKAGES[0]))
    trainer(tmp_path, FusedLayers(exclude="net.3", report=False), epochs=1).fit(module, data())
    everything = fused(fl.patch_model(seeded(make(PACKAGES[0]))))
    assert "net.3" in everything and module.seen == [name for name in everything if name != "net.3"]
    with pytest.raises(ValueError, match="nett"):
        trainer(tmp_path / "typo", FusedLayers(exclude="nett.*", report=False)).fit(seeded(make(PACKAGES[0])), data())


def test_a_failed_run_leaves_no_trace(tmp_path):
    class Broken(make(PACKAGES[0])):
        def setup(self, stage):
            raise RuntimeError("no data")

    module = seeded(Broken)
    with pytest.raises(RuntimeError, match="no data"):
        trainer(tmp_path, FusedLayers()).fit(module, data())
    assert "configure_model" not in vars(module)


def test_importing_fusedlayers_imports_no_lightning():
    code = (
        "import sys, fusedlayers\n"
        "assert not {'lightning', 'pytorch_lightning'} & set(sys.modules), 'imported too early'\n"
        "from fusedlayers.lightning import FusedLayers\n"
        "print(FusedLayers.__mro__[1].__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(PACKAGES[0])


def test_without_lightning_the_import_says_what_to_install():
    code = (
        "import sys\n"
        "sys.modules.update({'lightning': None, 'lightning.pytorch': None, 'pytorch_lightning': None})\n"
        "import fusedlayers\n"
        "import fusedlayers.lightning"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'fusedlayers[lightning]'" in done.stderr
