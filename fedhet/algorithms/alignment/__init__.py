"""Alignment of clients' representations: similarities such as CKA, and the targets of FedHeNN and FedHARM."""
