"""The timeout of tests for events that should come soon: only a hang reaches it, even on a busy machine."""

PATIENCE = 600.0  # seconds
