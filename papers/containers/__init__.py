"""Ranks divided over containers, beside the same ranks on the host: Woo et al. 2020, Table 5."""
