"""TensorFlow is loaded without what no engine uses, and what it left out is there for who asks."""

from __future__ import annotations

import subprocess
import sys

import pytest

SAYS = """
import sys
from mesh_tf_core.engines import prepare
prepare(2, "local")
print(sorted({"keras", "pandas", "matplotlib", "jax", "h5py"} & set(sys.modules)))
"""
LATER = """
import jax, h5py
print(int(jax.numpy.arange(4).sum()), h5py.File.__name__)
"""
KERAS = """
import tensorflow as tf
print(tf.keras.layers.Dense.__name__, float(tf.keras.losses.MeanSquaredError()([1.0], [3.0])))
"""


def printed(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_what_nobody_asked_for_is_not_loaded() -> None:
    assert printed(SAYS) == ["[]"]


@pytest.mark.nightly
def test_what_was_left_out_is_there_for_who_asks() -> None:
    assert printed(f"{SAYS}\n{LATER}")[-1] == "6 File"


@pytest.mark.nightly
def test_keras_is_loaded_where_it_is_used() -> None:
    assert printed(f"{SAYS}\n{KERAS}")[-1] == "Dense 4.0"
