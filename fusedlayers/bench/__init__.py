"""`python -m fusedlayers bench {ops,layers,models}`: the library against its peers, in one run, on this machine."""

from .cli import main

__all__ = ["main"]
