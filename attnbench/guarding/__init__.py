"""The runtime guard: a few rows of live answers beside exact attention."""
