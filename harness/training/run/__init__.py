"""One training run: its steps, its state, and its process."""
