"""Execution: jobs, the processes and clusters that run them, and the files that they write."""
