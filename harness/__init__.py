"""The bench: cases, inputs, timing, accuracy, records and the sweep that ties them together."""
