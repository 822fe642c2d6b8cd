"""PyTorch modules as models: a reader in front of `importers.arrays`.

internals   what is asked of PyTorch itself
capture     a module and its loss as a graph of ATen operations, by torch.export
emitter     equations of `importers.arrays`, one call for each
reader      the graph as a program: arguments, writes in place, autocast, lines of the user's code
elementwise, shapes, products, indexing
            what every ATen operation becomes
masks       which keys an attention hides, of masks that are made of positions alone
model       `from_torch`
ranks       what is done over each axis of a plan's mesh, and the split of every parameter
styles      the dimensions that DTensor's styles split
parallelize, synced, step, torch_plan
            the way back: `plan.torch`
"""
