"""The route table of a device, from a grid in which every op took its kernels at every size.

    python -m fusedlayers bench ops --grid --route triton --peers eager
    python benchmarks/route_table.py benchmarks/results/<device>/grid-triton.json

Where the kernels lose to eager's own ops by device time, tensors of that size and smaller ones take eager's ops from
then on; the step between a size that loses and the next one that wins is cut in the middle. What the host makes of a
size is not in the table: each machine measures its own. Ops whose products a library does are left out: this grid made
them take the kernel's.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fusedlayers.bench.peers import ratio  # noqa: E402
from fusedlayers.ops import _table  # noqa: E402

LEAST = 0.98
LIBRARY = ("linear_act", "mlp", "gated_mlp")


def losses(run: dict) -> dict[str, dict[int, float]]:
    """By `op/direction/dtype`: the worst ratio to eager at each size in bits."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for r in run["results"]:
        op, dtype = r["case"].split("/")[0].partition("+")[0], r["case"].rpartition("/")[2]
        found_ratio = ratio(r, "eager", what="device_ms", pick="best")
        if math.isnan(found_ratio) or op in LIBRARY:
            continue
        key = f"{op}/{_table.TRAIN if 'backward' in r['direction'] else _table.INFER}/{dtype}"
        bits = r["elements"].bit_length()
        found[key][bits] = min(found[key].get(bits, math.inf), found_ratio)
    return found


def runs(worst: dict[int, float]) -> list[list]:
    """Runs of one key: eager's ops up to the size where the kernels begin to win for good."""
    losing = [bits for bits, r in worst.items() if r < LEAST]
    if not losing:
        return []
    last = max(losing)
    winning = [bits for bits in worst if bits > last]
    return [[(last + min(winning)) // 2 if winning else last, "reference"]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", type=Path)
    parser.add_argument("--out", type=Path, help="default: the table shipped for the device")
    args = parser.parse_args()
    run = json.loads(args.grid.read_text())
    routes = {key: made for key, worst in sorted(losses(run).items()) if (made := runs(worst))}
    # half precision is half precision: what was measured in bf16 holds for fp16
    routes |= {k.replace("/bf16", "/fp16"): v for k, v in routes.items() if k.endswith("/bf16")}
    name = run["hardware"]["name"]
    table = {"device": name, "date": run["date"], "versions": run["versions"], "routes": dict(sorted(routes.items()))}
    path = args.out or _table.TABLES / f"{_table.slug(name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")
    for key, made in table["routes"].items():
        print(f"{key}: eager's ops up to {made[0][0]} bits of elements")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
