"""How the bundled detector was made: drawn scenes, training, measuring. Nothing here runs when the detector does."""
