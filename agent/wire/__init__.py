"""What agents and workers both speak: variable names, exit codes, messages."""
