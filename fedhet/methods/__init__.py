"""Methods: their declaration (`Method`, `Traits`), their keys (`option`), what they share, and the registry."""
