"""Ranks divided over containers, compared with ranks on the host: Woo et al. 2020, Table 5."""
