"""Model files: found, loaded, given hyperparameters."""
