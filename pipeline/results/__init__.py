"""The results folder: its layout, runs and their states, leases, the ledger of what has been done."""
