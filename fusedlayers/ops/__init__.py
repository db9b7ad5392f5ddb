"""One file an op: its plain-PyTorch composition, its `autograd.Function` over kernels, and the route a call takes."""
