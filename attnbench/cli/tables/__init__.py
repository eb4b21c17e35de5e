"""The commands about tables: building, showing, checking and sharing them."""
