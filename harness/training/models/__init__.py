"""The models that are trained, and their parts."""
