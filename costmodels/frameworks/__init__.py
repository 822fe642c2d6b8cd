"""Frameworks: the training software of a step, which decides how fast a chip runs it and what it holds."""

from costmodels.frameworks.framework import KINDS, Framework, Overlay, Variant
from costmodels.frameworks.load import DEFAULT, FrameworkError, framework_names, load_framework, merged
