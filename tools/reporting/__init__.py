"""The report of a run: `reading` the run's files → `figures` and `sections` → one `page`. Used by report.py."""
