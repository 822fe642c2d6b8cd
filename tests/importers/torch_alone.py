"""`test_torch_plans.four` in a process without JAX: `python -m tests.importers.torch_alone FOLDER CASE…`."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from tests.importers.test_torch_plans import four

if __name__ == "__main__":
    folder, *cases = sys.argv[1:]
    found = four(cases, Path(folder))
    Path(folder, "found.pickle").write_bytes(pickle.dumps(found))
