"""The cases of a sweep: named specs and their input tensors, from presets and from files."""
