"""The page that tells a person how a run went."""
