"""The runtime: named dimensions, graphs of operations, lowering to SPMD programs, engines that run them."""
