"""The fault matrix: what the others see when something breaks, at each moment of a job.

`matrix` is the table, from which `page` draws a section of docs/failures.md. `job` runs a cell of
it with real processes, `ranks` is what these do, and `judge` compares what they saw with the table.
"""
