"""The runtime guard: compares a few rows of live results with exact attention."""
