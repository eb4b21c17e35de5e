"""What a program asks of attention, measured beside it within a time, and added to the user's table."""
