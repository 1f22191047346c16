"""The client sides of the methods: a class with the name of each method whose clients do more than train."""
