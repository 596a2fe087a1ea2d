"""`routing` with torch and numpy alone: a process in which nothing else can be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROGRAM = '''
import importlib, json, pkgutil, sys
import numpy, torch
import torch.distributed

known = {name.partition(".")[0] for name in sys.modules}
asked = []

class Closed:
    """Finds nothing but the standard library, torch, numpy, what these have loaded, and routing."""

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ("routing", "tests") or top in sys.stdlib_module_names or top in known:
            return None
        asked.append(name)
        raise ModuleNotFoundError(f"no {name} here", name=name)

sys.meta_path.insert(0, Closed())
import routing

at_import = list(asked)
modules = [one.name for one in pkgutil.walk_packages(routing.__path__, "routing.")]
for name in modules:
    importlib.import_module(name)

from routing.layout.columns import Columns
from tests.unit.routing.toy_model import Toy, records
from routing.hf_context import replay

model, rows = Toy(), routing.Rows.packed(torch.tensor([0, 5, 8]))
ids = torch.randint(0, 64, rows.shape)
known_routes = records(rows, ids)
with replay(model, known_routes, ids, rows, max_local_flip_rate=1.0) as replayed:
    model(ids).sum().backward()
again = [routing.decode(routing.encode(one, "set")) for one in known_routes]
told = {
    "modules": len(modules),
    "at_import": at_import,
    "asked": sorted({name.partition(".")[0] for name in asked}),
    "matched": replayed.report.matched,
    "flips": routing.flips(known_routes[0], again[0]).token_layer_rate,
    "columns": Columns.contiguous(rows, 1, 2).index.tolist(),
}
print(json.dumps(told))
'''


def test_it_imports_and_works_with_torch_and_numpy_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["at_import"] == []
    # SGLang's answers are read faster where pybase64 is there.
    assert set(told["asked"]) <= {"pybase64"}
    assert told["modules"] > 20
    assert told["matched"] == (4 + 2) * 2
    assert told["flips"] == 0
    assert told["columns"] == [4, 5, 6, 7]
