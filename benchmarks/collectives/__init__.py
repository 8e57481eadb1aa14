"""Collectives: more contenders, loops below Python, and two nodes."""
