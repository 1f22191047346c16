"""The declarations of the methods that come with fedhet, one file each."""
