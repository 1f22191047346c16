"""The server sides of the methods: a class with the name of each method that does more than average."""
