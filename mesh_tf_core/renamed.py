"""Names of Mesh-TensorFlow that are others here, for errors; docs/guides/mesh_tensorflow.md lists all."""

import json
from collections.abc import Mapping
from pathlib import Path

RENAMED: Mapping[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Mesh-TensorFlow's name -> name in this library, both after `mtf.`."""
