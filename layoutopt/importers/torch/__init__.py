"""PyTorch modules as models (`model`), a reader in front of `importers.arrays`; and back (`torch_plan`)."""
