"""What is measured: named specs and the tensors that they are measured on, from presets and from files."""
