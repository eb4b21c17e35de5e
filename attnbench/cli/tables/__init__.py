"""The commands about tables: build, show, check and share them."""
