"""Files: replaced whole, checked when read, and where a user keeps them."""
