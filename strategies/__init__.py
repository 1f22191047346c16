"""The strategies of the methods: a class for each method that does more than average shared arrays."""
