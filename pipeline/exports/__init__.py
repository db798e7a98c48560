"""Rows of a results folder in other formats."""
