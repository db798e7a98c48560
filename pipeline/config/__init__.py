"""The settings of one job: typed, frozen, checked before anything starts.

A config is one YAML file; flags override its keys. Each key is declared once, in `sections.py`, with its type, bounds, default
and one-line help, and becomes a flag of the same name (`score_threshold` -> `--score-threshold`), so `--help`, the file and the
code can't disagree. `checked.py` is what a declaration means; `load.py` puts file and flags together.
"""

from pipeline.config.load import load_config as load_config
from pipeline.config.sections import BUNDLED as BUNDLED
from pipeline.config.sections import OF_RELEASES as OF_RELEASES
from pipeline.config.sections import Config as Config
from pipeline.config.sections import DetectConfig as DetectConfig
from pipeline.config.sections import ModelConfig as ModelConfig
from pipeline.config.sections import ReadConfig as ReadConfig
from pipeline.config.sections import StreamConfig as StreamConfig
from pipeline.config.sections import WorkerConfig as WorkerConfig
from pipeline.config.sections import WriteConfig as WriteConfig
from pipeline.config.sections import settings as settings
from pipeline.config.setting import Setting as Setting
