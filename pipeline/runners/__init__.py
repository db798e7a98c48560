"""The runners: what each can do (`table.py`), and what this project adds to Beam's."""
