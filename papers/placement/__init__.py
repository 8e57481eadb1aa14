"""Where memory lies in guests with HBM: python -m papers.placement"""
