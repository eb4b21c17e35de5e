"""What is asked: the spec, the mask, dtypes and FP8 numbers, and the way from tensors to a spec."""
