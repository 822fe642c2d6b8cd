"""One file per solver; `base` has the common part."""
