"""For authors of kernels, and for attnbench itself: what proves that a fault would be noticed."""

from .conformance import check_backend
from .conformance_report import Finding, Report

__all__ = ["Finding", "Report", "check_backend"]
