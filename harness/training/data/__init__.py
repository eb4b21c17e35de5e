"""What the models learn from."""
