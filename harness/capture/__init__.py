"""Captured tensors: record the Q, K, V (and dO) of a program's attention calls to a file, and read it."""
