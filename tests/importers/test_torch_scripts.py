"""Training steps as people write them: imported, searched, and applied on two processes, or refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import layoutopt
from mesh_tf_core import Options

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.importers.torch_ranks import on_ranks  # noqa: E402
from tests.importers.torch_scripts import SCRIPTS  # noqa: E402

COMBINE = {"CLIP": "range", "value head": "div"}
"""Scripts whose loss combines examples, and the operation by which: each rank has the loss of its own."""


def made(name: str) -> Any:
    torch.manual_seed(0)
    return SCRIPTS[name]()


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.one_in(8)
def test_a_script_is_imported_with_its_loss_and_parameters(name: str) -> None:
    module, batch = made(name)
    model = layoutopt.from_torch(module, batch)
    assert model.parameters == sum(p.numel() for p in module.parameters() if p.requires_grad)
    said = " ".join(model.notes(Options()))
    assert ("combines examples" in said) == (name in COMBINE), said
    assert COMBINE.get(name, "") in said
    assert "does not run" not in said or name == "whisper", said  # its code has the number of heads in it


def searched() -> dict[str, tuple[Any, ...]]:
    """Name -> (plan.torch, module, batch) for two devices."""
    found = dict[str, tuple[Any, ...]]()
    for name in [n for n in SCRIPTS if n not in COMBINE]:
        module, batch = made(name)
        model = layoutopt.from_torch(module, batch)
        asked = {"hardware": "h100", "framework": "torch", "alternatives": False}
        plan = layoutopt.search(model, mesh="data:2", pins="batch:data", **asked)
        assert plan.to_json()["solver"]["status"] == "OPTIMAL", name
        found[name] = plan.torch, module, batch
    return found


@pytest.mark.nightly
def test_plans_of_scripts_train_as_one_process_does(tmp_path: Path) -> None:
    # In a process of its own: ranks are forked, and other tests of this one have threads of JAX.
    command = [sys.executable, "-m", __name__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    for name, ranks in pickle.loads((tmp_path / "found.pickle").read_bytes()).items():
        for found in ranks:
            assert found.loss < 1e-6 and found.gradient < 1e-5, (name, found)
            assert not found.misplaced, (name, found)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "found.pickle").write_bytes(pickle.dumps(on_ranks(searched(), folder, 2)))
