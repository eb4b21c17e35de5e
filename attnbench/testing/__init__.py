"""For authors of kernels, and for attnbench itself: what proves that a fault would be noticed."""
