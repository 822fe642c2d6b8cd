"""The work of one device: which operations share a kernel, what each kernel does, its seconds."""
