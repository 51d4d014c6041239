"""Say what becomes of users' code under a sharding wrapper, row by row.

    python -m pytest tests/behaviours --wrapper PACKAGE.FUNCTION

`wrappers` finds the wrapper, `rows` says what a row is, `training`, `calls` and `state` have the rows,
`verdicts` runs one on ranks and prints the table, `faults` has wrong wrappers that rows must
notice. `docs/behaviours.md` has the words, and a print of the table.
"""
