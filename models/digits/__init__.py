"""The bundled detector: a small single-shot detector of handwritten digits on cluttered pages."""
