"""Where memory lies in guests with HBM: python -m benchmarks.placement"""
