"""Whether kernels in Triton can run; the second runner needs that."""

HAS_TRITON = True
