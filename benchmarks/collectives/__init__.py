"""Collectives: more contenders, loops in native programs, and several nodes."""
