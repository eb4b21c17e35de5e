"""For authors of kernels, and for attnbench itself: what proves that a fault would be noticed."""

from .conformance.report import Finding, Report
from .conformance.suite import check_backend

__all__ = ["Finding", "Report", "check_backend"]
