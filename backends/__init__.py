"""Backend families, one module each; each names its ``BACKEND`` under the entry-point group ``attnbench.backends``."""
