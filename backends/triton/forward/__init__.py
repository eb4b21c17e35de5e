"""The FP8 forward: its kernels by recipe, the launch, and the kernel for any GPU."""
