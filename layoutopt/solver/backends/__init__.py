"""One file per solver; `base` is what they share."""
