"""The FP8 backward: what it follows, the launch, and the kernels for any GPU."""
