"""Reproducible choices: a run's choices in a file."""
