"""Declarations of the methods that are included in fedhet."""
