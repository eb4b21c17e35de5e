"""Real tensors: the Q, K, V (and dO) of a program's attention calls, recorded into a file and read from it."""
