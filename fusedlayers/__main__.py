"""Command line: `python -m fusedlayers explain|verify|doctor|bench`.

Exits with 0, with 1 when a check failed, with 2 when it could not be made.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

import fusedlayers as fl

OK, FAILED, UNUSABLE = 0, 1, 2
TOKENS = 100
"""Integer inputs are drawn below this: token ids that any embedding has."""


class CommandError(Exception):
    """What the user named cannot be used, and why."""


def build(spec: str) -> nn.Module:
    """The model that `module:callable` gives; literal arguments may follow, as in `timm:create_model('resnet18')`."""
    module_name, _, expression = spec.partition(":")
    if not module_name or not expression:
        raise CommandError(f"MODEL must be module:callable, such as torchvision.models:resnet50, not {spec!r}")
    path, args, kwargs = _parse_call(expression)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        made = importlib.import_module(module_name)
        for name in path:
            made = getattr(made, name)
        if not isinstance(made, nn.Module):
            made = made(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        raise CommandError(f"cannot build {spec!r}: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise CommandError(f"{spec!r} gives a {type(made).__name__}, not a torch.nn.Module")
    return made


def _parse_call(expression: str) -> tuple[list[str], list[Any], dict[str, Any]]:
    """Dotted name and literal arguments of `a.b` or `a.b(1, c=2)`."""
    try:
        node = ast.parse(expression, mode="eval").body
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        if isinstance(node, ast.Call):
            args = [ast.literal_eval(arg) for arg in node.args]
            kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
            node = node.func
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name):
            return [node.id, *path], args, kwargs
    except (SyntaxError, ValueError):
        pass
    raise CommandError(f"{expression!r} is not a name, or a call of one with literal arguments")


def read_input(spec: str, device: str) -> Tensor:
    """A random input from `2x3x224x224`, or `4x16:int64` for another dtype than float32."""
    sizes, _, name = spec.partition(":")
    dtype = getattr(torch, name or "float32", None)
    try:
        shape = [int(size) for size in sizes.split("x")]
    except ValueError:
        shape = [-1]
    if min(shape) < 0 or not isinstance(dtype, torch.dtype):
        raise CommandError(f"--input takes sizes and perhaps a dtype, such as 2x3x224x224 or 4x16:int64, not {spec!r}")
    if dtype.is_floating_point:
        return torch.randn(shape).to(device, dtype)
    return torch.randint(2 if dtype == torch.bool else TOKENS, shape).to(device, dtype)


def run_explain(args: argparse.Namespace) -> int:
    report = fl.explain(build(args.model))
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return OK


def run_verify(args: argparse.Namespace) -> int:
    torch.manual_seed(args.seed)
    model = build(args.model)
    try:
        torch.empty(0, device=args.device)
    except Exception as error:  # no such device, or none of it here
        raise CommandError(f"--device {args.device} cannot be used: {str(error).splitlines()[0]}") from error
    model.to(args.device).train(not args.eval)
    inputs = [read_input(spec, args.device) for spec in args.input]
    fl.patch_model(model)
    try:
        report = fl.verify(model, *inputs, backward=not args.forward_only)
    except Exception as error:
        given = ", ".join(args.input) or "none: name them with --input 2x3x224x224"
        raise CommandError(f"the model does not run on its inputs ({given}): {error}") from error
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return OK if report.ok else FAILED


def run_doctor(args: argparse.Namespace) -> int:
    from . import doctor

    report = doctor.examine()
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return OK if report.ok else FAILED


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m fusedlayers", description="Fused drop-in layers for PyTorch models.")
    top.add_argument("--version", action="version", version=f"fusedlayers {fl.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="{explain,verify,doctor,bench}")

    def command(name: str, run: Any, about: str, model: bool = True) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=about)
        if model:
            example = "torchvision.models:resnet50 or \"timm:create_model('vit_tiny_patch16_224')\""
            made.add_argument("model", metavar="MODEL", help=f"module:callable, such as {example}")
        made.add_argument("--json", action="store_true", help="print JSON")
        made.set_defaults(run=run)
        return made

    explain = command("explain", run_explain, "Show what patching would fuse in a model, what not, and why.")
    explain.add_argument("--input", action="append", default=[], metavar="SIZES", help="not needed; nothing is run")
    verify = command("verify", run_verify, "Run a model fused and original on random inputs, and compare.")
    verify.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SIZES",
        help="one tensor, such as 2x3x224x224 or 4x16:int64; repeat",
    )
    verify.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    verify.add_argument("--eval", action="store_true", help="compare in eval mode instead of training mode")
    verify.add_argument("--forward-only", action="store_true", help="compare no gradients")
    verify.add_argument("--seed", type=int, default=0, help="of weights, inputs and dropout (default: %(default)s)")
    command("doctor", run_doctor, "Check what runs here: devices, Triton, compiler, routes, settings.", model=False)
    commands.add_parser("bench", help="Measure ops, layers and models against their peers.", add_help=False)
    return top


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["bench"]:
            return _bench(argv[1:])
        args = parser().parse_args(argv)
        return args.run(args)
    except CommandError as error:
        print(f"fusedlayers: {error}", file=sys.stderr)
        return UNUSABLE


def _bench(argv: list[str]) -> int:
    try:
        bench = importlib.import_module("fusedlayers.bench")
    except ModuleNotFoundError as error:
        raise CommandError(f"bench needs {error.name}: pip install 'fusedlayers[bench]'") from error
    try:
        return bench.main(argv) or OK
    except SystemExit as stop:
        if isinstance(stop.code, str):  # nothing could be run: no check has failed
            raise CommandError(stop.code) from stop
        raise


if __name__ == "__main__":
    sys.exit(main())
