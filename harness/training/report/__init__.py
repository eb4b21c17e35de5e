"""What training runs have to say."""
