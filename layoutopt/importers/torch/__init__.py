"""PyTorch modules as models."""
