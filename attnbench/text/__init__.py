"""Text that people read: numbers, causes of failures, and values from anywhere made safe to print."""
