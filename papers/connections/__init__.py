"""Connections to a memory box and threads on them: Zhang and Jung 2017, Figs. 2 to 4."""
