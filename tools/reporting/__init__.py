"""The report of a run: `reading` its files, `figures` and `sections` of them, one `page`."""
