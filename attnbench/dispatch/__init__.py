"""One call: the question, the context, the memory of choices, and the operators of torch.compile."""
