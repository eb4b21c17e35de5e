"""From 16 or 32 bits to FP8 operands."""
