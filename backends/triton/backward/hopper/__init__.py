"""The FP8 backward for Hopper, in Gluon."""
