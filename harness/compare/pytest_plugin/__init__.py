"""The pytest plug-in: a plan measured in a test, and gated there."""
