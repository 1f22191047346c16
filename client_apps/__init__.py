"""The methods' client sides: a class named after each method whose clients do more than train and send weights."""
