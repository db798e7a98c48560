"""The bundled detector of handwritten digits on cluttered pages: a folder of versions, with its model card and sample scenes."""

import os

FOLDER = os.path.dirname(os.path.abspath(__file__))
