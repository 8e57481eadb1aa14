"""Collectives: more contenders, loops below Python, and several nodes."""
