"""One call: the question, the context, the memory of choices, the operators of torch.compile, and the ring."""
