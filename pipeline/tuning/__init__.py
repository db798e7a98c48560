"""Finds the settings with which this machine detects fastest: `search.py` compares candidates, each a process of `trial.py`."""
