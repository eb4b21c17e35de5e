"""What several backends share."""
