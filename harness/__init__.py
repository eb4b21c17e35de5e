"""The harness: cases, inputs, timing, accuracy, records, and the sweep that runs them."""
