"""attnbench behind the names that other libraries call attention by.  Each module needs its library, and no other."""
