"""Starts jobs: checks every place first, builds the graph, runs it, and says how it went."""
