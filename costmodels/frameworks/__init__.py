"""Frameworks: the training software of a step, which decides how fast a chip runs it and what it holds."""

from costmodels.frameworks.framework import (
    DEFAULT,
    KINDS,
    Framework,
    FrameworkError,
    Overlay,
    Variant,
    framework_names,
    load_framework,
    merged,
)
