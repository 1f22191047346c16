"""Declarations of federated methods (`Method`, `Traits`, `Sharing`), configuration keys, and the method registry."""
