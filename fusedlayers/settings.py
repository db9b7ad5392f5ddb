"""What a user may force, process-wide: the route, dropout's masks, measuring, and where measurements are cached."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

ROUTES = ("auto", "reference", "library", "triton")
DROPOUTS = ("eager", "fast")
_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}


def _default_cache() -> str:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return str((Path(base) if base else Path.home() / ".cache") / "fusedlayers")
    except RuntimeError:  # no home directory, as for a user whom only a container's number names
        pass
    try:
        return str(Path(tempfile.gettempdir()) / "fusedlayers")
    except OSError:  # nor anywhere to write: nothing will be kept
        return os.path.join(os.sep, "tmp", "fusedlayers")


class _Restore:
    """Puts the previous values back when the `with` block ends."""

    def __init__(self, settings: Settings, before: dict[str, Any]):
        self._settings, self._before = settings, before

    def __enter__(self) -> Settings:
        return self._settings

    def __exit__(self, *exc: object) -> None:
        self._settings.__dict__.update(self._before)


class Settings:
    """`fl.settings(route="reference")` sets; as a context manager it restores; `fl.settings.route` reads.

    Process-wide, like `torch.backends`, so that the threads that run backward see it. Environment variables, where not
    empty, give the defaults: `FUSEDLAYERS_ROUTE`, `FUSEDLAYERS_DROPOUT`, `FUSEDLAYERS_AUTOTUNE`, `FUSEDLAYERS_CACHE`.

    Attributes:
        route: `"auto"`, `"reference"` (plain PyTorch), `"library"` (the vendor's products, what follows them in its
            epilogue or in one pass; ops without a product: plain PyTorch) or `"triton"`, which raises where it cannot
            run.
        dropout: `"eager"` draws the very mask `F.dropout` would have drawn; `"fast"` may draw its own.
        autotune: whether a route may be chosen by measuring once on this device.
        cache: folder where measurements are kept; a leading `~` is the home directory.
    """

    route: str
    dropout: str
    autotune: bool
    cache: str

    def __init__(self) -> None:
        env = os.environ
        self.__dict__.update(route="auto", dropout="eager", autotune=True, cache=_default_cache())
        for name, read in (("route", str), ("dropout", str), ("autotune", _switch), ("cache", str)):
            variable = f"FUSEDLAYERS_{name.upper()}"
            if env.get(variable):  # empty is how many say that it is not set
                try:
                    self._set(**{name: read(env[variable])})
                except ValueError as error:
                    raise ValueError(f"environment variable {variable}: {error}") from None

    def __call__(self, **values: Any) -> _Restore:
        before = {name: self.__dict__.get(name) for name in values}
        self._set(**values)
        return _Restore(self, before)

    def __setattr__(self, name: str, value: Any) -> None:
        self._set(**{name: value})

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            if name == "route":
                _one_of(name, value, ROUTES)
            elif name == "dropout":
                _one_of(name, value, DROPOUTS)
            elif name == "autotune":
                _one_of(name, value, (True, False))
            elif name not in self.__dict__:
                raise TypeError(
                    f"settings() got an unknown setting {name!r} (known: {', '.join(sorted(self.__dict__))})"
                )
        if "autotune" in values:
            values["autotune"] = bool(values["autotune"])
        if "cache" in values:
            values["cache"] = _folder(values["cache"])
        self.__dict__.update(values)

    def __repr__(self) -> str:
        return "settings(" + ", ".join(f"{k}={v!r}" for k, v in self.__dict__.items()) + ")"


def _switch(value: str) -> bool:
    _one_of("autotune", value.lower(), tuple(_SWITCH))
    return _SWITCH[value.lower()]


def _folder(value: Any) -> str:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError(f"cache must be a str or os.PathLike, not {type(value).__name__}")
    if not path:
        raise ValueError(f"cache must be the path of a folder, not {value!r}")
    return os.path.expanduser(path)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


settings = Settings()
