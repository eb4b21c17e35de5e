"""For authors of kernels, and for attnbench itself: what proves that a fault would be noticed."""

from .conformance import Report, check_backend

__all__ = ["Report", "check_backend"]
