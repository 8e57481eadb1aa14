"""The placement of memory in guests with HBM: python -m papers.placement"""
