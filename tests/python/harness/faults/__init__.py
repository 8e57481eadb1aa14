"""The fault matrix: the results of the other ranks after a fault, at each moment of a job.

`matrix` is the table, from which `page` draws a section of docs/failures.md. `job` runs a cell of
the table with real processes, `ranks` has the processes' code, and `judge` compares their results
with the table.
"""
