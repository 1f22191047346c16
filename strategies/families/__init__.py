"""What the strategies of several methods share."""
