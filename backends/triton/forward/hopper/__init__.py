"""The FP8 forward for Hopper, in Gluon."""
