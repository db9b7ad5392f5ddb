"""Patching as a Lightning callback: `Trainer(callbacks=[FusedLayers()])`, with `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from typing import Any

from torch import nn

from .patch import explain, patch_model, unpatch_model

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """Lightning's `Callback`: of each package that is imported already, else of the first that can be."""
    names = [name for name in _PACKAGES if sys.modules.get(name) is not None]
    for name in names or _PACKAGES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        names = names or [name]
    if not names:
        raise ModuleNotFoundError(
            "fusedlayers.lightning needs PyTorch Lightning: pip install 'fusedlayers[lightning]'", name="lightning"
        )
    return tuple(sys.modules[name].Callback for name in names)


class FusedLayers(*_callback_classes()):  # type: ignore[misc]
    """Patches the `LightningModule` before its optimizers are built, whether its layers come from `__init__`, `setup`
    or `configure_model`.

    Parameters, their order and the keys of `state_dict` stay as they are, so checkpoints load with the callback or
    without it, in either direction. The model stays patched after training; `fl.unpatch_model` restores it.

    Args:
        include, exclude, rules, plan, on_fallback: as in `fl.patch_model`; names start at the `LightningModule`.
        report: whether the first rank logs `fl.explain` of the patched module, once.

    >>> trainer = Trainer(callbacks=[FusedLayers(exclude="head")])  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        include: Any = None,
        exclude: Any = None,
        rules: Any = None,
        plan: Any = None,
        on_fallback: str = "warn",
        report: bool = True,
    ):
        super().__init__()
        self.options = {
            "include": include,
            "exclude": exclude,
            "rules": rules,
            "plan": plan,
            "on_fallback": on_fallback,
        }
        self.report = report

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Arranges for patching at the last moment at which no optimizer and no wrapper exists yet.

        Lightning calls this before the module's own `setup` and `configure_model`, either of which may add layers,
        and no callback between those and the optimizers: so the module's `configure_model` is extended for one call.
        """

        def configure_model() -> None:
            self._forget(pl_module)
            pl_module.configure_model()
            self._patch(trainer, pl_module)

        pl_module.__dict__["configure_model"] = configure_model

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self._forget(pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Modules among the hyperparameters are stored as they were: loading them must not need this library."""
        for key in ("hyper_parameters", "datamodule_hyper_parameters"):
            for name, value in checkpoint.get(key, {}).items():
                if isinstance(value, nn.Module):
                    checkpoint[key][name] = unpatch_model(copy.deepcopy(value))

    @staticmethod
    def _forget(pl_module: nn.Module) -> None:
        pl_module.__dict__.pop("configure_model", None)

    def _patch(self, trainer: Any, pl_module: nn.Module) -> None:
        patch_model(pl_module, **self.options)
        if self.report and trainer.is_global_zero:
            self.report = False
            package = type(trainer).__module__.partition(".trainer")[0]
            logging.getLogger(package).info("%s", explain(pl_module))
