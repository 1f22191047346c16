"""What the client sides of several methods share."""
