"""How long a test waits for what should end soon: too long for a busy machine to reach, so that only a hang does."""

PATIENCE = 600.0  # seconds
