"""Training of the bundled detector, and its scenes. The detector itself needs none of this."""
