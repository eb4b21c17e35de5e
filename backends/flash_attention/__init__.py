"""FlashAttention 2, 3 and 4, from every distribution that has them."""
