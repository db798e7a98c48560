"""The settings of one job: typed, frozen, and checked before the job starts.

A config is one YAML file; flags override its keys. `sections.py` declares each key once, with its type, bounds, default and
one-line help. Its flag has the same name (`score_threshold` -> `--score-threshold`). `setting.py` defines the types;
`load.py` merges file and flags.
"""

from pipeline.config.load import check_applies as check_applies
from pipeline.config.load import check_model_is_named as check_model_is_named
from pipeline.config.load import load_config as load_config
from pipeline.config.load import load_monitoring as load_monitoring
from pipeline.config.sections import BUNDLED as BUNDLED
from pipeline.config.sections import Config as Config
from pipeline.config.sections import DetectConfig as DetectConfig
from pipeline.config.sections import ModelConfig as ModelConfig
from pipeline.config.sections import MonitoringConfig as MonitoringConfig
from pipeline.config.sections import ReadConfig as ReadConfig
from pipeline.config.sections import StreamConfig as StreamConfig
from pipeline.config.sections import WriteConfig as WriteConfig
from pipeline.config.sections import settings as settings
