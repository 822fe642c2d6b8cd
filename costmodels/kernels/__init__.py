"""The work of one device: kernels, the work of each kernel, its seconds."""
